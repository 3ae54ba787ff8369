"""Thirty networks whose outputs depend on a bounded part of the input, in one to three dimensions, with real widths.

Super-resolution, denoising, segmentation, sound; those of MONAI and diffusers come from there, the others are written
after the papers that their docstrings or names tell. Normalisations are batch norms in evaluation: with group or
instance norms a network is not local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LocalNetwork:
    """One of the networks.

    Attributes:
        make: makes it, in evaluation.
        channels: of the input.
        shape: of the image or volume that it is run over.
    """

    make: Callable[[], nn.Module]
    channels: int
    shape: tuple[int, ...]


def _act(
    kernel: int, inside: int, outside: int, *, dims: int = 2, stride: int = 1, dilation: int = 1
) -> nn.Sequential:
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    padding = dilation * (kernel - 1) // 2
    return nn.Sequential(conv(inside, outside, kernel, stride, padding, dilation), nn.ReLU(inplace=True))


def _normed(inside: int, outside: int, *, dims: int = 2, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    return nn.Sequential(
        conv(inside, outside, 3, stride, dilation, dilation, bias=False), norm(outside), nn.ReLU(inplace=True)
    )


class _Sum(nn.Module):
    """A part and its input, added."""

    def __init__(self, part: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.part, self.scale = part, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.part(x)


def srcnn() -> nn.Module:
    """Dong et al. 2014, arXiv:1501.00092."""
    return nn.Sequential(_act(9, 3, 64), _act(1, 64, 32), nn.Conv2d(32, 3, 5, padding=2))


def fsrcnn(scale: int) -> nn.Module:
    """Dong et al. 2016, arXiv:1608.00367."""
    return nn.Sequential(
        _act(5, 1, 56),
        _act(1, 56, 12),
        *(_act(3, 12, 12) for _ in range(4)),
        _act(1, 12, 56),
        nn.ConvTranspose2d(56, 1, 9, scale, 4, scale - 1),
    )


def espcn(scale: int) -> nn.Module:
    """Shi et al. 2016, arXiv:1609.05158."""
    return nn.Sequential(
        _act(5, 3, 64), _act(3, 64, 32), nn.Conv2d(32, 3 * scale**2, 3, padding=1), nn.PixelShuffle(scale)
    )


def edsr(width: int, depth: int, scale: int) -> nn.Module:
    """Lim et al. 2017, arXiv:1707.02921."""
    blocks = [
        _Sum(nn.Sequential(_act(3, width, width), nn.Conv2d(width, width, 3, padding=1)), 0.1)
        for _ in range(depth)
    ]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        _Sum(nn.Sequential(*blocks, nn.Conv2d(width, width, 3, padding=1))),
        nn.Conv2d(width, width * scale**2, 3, padding=1),
        nn.PixelShuffle(scale),
        nn.Conv2d(width, 3, 3, padding=1),
    )


def srvgg(depth: int) -> nn.Module:
    """The compact network of Real-ESRGAN (Wang et al. 2021, arXiv:2107.10833), four times larger."""
    body = [part for _ in range(depth) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.PReLU(64))]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.PReLU(64),
        *body,
        nn.Conv2d(64, 48, 3, padding=1),
        nn.PixelShuffle(4),
    )


class _Dense(nn.Module):
    """Five convolutions, each of all before it; of ESRGAN (Wang et al. 2018, arXiv:1809.00219)."""

    def __init__(self, width: int = 64, grow: int = 32) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Conv2d(width + number * grow, grow if number < 4 else width, 3, padding=1)
            for number in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for part in self.parts[:-1]:
            seen.append(nn.functional.leaky_relu(part(torch.cat(seen, 1)), 0.2, inplace=True))
        return x + 0.2 * self.parts[-1](torch.cat(seen, 1))


def rrdb(depth: int) -> nn.Module:
    """ESRGAN's network, four times larger: 23 blocks, or 6 for drawings."""
    blocks = [_Sum(nn.Sequential(_Dense(), _Dense(), _Dense()), 0.2) for _ in range(depth)]
    up = [nn.Upsample(scale_factor=2), nn.Conv2d(64, 64, 3, padding=1), nn.LeakyReLU(0.2, inplace=True)]
    more = [nn.Upsample(scale_factor=2), nn.Conv2d(64, 64, 3, padding=1), nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        _Sum(nn.Sequential(*blocks, nn.Conv2d(64, 64, 3, padding=1))),
        *up,
        *more,
        nn.Conv2d(64, 3, 3, padding=1),
    )


