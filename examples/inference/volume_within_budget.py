"""A segmentation of a scan that does not fit, within a budget: the tile is chosen, labels alone leave the device.

    python examples/inference/volume_within_budget.py [--budget 1GiB] [--gpu 'RTX 4090']

On a card the tile is chosen for what is free there. Without one, ``--gpu`` says for which card, and the network runs on
the CPU all the same. The network is a stand-in for a trained one; that its values depend on a bounded part of the scan
is found by looking at its operations, so that the labels are those of the whole scan.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import vramfit


def network(classes: int = 4) -> nn.Module:
    torch.manual_seed(0)

    def block(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
        conv = nn.Conv3d(inside, outside, 3, stride, padding=1)
        return nn.Sequential(conv, nn.BatchNorm3d(outside), nn.ReLU(inplace=True))

    return nn.Sequential(
        block(1, 8),
        block(8, 16, stride=2),
        block(16, 16),
        nn.ConvTranspose3d(16, 8, 2, 2),
        nn.Conv3d(8, classes, 1),
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="64MiB", help="what torch may reserve on the device")
    parser.add_argument("--gpu", default="RTX 4090", help="the card that the tile is chosen for")
    parser.add_argument("--side", type=int, default=96, help="voxels along each side of the scan")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scan = torch.rand(1, options.side, options.side, options.side)
    labels = vramfit.tiled(
        network().to(device),
        scan,
        reduce="argmax",
        budget=options.budget,
        gpu=None if device == "cuda" else options.gpu,
    )
    print(f"{tuple(labels.shape)} labels of {labels.dtype}")


if __name__ == "__main__":
    main()
