"""Networks as torchvision builds them (torchvision/models), of which others measured trainings."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F


class Sum(nn.Module):
    """A branch on top of what it reads, or of a projection of it."""

    def __init__(
        self, branch: nn.Module, beside: nn.Module | None = None, last: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.branch, self.beside, self.last = branch, beside, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.beside is not None:
            x = self.beside(x) + self.branch(x)
        else:
            x = x + self.branch(x) if self.last is not None else self.branch(x) + x
        return x if self.last is None else self.last(x)


def normed(taken: int, given: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(taken, given, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(given)]


def active(*shape: int) -> list[nn.Module]:
    return [*normed(*shape), nn.ReLU(inplace=True)]


def vgg16() -> nn.Module:
    """torchvision/models/vgg.py."""
    layers: list[nn.Module] = []
    taken = 3
    for given in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if given:
            layers += [nn.Conv2d(taken, given, 3, padding=1), nn.ReLU(inplace=True)]
            taken = given
        else:
            layers.append(nn.MaxPool2d(2))
    head: list[nn.Module] = []
    for inputs in (512 * 7 * 7, 4096):
        head += [nn.Linear(inputs, 4096), nn.ReLU(True), nn.Dropout()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head, nn.Linear(4096, 1000))


def inverted(taken: int, given: int, kernel: int, stride: int, expansion: int) -> nn.Module:
    """An inverted residual of MnasNet."""
    wide = taken * expansion
    layers = nn.Sequential(
        *active(taken, wide), *active(wide, wide, kernel, stride, wide), *normed(wide, given)
    )
    return Sum(layers) if taken == given and stride == 1 else layers


def mnasnet() -> nn.Module:
    """torchvision/models/mnasnet.py, mnasnet1_0 with ten classes."""
    layers = [*active(3, 32, 3, 2), *active(32, 32, 3, 1, 32), *normed(32, 16)]
    taken = 16
    for given, kernel, stride, expansion, repeats in (
        (24, 3, 2, 3, 3),
        (40, 5, 2, 3, 3),
        (80, 5, 2, 6, 3),
        (96, 3, 1, 6, 2),
        (192, 5, 2, 6, 4),
        (320, 3, 1, 6, 1),
    ):
        for index in range(repeats):
            layers.append(inverted(taken, given, kernel, 1 if index else stride, expansion))
            taken = given
    layers += [*active(320, 1280), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(1280, 10)]
    return nn.Sequential(*layers)


class Squeeze(nn.Module):
    """torchvision.ops.SqueezeExcitation."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.ReLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x) * x


def regnet(widths: tuple[int, ...], depths: tuple[int, ...], group: int, *, squeeze: bool) -> nn.Module:
    """torchvision/models/regnet.py."""
    layers = active(3, 32, 3, 2)
    taken = 32
    for width, depth in zip(widths, depths, strict=True):
        for index in range(depth):
            stride = 1 if index else 2
            branch = active(taken, width) + active(width, width, 3, stride, width // group)
            if squeeze:
                branch.append(Squeeze(width, round(0.25 * taken)))
            branch += normed(width, width)
            beside = None if index else nn.Sequential(*normed(taken, width, 1, stride))
            layers.append(Sum(nn.Sequential(*branch), beside, nn.ReLU(inplace=True)))
            taken = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(taken, 1000))


def regnet_x_400mf() -> nn.Module:
    return regnet((32, 64, 160, 400), (1, 2, 7, 12), 16, squeeze=False)


def regnet_y_400mf() -> nn.Module:
    return regnet((48, 104, 208, 440), (1, 3, 6, 6), 8, squeeze=True)


class ChannelNorm(nn.LayerNorm):
    """LayerNorm2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """CNBlock with stochastic depth."""

    def __init__(self, dim: int, dropped: float) -> None:
        super().__init__()
        self.spread = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.wide, self.act, self.narrow = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.scale = nn.Parameter(torch.ones(dim, 1, 1) * 1e-6)
        self.dropped = dropped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.spread(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(self.act(self.wide(y))).permute(0, 3, 1, 2)
        if self.dropped:
            kept = torch.empty(len(y), 1, 1, 1, dtype=y.dtype, device=y.device).bernoulli_(1 - self.dropped)
            y = y * kept.div_(1 - self.dropped)
        y += x
        return y


def convnext_tiny() -> nn.Module:
    """torchvision/models/convnext.py."""

    def layers() -> Iterator[nn.Module]:
        yield nn.Conv2d(3, 96, 4, 4)
        yield ChannelNorm(96, eps=1e-6)
        done = 0
        for dim, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
            for _ in range(depth):
                yield ConvNeXtBlock(dim, 0.1 * done / 17)
                done += 1
            if dim < 768:
                yield ChannelNorm(dim, eps=1e-6)
                yield nn.Conv2d(dim, 2 * dim, 2, 2)
        yield nn.AdaptiveAvgPool2d(1)
        yield ChannelNorm(768, eps=1e-6)
        yield nn.Flatten()
        yield nn.Linear(768, 1000)

    return nn.Sequential(*layers())
