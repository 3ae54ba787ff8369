"""Image and volume models in plain PyTorch: ResNet, ConvNeXt, ViT, U-Nets in two and three dimensions, a GAN.

Shapes: B batch, C channels, S side of an image, D depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configurations.optimizers import make_optimizer
from configurations.training import (
    DEVICE,
    Program,
    images,
    inference,
    lowered,
    parameters_of,
    place,
    training,
)

# -- ResNet --------------------------------------------------------------------------------------------------


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias, and batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Residual(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of three."""

    def __init__(self, inputs: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        relu = nn.ReLU(inplace=True)
        if bottleneck:
            parts = [convolution(inputs, width, 1), relu, convolution(width, width, 3, stride), relu]
            parts.append(convolution(width, outputs, 1))
        else:
            parts = [convolution(inputs, width, 3, stride), relu, convolution(width, outputs, 3)]
        self.body = nn.Sequential(*parts)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


DEPTHS = {8: (1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}


class ResNet(nn.Module):
    """Images [B, 3, S, S] in, logits [B, 1000] out."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        bottleneck = depth >= 50
        stages, inputs = [], 64
        for index, count in enumerate(DEPTHS[depth]):
            width = 64 << index
            for position in range(count):
                stride = 2 if index and not position else 1
                stages.append(Residual(inputs, width, stride, bottleneck=bottleneck))
                inputs = 4 * width if bottleneck else width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1).flatten(1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Images [B, 3, S, S] in, logits [B, 1000] out."""

    def __init__(
        self, widths: Sequence[int] = (96, 192, 384, 768), depths: Sequence[int] = (3, 3, 9, 3)
    ) -> None:
        super().__init__()
        parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4)]
        for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if index:
                parts += [nn.BatchNorm2d(widths[index - 1]), nn.Conv2d(widths[index - 1], width, 2, 2)]
            parts += [ConvNeXtBlock(width) for _ in range(depth)]
        self.body = nn.Sequential(*parts)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).mean((2, 3))))


