"""A U-Net over a volume: MONAI's sliding windows in each of their modes beside `vramfit.tiled`, on a virtual card.

MONAI's UNet (1 to 8 channels, 4.8 million parameters) over 160 x 160 x 160, windows of 64, overlap 0.25, float32. Bytes
are those of the card, times are simulated for one card, and the host's own work (MONAI's and ours: adding up on the
host) counts nothing in them. Then a small UNet for real on the CPU, whose results are compared bit by bit.

    python benchmarks/inference/monai_tiles.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from monai.inferers import sliding_window_inference
from monai.networks.nets import UNet

import vramfit
from inference.measuring import CARD, HEAD, Taken, measured, row

SIDE, ROI, OVERLAP, OUTPUTS = 160, 64, 0.25, 8


def unet(channels: tuple[int, ...] = (16, 32, 64, 128, 256)) -> nn.Module:
    torch.manual_seed(0)
    strides = (2,) * (len(channels) - 1)
    return UNet(3, 1, OUTPUTS, channels=channels, strides=strides, num_res_units=2)


def monai(batch: int = 1, **how: Any) -> Callable[[nn.Module], object]:
    def use(model: nn.Module) -> object:
        place = "cpu" if "sw_device" in how else "cuda"
        x = torch.zeros(1, 1, SIDE, SIDE, SIDE, device=place)
        return sliding_window_inference(x, (ROI,) * 3, batch, model, OVERLAP, **how)

    return use


def ours(**how: Any) -> Callable[[nn.Module], object]:
    def use(model: nn.Module) -> object:
        x = torch.zeros(1, 1, SIDE, SIDE, SIDE)
        return vramfit.tiled(model, x, tile=ROI, overlap=OVERLAP, **how)

    return use


HOST = {"sw_device": "cuda", "device": "cpu"}
MODES: dict[str, Callable[[nn.Module], object]] = {
    "one bare tile": lambda model: model(torch.zeros(1, 1, ROI, ROI, ROI, device="cuda")),
    "MONAI, stitched on the card": monai(),
    "MONAI, batch 4": monai(4),
    **{
        f"MONAI, buffered on the card, {steps} steps": monai(buffer_steps=steps, buffer_dim=0)
        for steps in (1, 2, 3)
    },
    **{
        f"MONAI, buffered, to the host, {steps} steps": monai(buffer_steps=steps, buffer_dim=0, **HOST)
        for steps in (1, 2, 3)
    },
    "MONAI, buffered, to the host, last axis": monai(buffer_steps=1, buffer_dim=-1, **HOST),
    "MONAI, stitched on the host": monai(**HOST),
    "MONAI, stitched on the host, batch 4": monai(4, **HOST),
    "tiled": ours(),
    "tiled, batch 2": ours(tile_batch=2),
    "tiled, batch 4": ours(tile_batch=4),
    "tiled, Gaussian": ours(blend="gaussian"),
    "tiled, labels": ours(reduce="argmax"),
    "tiled, stitched on the card": ours(stitch="device"),
    "tiled, stitched on the card, labels": ours(stitch="device", reduce="argmax"),
}


def better(taken: Taken, than: Taken) -> bool:
    """Whether something takes less memory and less time than another."""
    return taken.allocated <= than.allocated and taken.seconds <= than.seconds


def bitwise() -> str:
    """Results of a small network on the CPU, compared with MONAI's."""
    model = unet((4, 8, 8)).eval()
    x = torch.randn(1, 1, 40, 40, 40, generator=torch.Generator().manual_seed(0))
    count = 0
    for mode in ("constant", "gaussian"):
        for batch in (1, 4):
            with torch.no_grad():
                expected = sliding_window_inference(x, (16,) * 3, batch, model, OVERLAP, mode=mode)
            found = vramfit.tiled(model, x, tile=16, overlap=OVERLAP, blend=mode, tile_batch=batch)
            count += int((found != expected).sum())
    return f"{count} of {4 * expected.numel():,} values differ from MONAI's (constant and Gaussian, batch 1 and 4)"


def main() -> None:
    print(f"{CARD}, {SIDE}^3, windows of {ROI}, overlap {OVERLAP}, {OUTPUTS} outputs:\n\n{HEAD}")
    found = {}
    for name, use in MODES.items():
        found[name] = measured(unet, use)
        print(row(name, found[name]), flush=True)
    plain = found["tiled"]
    beaten = [name for name, taken in found.items() if name.startswith("MONAI") and better(taken, plain)]
    print(f"\nMONAI's modes that are no worse than tiled in both: {', '.join(beaten) or 'none'}")
    print(bitwise())


if __name__ == "__main__":
    main()
