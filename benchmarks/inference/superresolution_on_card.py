"""A picture of 8,192 x 8,192 four times as wide and as high, from file to file, on a virtual card.

Two networks: the tiny one of superresolution.py, over the whole picture, and one of the size of EDSR's baseline (Lim et
al., 2017: 16 residual blocks of 64 channels, 1.5 million parameters), over its first 50 tiles: each takes the same, and
the time is scaled to all of them.

    python benchmarks/inference/superresolution_on_card.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import vramfit
from inference.measuring import CARD, HEAD, measured, row
from inference.superresolution import HALO, TILE, network
from vramfit.inference.arrays import Blank
from vramfit.inference.tile_settings import TileSettings
from vramfit.inference.tiled_inference import make_job, rehearse

SIDE, FIRST = 8192, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(64, 64, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class Edsr(nn.Module):
    """A value of the result sees 36 pixels of the input to each side."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 64, 3, padding=1)
        self.body = nn.Sequential(*(Block() for _ in range(16)), nn.Conv2d(64, 64, 3, padding=1))
        grow = (nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2))
        self.tail = nn.Sequential(
            *grow, nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(64, 3, 3, padding=1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        return self.tail(x + self.body(x))


def enlarging(folder: Path, tile: int, halo: int) -> Callable[[nn.Module], object]:
    def use(model: nn.Module) -> object:
        return vramfit.tiled(
            model,
            folder / "in.npy",
            tile=tile,
            halo=halo,
            stride=1,
            reduce="uint8",
            prepare=lambda batch: batch.float() / 255,
            out=folder / "out.npy",
        )

    return use


def first_tiles(tile: int, halo: int) -> Callable[[nn.Module], object]:
    def use(model: nn.Module) -> object:
        settings = TileSettings(
            tile=tile, halo=halo, stride=1, reduce="uint8", prepare=lambda batch: batch.float() / 255
        )
        picture = Blank((3, SIDE, SIDE), torch.uint8)
        return rehearse(make_job(model, picture, settings), FIRST)

    return use


def main() -> None:
    print(f"{CARD}, {SIDE} x {SIDE} to {4 * SIDE} x {4 * SIDE}, eight bits:\n\n{HEAD}")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        np.lib.format.open_memmap(folder / "in.npy", "w+", np.uint8, (3, SIDE, SIDE)).flush()
        taken = measured(network, enlarging(folder, TILE, HALO))
        print(row(f"tiny, tiles of {TILE}", taken), flush=True)
    for tile in (144, 160):
        settings = TileSettings(tile=tile, halo=36, stride=1)
        total = make_job(network(), Blank((3, SIDE, SIDE)), settings).layout.total
        taken = measured(Edsr, first_tiles(tile, 36))
        scaled = replace(taken, seconds=taken.seconds * total / FIRST)
        print(row(f"EDSR, {total:,} tiles of {tile}", scaled), flush=True)


if __name__ == "__main__":
    main()
