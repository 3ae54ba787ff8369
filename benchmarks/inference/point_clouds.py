"""A point cloud on a virtual card, as a whole and in blocks, and the difference of the values on the CPU.

    python benchmarks/inference/point_clouds.py [--gpu NAME]

The network passes messages between all points within a radius, twice, and holds what lies between every pair, as plain
PyTorch code does without a neighbour search. Blocks hold all points within the two radii together. Bytes are those of
tensors on the virtual card, and exact; values are of a smaller cloud on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import vramfit
from vramfit.inference.point_blocks import PointSettings, call_by_blocks, point_blocks

RADIUS = 0.02
MIB = 1 << 20


class Messages(nn.Module):
    """Each point gets the sum over all within the radius, twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, width), nn.Linear(3 + width, width)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        places, x = points[:, :3], points[:, 3:]
        near = (torch.cdist(places, places) <= RADIUS).to(points.dtype)
        for layer in (self.first, self.second):
            x = (near @ layer(torch.cat([places, x], 1))).tanh()
        return x


def street(points: int) -> torch.Tensor:
    """A cloud that is dense near the ground and thin above, with colours."""
    generator = torch.Generator().manual_seed(0)
    cloud = torch.rand(points, 6, generator=generator)
    cloud[:, 2] = cloud[:, 2] ** 4
    return cloud


def settings(most_points: int, device: str | None) -> PointSettings:
    return PointSettings(
        radius=2 * RADIUS,
        most_points=most_points,
        device=None if device is None else torch.device(device),
        output_device=torch.device("cpu"),
    )


def on_card(gpu: str, points: int, most_points: int) -> tuple[int, float]:
    """Peak of tensors, and simulated seconds."""
    with vramfit.VirtualGPU(gpu, alloc_conf=""):
        model, cloud = Messages().cuda().eval(), street(points)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call_by_blocks(model, cloud, settings(most_points, "cuda"))
        end.record()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), begin.elapsed_time(end) / 1e3


def difference(points: int, most_points: int) -> float:
    """The largest difference of a value, as a part of the largest value."""
    torch.manual_seed(0)
    model, cloud = Messages().double().eval(), street(points).double()
    with torch.no_grad():
        whole = model(cloud)
    found = call_by_blocks(model, cloud, settings(most_points, None))
    return float((found - whole).abs().max() / whole.abs().max())


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--points", type=int, default=40_000)
    given = parser.parse_args()
    table = Table(title=f"{given.points:,} points, {given.gpu}")
    for name in ("points of a block", "blocks", "peak MiB", "s (simulated)"):
        table.add_column(name, justify="right")
    for most_points in (given.points, 8_000, 4_000, 2_000):
        peak, seconds = on_card(given.gpu, given.points, most_points)
        blocks = len(list(point_blocks(street(given.points)[:, :3], settings(most_points, None))))
        table.add_row(f"{most_points:,}", str(blocks), f"{peak / MIB:,.1f}", f"{seconds:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"float64 on the CPU, 4,000 points in blocks of 1,000: {difference(4_000, 1_000):.1e} of the largest"
    )
    million = street(1_000_000)[:, :3]
    began = time.perf_counter()
    count = len(list(point_blocks(million, settings(20_000, None))))
    console.print(
        f"cutting 1,000,000 points into {count} blocks: {time.perf_counter() - began:.1f} s on this machine"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