class ViT(nn.Module):
    """Images [B, 3, S, S] in, logits [B, 1000] out; patches of 16."""

    def __init__(self, width: int, layers: int, heads: int, side: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (side // 16) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def network_of(name: str, side: int) -> nn.Module:
    """A classifier of images by name."""
    if name.startswith("resnet"):
        return ResNet(int(name.removeprefix("resnet")))
    if name.startswith("vit"):
        return ViT(*TRANSFORMERS[name], side)
    return ConvNeXt()


TRANSFORMERS = {"vit-base": (768, 12, 12), "vit-large": (1024, 24, 16)}


def classifier(
    *,
    model: str,
    batch: int = 32,
    side: int = 224,
    precision: str,
    optimizer: str | None = None,
    channels_last: bool = False,
    search: bool = False,
    **loop: Any,
) -> Program:
    """An image classifier in training, or in inference without an optimizer. ``search`` is cudnn.benchmark."""
    torch.backends.cudnn.benchmark = search
    network = place(lambda: network_of(model, side), precision)
    pixels = images(batch, 3, side, side).to(next(network.parameters()).dtype)
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    if optimizer is None:
        return inference(network, lambda: network(pixels), precision=precision)
    labels = torch.randint(1000, (batch,), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def loss() -> Tensor:
        return F.cross_entropy(network(pixels), labels, label_smoothing=0.1)

    return training(network, loss, precision=precision, optimizer=optimizer, **loop)


# -- U-Net in three dimensions -------------------------------------------------------------------------------


def volume_block(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3x3 convolutions, each with instance norm and a leaky ReLU."""
    parts: list[nn.Module] = []
    for source in (inputs, outputs):
        parts += [
            nn.Conv3d(source, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*parts)


class UNet3D(nn.Module):
    """Volumes [B, 1, D, D, D] in, logits [B, 3, D, D, D] out."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        pairs = list(zip((1, *widths[:-1]), widths, strict=True))
        self.down = nn.ModuleList(volume_block(a, b) for a, b in pairs)
        self.lift = nn.ModuleList(nn.ConvTranspose3d(b, a, 2, 2) for a, b in reversed(pairs[1:]))
        self.up = nn.ModuleList(volume_block(2 * a, a) for a, _ in reversed(pairs[1:]))
        self.head = nn.Conv3d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool3d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat((lift(x), kept.pop()), dim=1))
        return self.head(x)


def volume(
    *,
    widths: Sequence[int] = (32, 64, 128, 256),
    batch: int = 1,
    depth: int = 96,
    precision: str,
    optimizer: str,
    search: bool = False,
    **loop: Any,
) -> Program:
    """A 3D U-Net in training on patches of a volume."""
    torch.backends.cudnn.benchmark = search
    model = place(lambda: UNet3D(widths), precision)
    scan = images(batch, 1, depth, depth, depth)
    labels = torch.randint(3, (batch, depth, depth, depth)).to(DEVICE)
    return training(
        model, lambda: F.cross_entropy(model(scan), labels), precision=precision, optimizer=optimizer, **loop
    )


# -- diffusion U-Net -----------------------------------------------------------------------------------------


class TimedResidual(nn.Module):
    """Two convolutions with group norm; the time is added between them."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm_1 = nn.GroupNorm(32, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm_2 = nn.GroupNorm(32, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.norm_1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.second(F.dropout(F.silu(self.norm_2(y)), 0.1, self.training))


class ImageAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.qkv = nn.Conv2d(width, 3 * width, 1)
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, rows, columns = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, 3, width // 64, 64, rows * columns).transpose(-1, -2)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(1))
        return x + self.out(mixed.transpose(-1, -2).reshape(batch, width, rows, columns))


class DiffusionUNet(nn.Module):
    """Noisy images [B, 3, S, S] and times [B] in, the noise out; attention at the two lowest resolutions."""

    def __init__(self, width: int, factors: Sequence[int]) -> None:
        super().__init__()
        self.width = width
        time = 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width * factor for factor in factors]
        pairs = list(zip((width, *widths[:-1]), widths, strict=True))
        deep = [index >= len(widths) - 2 for index in range(len(widths))]
        self.down = nn.ModuleList(TimedResidual(a, b, time) for a, b in pairs)
        self.look_down = nn.ModuleList(
            ImageAttention(b) if here else nn.Identity() for (_, b), here in zip(pairs, deep, strict=True)
        )
        self.shrink = nn.ModuleList(nn.Conv2d(b, b, 3, 2, padding=1) for _, b in pairs[:-1])
        self.middle = TimedResidual(widths[-1], widths[-1], time)
        self.up = nn.ModuleList(TimedResidual(2 * b, a, time) for a, b in reversed(pairs))
        self.grow = nn.ModuleList(nn.Conv2d(a, a, 3, padding=1) for a, _ in list(reversed(pairs))[:-1])
        self.head = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        half = self.width // 2
        frequency = torch.exp(-math.log(10_000) * torch.arange(half, device=x.device) / half)
        angle = times[:, None].float() * frequency[None]
        time = self.time(torch.cat((angle.cos(), angle.sin()), dim=-1))
        x, kept = self.stem(x), []
        for index, (block, look) in enumerate(zip(self.down, self.look_down, strict=True)):
            x = look(block(x, time))
            kept.append(x)
            if index < len(self.shrink):
                x = self.shrink[index](x)
        x = self.middle(x, time)
        for index, block in enumerate(self.up):
            x = block(torch.cat((x, kept.pop()), dim=1), time)
            if index < len(self.grow):
                x = self.grow[index](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.head(x)


def diffusion(
    *,
    width: int = 128,
    factors: Sequence[int] = (1, 2, 2, 4),
    batch: int = 16,
    side: int = 64,
    precision: str,
    optimizer: str,
    **loop: Any,
) -> Program:
    """A denoising U-Net in training."""
    model = place(lambda: DiffusionUNet(width, factors), precision)
    pixels = images(batch, 3, side, side)
    times = torch.randint(1000, (batch,)).to(DEVICE)

    def loss() -> Tensor:
        noise = torch.randn_like(pixels)
        mixed = 0.7 * pixels + 0.7 * noise
        return F.mse_loss(model(mixed, times), noise)

    return training(model, loss, precision=precision, optimizer=optimizer, **loop)


# -- GAN -----------------------------------------------------------------------------------------------------


def generator(width: int, noise: int) -> nn.Sequential:
    """Noise [B, noise, 1, 1] to images [B, 3, 64, 64]."""
    parts: list[nn.Module] = [nn.ConvTranspose2d(noise, 8 * width, 4, 1, bias=False)]
    for factor in (8, 4, 2):
        parts += [nn.BatchNorm2d(factor * width), nn.ReLU(inplace=True)]
        parts.append(nn.ConvTranspose2d(factor * width, factor * width // 2, 4, 2, padding=1, bias=False))
    parts += [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*parts, nn.ConvTranspose2d(width, 3, 4, 2, padding=1, bias=False), nn.Tanh())


def discriminator(width: int) -> nn.Sequential:
    """Images [B, 3, 64, 64] to scores [B]."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, padding=1), nn.LeakyReLU(0.2, inplace=True)]
    for factor in (1, 2, 4):
        parts += [
            nn.Conv2d(factor * width, 2 * factor * width, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(2 * factor * width),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*parts, nn.Conv2d(8 * width, 1, 4), nn.Flatten(0))


def gan(
    *,
    width: int = 64,
    noise: int = 100,
    batch: int = 128,
    precision: str,
    optimizer: str,
) -> Program:
    """DCGAN: the discriminator learns on real and made images, then the generator through it."""
    maker = place(lambda: generator(width, noise), precision)
    judge = place(lambda: discriminator(width), precision)
    of_maker = make_optimizer(optimizer, parameters_of([maker]))
    of_judge = make_optimizer(optimizer, parameters_of([judge]))
    real = images(batch, 3, 64, 64)
    ones = torch.ones(batch, device=DEVICE)
    zeros = torch.zeros(batch, device=DEVICE)

    def step() -> None:
        judged = F.binary_cross_entropy_with_logits
        of_judge.zero_grad()
        with lowered(precision):
            made = maker(torch.randn(batch, noise, 1, 1, device=DEVICE))
            loss = judged(judge(real), ones) + judged(judge(made.detach()), zeros)
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        with lowered(precision):
            loss = judged(judge(made), ones)
        loss.backward()
        of_maker.step()

    return Program(step=step, models=(maker, judge), optimizers=(of_maker, of_judge))