def dncnn(depth: int) -> nn.Module:
    """Zhang et al. 2017, arXiv:1608.03981."""
    return _Sum(
        nn.Sequential(
            _act(3, 1, 64), *(_normed(64, 64) for _ in range(depth - 2)), nn.Conv2d(64, 1, 3, padding=1)
        )
    )


def ffdnet() -> nn.Module:
    """Zhang et al. 2018, arXiv:1710.04026, without the map of noise: at half the resolution."""
    return nn.Sequential(
        nn.PixelUnshuffle(2),
        _act(3, 12, 96),
        *(_normed(96, 96) for _ in range(10)),
        nn.Conv2d(96, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


def dilated(classes: int) -> nn.Module:
    """Context by dilation: Yu and Koltun 2016, arXiv:1511.07122."""
    return nn.Sequential(
        _normed(3, 32), *(_normed(32, 32, dilation=2**power) for power in range(5)), nn.Conv2d(32, classes, 1)
    )


class _UNet(nn.Module):
    """An encoder and a decoder with skips (Ronneberger et al. 2015, arXiv:1505.04597), or with sums in their place."""

    def __init__(
        self, dims: int, widths: tuple[int, ...], channels: int, classes: int, *, sums: bool = False
    ) -> None:
        super().__init__()
        up = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]
        last = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.sums = sums
        self.down = nn.ModuleList()
        for before, width in zip((channels, *widths), widths, strict=False):
            stride = 1 if before == channels else 2
            self.down.append(
                nn.Sequential(
                    _normed(before, width, dims=dims, stride=stride), _normed(width, width, dims=dims)
                )
            )
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.up = nn.ModuleList(up(before, width, 2, 2) for before, width in pairs)
        self.joined = nn.ModuleList(
            _normed(width if sums else 2 * width, width, dims=dims) for _, width in pairs
        )
        self.last = last(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for part in self.down:
            x = part(x)
            skips.append(x)
        skips.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = up(x)
            skip = skips.pop()
            x = joined(x + skip if self.sums else torch.cat((x, skip), 1))
        return self.last(x)


class _SegNet(nn.Module):
    """Badrinarayanan et al. 2017, arXiv:1511.00561: pooled places are remembered."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_normed(*pair) for pair in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(
            _normed(*pair) for pair in zip(widths[::-1], (*widths[-2::-1], widths[0]), strict=True)
        )
        self.last = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        places = []
        for part in self.down:
            x, place = nn.functional.max_pool2d(part(x), 2, return_indices=True)
            places.append(place)
        for part in self.up:
            x = part(nn.functional.max_unpool2d(x, places.pop(), 2))
        return self.last(x)


def tcn(width: int, depth: int) -> nn.Module:
    """Dilated convolutions over sound: Bai et al. 2018, arXiv:1803.01271."""
    blocks = [_Sum(_normed(width, width, dims=1, dilation=2**number)) for number in range(depth)]
    return nn.Sequential(_normed(1, width, dims=1), *blocks, nn.Conv1d(width, 1, 1))


class _WaveNet(nn.Module):
    """Gated layers whose outputs are added: van den Oord et al. 2016, arXiv:1609.03499, looking to both sides."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2 ** (number % 8), dilation=2 ** (number % 8))
            for number in range(depth)
        )
        self.outs = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        total = torch.zeros_like(x)
        for gate, out in zip(self.gates, self.outs, strict=True):
            value, open_ = gate(x).chunk(2, 1)
            more, skip = out(torch.tanh(value) * torch.sigmoid(open_)).chunk(2, 1)
            x, total = x + more, total + skip
        return self.last(total)


def _monai(name: str, **settings: object) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from monai.networks import nets

        made: nn.Module = getattr(nets, name)(**settings)
        return made

    return make


class _Half(nn.Module):
    """The encoder or the decoder of diffusers' tiny autoencoder (TAESD)."""

    def __init__(self, part: str) -> None:
        super().__init__()
        from diffusers import AutoencoderTiny

        self.part = getattr(AutoencoderTiny(), part)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.part(x)
        return found


def _network(make: Callable[[], nn.Module], channels: int, *shape: int) -> LocalNetwork:
    return LocalNetwork(make=lambda: make().eval(), channels=channels, shape=shape)


_BASIC = {"in_channels": 1, "out_channels": 4, "norm": "batch"}
_STRIDED = {"channels": (16, 32, 64, 128), "strides": (2, 2, 2), "num_res_units": 2, "norm": "batch"}
_DYNAMIC = {
    "kernel_size": [3, 3, 3, 3],
    "strides": [1, 2, 2, 2],
    "upsample_kernel_size": [2, 2, 2],
    "norm_name": "batch",
}

NETWORKS = {
    "SRCNN": _network(srcnn, 3, 2048, 2048),
    "FSRCNN x2": _network(lambda: fsrcnn(2), 1, 2048, 2048),
    "FSRCNN x4": _network(lambda: fsrcnn(4), 1, 1080, 1920),
    "ESPCN x4": _network(lambda: espcn(4), 3, 1080, 1920),
    "EDSR x2": _network(lambda: edsr(64, 16, 2), 3, 1080, 1920),
    "EDSR x4": _network(lambda: edsr(64, 16, 4), 3, 720, 1280),
    "EDSR wide x2": _network(lambda: edsr(256, 32, 2), 3, 512, 768),
    "Real-ESRGAN compact x4": _network(lambda: srvgg(16), 3, 720, 1280),
    "Real-ESRGAN compact, 32 deep": _network(lambda: srvgg(32), 3, 1080, 1920),
    "ESRGAN, 6 blocks": _network(lambda: rrdb(6), 3, 720, 1280),
    "ESRGAN, 23 blocks": _network(lambda: rrdb(23), 3, 512, 512),
    "DnCNN-17": _network(lambda: dncnn(17), 1, 2048, 2048),
    "DnCNN-20": _network(lambda: dncnn(20), 1, 3000, 4000),
    "FFDNet": _network(ffdnet, 3, 2160, 3840),
    "dilated": _network(lambda: dilated(19), 3, 1024, 2048),
    "U-Net": _network(lambda: _UNet(2, (64, 128, 256, 512), 3, 2), 3, 2048, 2048),
    "LinkNet": _network(lambda: _UNet(2, (32, 64, 128, 256), 3, 19, sums=True), 3, 1024, 2048),
    "SegNet": _network(lambda: _SegNet((64, 128, 256), 19), 3, 1024, 2048),
    "TAESD decoder": _network(lambda: _Half("decoder"), 4, 256, 256),
    "TAESD encoder": _network(lambda: _Half("encoder"), 3, 2048, 2048),
    "MONAI BasicUNet, slices": _network(_monai("BasicUNet", spatial_dims=2, **_BASIC), 1, 2048, 2048),
    "MONAI SegResNet, slices": _network(
        _monai("SegResNet", spatial_dims=2, init_filters=32, in_channels=1, out_channels=4, norm="batch"),
        1,
        2048,
        2048,
    ),
    "MONAI UNet": _network(
        _monai("UNet", spatial_dims=3, in_channels=1, out_channels=8, **_STRIDED), 1, 256, 256, 256
    ),
    "MONAI BasicUNet": _network(_monai("BasicUNet", spatial_dims=3, **_BASIC), 1, 192, 256, 256),
    "MONAI DynUNet": _network(
        _monai(
            "DynUNet", spatial_dims=3, in_channels=1, out_channels=4, filters=[32, 64, 128, 256], **_DYNAMIC
        ),
        1,
        160,
        256,
        256,
    ),
    "MONAI VNet": _network(_monai("VNet", spatial_dims=3, in_channels=1, out_channels=2), 1, 128, 192, 192),
    "U-Net, volumes": _network(lambda: _UNet(3, (16, 32, 64, 128), 1, 3), 1, 128, 256, 256),
    "TCN": _network(lambda: tcn(64, 8), 1, 2_000_000),
    "WaveNet": _network(lambda: _WaveNet(64, 16), 1, 1_000_000),
    "U-Net of sound": _network(lambda: _UNet(1, (32, 64, 128, 256, 512), 1, 2), 1, 4_000_000),
}
"""The networks, by name; images of the sizes of screens and scans, sound of some 20 to 90 seconds."""
