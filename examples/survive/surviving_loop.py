"""A training loop that outlives running out of memory: every batch is trained on once, whatever it takes.

    python examples/survive/surviving_loop.py                      # on the CPU, or on the card that is there
    vramfit run --gpu "RTX 3060" examples/survive/surviving_loop.py  # without a card

Texts have very different lengths, and some batches are too large. The loop says what was done about it.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn

import vramfit

WORDS, WIDTH = 5_000, 256


class Reader(nn.Module):
    """A small transformer that tells the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        return self.head(self.layers(self.embed(ids), mask=mask, is_causal=True))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["ids"][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, help="GiB that torch may reserve on the card")
    parser.add_argument("--longest", type=int, default=128)
    given = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.limit and device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit * 2**30 / total)
    model = Reader().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    lengths = [given.longest // 8, given.longest // 2, given.longest, given.longest // 4]
    with vramfit.survive(model, optimizer, loss=loss, scheduler=schedule, clip_norm=1.0) as survivor:
        for step, length in enumerate(lengths):
            batch = {"ids": torch.randint(0, WORDS, (16, length + 1))}
            value = survivor.step(batch)
            print(f"step {step}: {length} words, loss {float(value):.3f}")
    print(f"{survivor.steps} steps, {len(survivor.events)} events")


if __name__ == "__main__":
    main()
