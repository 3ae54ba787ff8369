"""A service that answers requests of any length: one that is too large is answered in parts, the next ones as ever.

python examples/survive/surviving_service.py
vramfit run --gpu "RTX 3060" examples/survive/surviving_service.py --limit 1
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import vramfit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limit", type=float, help="GiB that torch may reserve on the card")
    parser.add_argument("--most", type=int, default=2_000, help="rows of the largest request")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.limit and device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.limit * 2**30 / total)
    model = nn.Sequential(
        nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 8)
    )
    model = model.eval().to(device)

    @vramfit.survive(model)
    def answer(rows: torch.Tensor) -> torch.Tensor:
        return model(rows.to(device)).softmax(-1).cpu()

    for rows in (given.most // 100, given.most, given.most // 10):
        found = answer(torch.rand(rows, 256))
        print(f"{len(found):,} rows answered")
    for event in answer.survivor.events:
        print(event.kind, event.rung.value, f"{event.pieces} parts" if event.pieces > 1 else "")


if __name__ == "__main__":
    main()
