"""A tiny network that makes pictures four times as wide and as high, from file to file, as one process does it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import vramfit

TILE, HALO, SCALE = 512, 2, 4


def network() -> nn.Module:
    """A convolution that sees the neighbours, one for the pixels between them, and their arrangement."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3 * SCALE**2, 1), nn.PixelShuffle(SCALE)
    ).eval()


def write_picture(path: Path, side: int) -> None:
    """A square picture of three channels in eight bits, row by row."""
    made = np.lib.format.open_memmap(path, "w+", np.uint8, (3, side, side))
    for row in range(0, side, 512):
        numbers = np.random.default_rng(row)
        made[:, row : row + 512] = numbers.integers(0, 256, made[:, row : row + 512].shape, dtype=np.uint8)
    made.flush()


def enlarge(source: Path, target: Path, journal: Path | None) -> None:
    vramfit.tiled(
        network(),
        source,
        tile=TILE,
        halo=HALO,
        reduce="uint8",
        prepare=lambda batch: batch.float() / 255,
        out=target,
        journal=journal,
    )


def resident(name: str) -> int:
    """Bytes of this process by a line of its status: ``VmRSS``, or the most so far, ``VmHWM``."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def main() -> None:
    source, target, journal = map(Path, sys.argv[1:4])
    torch.set_num_threads(1)
    network()(torch.zeros(1, 3, 8, 8))  # what libraries load at their first use is theirs
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the most so far begins anew
    before, began = resident("VmRSS"), time.perf_counter()
    print("began", flush=True)
    enlarge(source, target, journal)
    print(f"{resident('VmHWM') - before} {time.perf_counter() - began:.1f}")


if __name__ == "__main__":
    main()
