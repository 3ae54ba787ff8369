"""A picture four times as wide and as high, from file to file, whatever its size.

    python examples/inference/tiled_superresolution.py IN.npy OUT.npy

reads eight-bit channels ``[3, height, width]`` and writes ``[3, 4 * height, 4 * width]``. Neither file is in memory as
a whole. Stop it with Ctrl-C, or kill it, and start it again: it goes on where it was. Without files it makes a small
picture to try. It runs on a card where there is one, and the network is a stand-in for a trained one.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import vramfit


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 3 * 4**2, 3, padding=1),
        nn.PixelShuffle(4),
    ).eval()


def enlarge(source: Path, target: Path, tile: int) -> np.ndarray:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: np.ndarray = vramfit.tiled(
        network().to(device),
        source,
        tile=tile,
        halo=4,  # 2 + 1 + 1: how far a pixel sees through the three convolutions
        prepare=lambda tiles: tiles.float() / 255,  # on the device: eight bits travel
        reduce="uint8",
        out=target,
        journal=True,
        progress=True,
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", help="a .npy file of uint8, [3, height, width]")
    parser.add_argument("target", type=Path, nargs="?", help="the .npy file to be made")
    parser.add_argument(
        "--tile", type=int, default=256, help="pixels that the network is given along each side"
    )
    options = parser.parse_args()
    if options.source is not None and options.target is None:
        parser.error("give the file to be made too")
    with tempfile.TemporaryDirectory() as folder:
        source, target = options.source, options.target
        if source is None:
            source, target = Path(folder, "picture.npy"), Path(folder, "larger.npy")
            numbers = np.random.default_rng(0)
            np.save(source, numbers.integers(0, 256, (3, 300, 400), dtype=np.uint8))
        result = enlarge(source, target, options.tile)
        print(f"{target.name}: {result.shape}, {result.dtype}")


if __name__ == "__main__":
    main()
