"""What a piece of inference takes on a virtual card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

import vramfit

CARD = "RTX 4090"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What one piece of inference took.

    Attributes:
        allocated, reserved: most bytes on the card, the model's among them.
        pinned: most bytes of pinned memory on the host.
        seconds: simulated, from the model on the card to all of the result where it was to go; work of the host counts
            nothing.
    """

    allocated: int
    reserved: int
    pinned: int
    seconds: float


def measured(make: Callable[[], nn.Module], use: Callable[[nn.Module], object]) -> Taken:
    """Make a model on a virtual card, use it, and say what that took."""
    with vramfit.VirtualGPU(CARD) as gpu:
        model = make().eval().cuda()
        torch.cuda.synchronize()
        began = gpu.run.seconds_simulated
        with torch.inference_mode():
            use(model)
        torch.cuda.synchronize()
        run = gpu.run
    device = run.devices[0]
    return Taken(
        allocated=device.peak_allocated_bytes,
        reserved=device.peak_reserved_bytes,
        pinned=run.host_pinned_peak_bytes,
        seconds=run.seconds_simulated - began,
    )


def row(name: str, taken: Taken) -> str:
    """A row of a Markdown table."""
    mib = (taken.allocated, taken.reserved, taken.pinned)
    cells = " | ".join(f"{size / 2**20:,.1f}" for size in mib)
    return f"| {name} | {cells} | {taken.seconds * 1e3:,.1f} |"


HEAD = "| | allocated, MiB | reserved, MiB | pinned, MiB | simulated, ms |\n|---|---:|---:|---:|---:|"
