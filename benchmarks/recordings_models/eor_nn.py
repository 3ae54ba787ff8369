"""The convolutional regressor of the eor-nn recording: a plain CUDA script that records its own memory.

    python eor_nn.py --out DIR

It changes an image by gradient descent until the regressor's answer moves, ten steps, with anomaly detection on,
which looks for NaN after every backward function. Architecture and order of operations are those of the public code
behind the recording (github.com/JasperSolt/EoR_NN: counterfactuals.py, regressors/latent_cnn.py); the code here is
written anew, for memory alone. The shapes follow from the recorded sizes: 30 channels of 256 x 256, one image.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

CHANNELS, SIDE = 30, 256
WIDTHS = (16, 32, 64)
FEATURES = (200, 100, 20)
STEPS = 10


class Regressor(nn.Module):
    """Images [B, 30, 256, 256] in, one number each [B, 1] out."""

    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip((CHANNELS, *WIDTHS[:-1]), WIDTHS, strict=True))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding="same") for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in WIDTHS)
        pairs = list(zip((WIDTHS[-1], *FEATURES[:-1]), FEATURES, strict=True))
        self.linear = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.out = nn.Linear(FEATURES[-1], 1)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.2)
        self.halve = nn.MaxPool2d(2)
        self.highest = nn.MaxPool2d(SIDE >> len(WIDTHS))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(self.relu(convolution(x)))
            x = self.halve(x)
        x = self.highest(x)
        x = x.flatten(1)
        for linear in self.linear:
            x = self.relu(linear(self.dropout(x)))
        return self.out(x)


def image_distance(changed: Tensor, image: Tensor) -> Tensor:
    return ((changed - image) ** 2).mean()


def answer_distance(new: Tensor, old: Tensor) -> Tensor:
    return (new - old) ** 2


class Distance(nn.Module):
    """Small where the images are alike and the answers are not."""

    def forward(self, old: Tensor, new: Tensor, image: Tensor, changed: Tensor) -> Tensor:
        return image_distance(changed, image) - answer_distance(new, old)


def change(image: Tensor, old: Tensor, model: nn.Module, file: Path) -> None:
    """Ten steps of gradient descent on the image, recorded from before it reaches the card."""
    torch.autograd.set_detect_anomaly(True)
    torch.cuda.memory._record_memory_history()
    changed = image + torch.randn_like(image)
    image, changed = image.cuda(), changed.cuda()
    changed.requires_grad = True
    optimizer = torch.optim.Adam([changed], lr=0.1)
    distance = Distance()
    history = [torch.tensor([]) for _ in range(3)]
    for _ in range(STEPS):
        new = model(changed)
        loss = distance(old, new, image, changed)
        of_image = image_distance(changed, image).detach()
        of_answer = -answer_distance(new, old).detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
        history = [
            torch.cat((values, latest.cpu().view((1,)).detach()))
            for values, latest in zip(history, (loss, of_image, of_answer), strict=True)
        ]
        torch.cuda.memory._dump_snapshot(str(file))


def main() -> None:
    """Ask the regressor about an image, then change the image."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the recording")
    options = parser.parse_args()
    model = Regressor().cuda()
    for parameter in model.parameters():
        parameter.requires_grad = False
    image = torch.randn(1, CHANNELS, SIDE, SIDE)
    change(image, model(image.cuda()), model, options.out / "images.pickle")


if __name__ == "__main__":
    main()
