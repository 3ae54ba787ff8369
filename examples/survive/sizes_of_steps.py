"""A training on texts of very different lengths: the largest batch before it, and a size for each step within it.

    python examples/survive/sizes_of_steps.py [--steps 30]

Without a card it runs on a virtual one, where nothing is computed and memory is the same.
"""

from __future__ import annotations

import argparse
import contextlib
import random

import torch
from torch import nn

import vramfit

LONGEST = 256
SEGMENTS = "expandable_segments:True"
"""On a card: PYTORCH_ALLOC_CONF=expandable_segments:True, since batches of ever new shapes leave gaps otherwise."""


class Tagger(nn.Module):
    """A small encoder that says one of 16 tags for each token."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.out = nn.Linear(width, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(tokens)))


def train(steps: int) -> None:
    model = Tagger().cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: torch.Tensor) -> None:
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten() % 16).backward()
        optimizer.step()
        optimizer.zero_grad()

    def longest(size: int) -> torch.Tensor:
        return torch.ones(size, LONGEST, dtype=torch.long, device="cuda")

    found = vramfit.largest_batch(step, longest, model=model, optimizer=optimizer, predict="never", steps=2)
    print(f"{found.size} texts of {LONGEST} tokens fit, found in {len(found.trials)} trials")

    controller = vramfit.BatchController("cuda", start=found.size)
    draw = random.Random(0)
    for number in range(steps):
        length = draw.randint(8, LONGEST)
        size = controller.size(length)
        with controller.step(size, length):
            step(torch.ones(size.items, length, dtype=torch.long, device="cuda"))
        if number % 10 == 9:
            assert controller.reading is not None
            print(
                f"step {number}: {size.items:,} texts of {length} tokens, bound by {size.bound_bytes:,} of "
                f"{controller.reading.room:,} bytes; neighbours hold {controller.reading.neighbours:,}"
            )
    print(f"{steps} steps, {controller.shortages} out of memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    here = (
        contextlib.nullcontext()
        if torch.cuda.is_available()
        else vramfit.VirtualGPU("1GiB", alloc_conf=SEGMENTS)
    )
    with here:
        train(arguments.steps)


if __name__ == "__main__":
    main()
