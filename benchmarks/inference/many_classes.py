"""Labels of 100 classes: a volume of 384^3 on a virtual card, and one of 192^3 for real on the CPU.

MONAI's SegResNet (8 filters, 100 classes), windows of 128, overlap 0.25, float32; labels are computed on the fly. On
the CPU they are compared with the largest class of MONAI's whole sum.

    python benchmarks/inference/many_classes.py [--real 192] [--roi 128]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from monai.inferers import sliding_window_inference
from monai.networks.nets import SegResNet

import vramfit
from inference.measuring import CARD, HEAD, measured, row
from vramfit.inference.tile_settings import Stitch, TileSettings
from vramfit.inference.tiled_inference import make_job, rehearse

CLASSES, OVERLAP = 100, 0.25


def network() -> nn.Module:
    torch.manual_seed(0)
    return SegResNet(spatial_dims=3, init_filters=8, in_channels=1, out_channels=CLASSES).eval()


def on_the_card(side: int, roi: int) -> None:
    shape = (1, 1, side, side, side)
    print(f"{CARD}, {side}^3, windows of {roi}, {CLASSES} classes:\n\n{HEAD}")
    print(row("one bare tile", measured(network, lambda model: model(torch.zeros(1, 1, *(roi,) * 3).cuda()))))
    held = {}
    for stitch in Stitch:
        settings = TileSettings(tile=roi, overlap=OVERLAP, reduce="argmax", stitch=stitch)

        def use(model: nn.Module, settings: TileSettings = settings) -> None:
            job = make_job(model, torch.zeros(shape), settings)
            held[settings.stitch] = rehearse(job, job.layout.batches).host_bytes

        try:
            print(row(f"tiled, labels, stitched on the {stitch.value}", measured(network, use)), flush=True)
        except torch.OutOfMemoryError:
            print(f"| tiled, labels, stitched on the {stitch.value} | out of memory | | | |")
    held_gib, whole_gib = held[Stitch.HOST] / 2**30, CLASSES * side**3 * 4 / 2**30
    print(f"\nbuffers on the host: {held_gib:.2f} GiB; all classes of the volume take {whole_gib:.1f}")


def for_real(side: int, roi: int) -> None:
    model = network()
    x = torch.randn(1, 1, side, side, side, generator=torch.Generator().manual_seed(1))
    began = time.perf_counter()
    labels = vramfit.tiled(model, x, tile=roi, overlap=OVERLAP, reduce="argmax")
    middle = time.perf_counter()
    with torch.no_grad():
        whole = sliding_window_inference(x, (roi,) * 3, 1, model, OVERLAP)
    end = time.perf_counter()
    same = True
    for row_ in range(side):
        same &= torch.equal(whole[:, :, row_].argmax(1).to(torch.uint8), labels[:, 0, row_])
    kinds = len(labels.unique())
    del whole
    gc.collect()
    print(
        f"{side}^3 on the CPU: {'the same labels' if same else 'OTHER LABELS'} as of MONAI's whole sum, {kinds} of "
        f"{CLASSES} classes among them; {middle - began:.0f} s, MONAI {end - middle:.0f} s"
    )
    if not same:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--real", type=int, default=192)
    parser.add_argument("--roi", type=int, default=128)
    options = parser.parse_args()
    on_the_card(384, 128)
    for_real(options.real, options.roi)


if __name__ == "__main__":
    main()
