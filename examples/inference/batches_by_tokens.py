"""Texts of very different lengths through an encoder, in batches as large as memory allows, results in order.

    python examples/inference/batches_by_tokens.py [--texts 500] [--budget 64MiB]

What a batch takes is measured for a few shapes, on the device or, without a card, by its largest tensors; a bound that
never falls is laid above it.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn

import vramfit


class Encoder(nn.Module):
    """A small encoder; a text's embedding is the mean of its tokens'."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, width, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        hidden = self.layer(self.embed(tokens), src_key_padding_mask=padding)
        return hidden.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True)


def peak(items: int, length: int, width: int = 64) -> int:
    """Bytes of the widest layer and of the attention scores of a batch, in float32."""
    return 4 * items * (6 * length * width + 4 * length * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--budget", default="64MiB", help="what a batch may take")
    options = parser.parse_args()
    draw = random.Random(0)
    texts = [
        [draw.randrange(1, 1000) for _ in range(min(1024, int(draw.lognormvariate(4, 1)) + 1))]
        for _ in range(options.texts)
    ]
    torch.manual_seed(0)
    model = Encoder().eval()
    plan = vramfit.batches(texts, length=len, peak=peak, budget=options.budget)
    results = plan.ordered()
    with torch.inference_mode():
        for batch in plan:
            tokens = torch.zeros(len(batch), max(len(texts[number]) for number in batch), dtype=torch.long)
            for row, number in enumerate(batch):
                tokens[row, : len(texts[number])] = torch.tensor(texts[number])
            results.add(batch, list(model(tokens)))
    embeddings = torch.stack(results.all())
    print(f"{tuple(embeddings.shape)} embeddings in the order of the texts")


if __name__ == "__main__":
    main()
