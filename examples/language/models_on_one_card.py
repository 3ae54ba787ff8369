"""Six models on one card that has room for some of them: each request finds its model there.

    python examples/language/models_on_one_card.py [--requests 60] [--budget 6MiB]
    vramfit run --gpu "RTX 4090" examples/language/models_on_one_card.py

The models lie in pinned host memory. While all that are used fit, none leaves; then those leave whose return is the
cheapest. Weights are not copied back. Without a card the same runs on the CPU, which is then the device.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import nn

import vramfit

WIDTHS = {"router": 32, "embedder": 64, "ranker": 96, "drafter": 128, "chat": 384, "code": 512}


def build(width: int) -> nn.Module:
    """A small transformer in evaluation mode."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--budget", default="40MiB", help="for weights and requests")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {name: build(width) for name, width in WIDTHS.items()}
    chance = random.Random(0)
    popular = [1 / rank for rank in range(1, len(models) + 1)]
    with vramfit.ModelPool(models, device=device, budget=options.budget, request_bytes="4MiB") as pool:
        for name in chance.choices(list(models), popular, k=options.requests):
            with pool.use(name) as model, torch.inference_mode():
                model(torch.randn(2, 16, WIDTHS[name], device=device))
        print(f"{options.requests} requests: {pool.loads} loads, {pool.evictions} models left for others")
        print(f"{pool.moved_bytes / 2**20:.1f} MiB moved; there now: {', '.join(pool.resident)}")


if __name__ == "__main__":
    main()
