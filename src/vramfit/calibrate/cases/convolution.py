"""Convolutions: one to three dimensions, layouts, types, groups, transposed, benchmark mode, cuDNN switched off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, forward, module, rand, short

_HALVES = (torch.float16, torch.bfloat16)
_ALL = (torch.float32, *_HALVES)
_LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Conv:
    batch: int
    inputs: int
    outputs: int
    size: tuple[int, ...]
    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    groups: int = 1
    bias: bool = False
    transposed: bool = False
    last: bool = False

    @property
    def name(self) -> str:
        kind = f"{'transposed ' if self.transposed else ''}{len(self.size)}d"
        shape = "x".join(map(str, (self.batch, self.inputs, *self.size)))
        words = [f"k{self.kernel}", f"to {self.outputs}"]
        words += [f"s{self.stride}"] if self.stride > 1 else []
        words += [f"d{self.dilation}"] if self.dilation > 1 else []
        words += [f"g{self.groups}"] if self.groups > 1 else []
        words += ["bias"] if self.bias else []
        words += ["channels last"] if self.last else []
        return f"{kind}/{shape}/{' '.join(words)}"


_RESNET = (
    _Conv(batch=32, inputs=3, outputs=64, size=(224, 224), kernel=7, stride=2, padding=3),
    _Conv(batch=32, inputs=64, outputs=64, size=(56, 56), kernel=1),
    _Conv(batch=32, inputs=64, outputs=64, size=(56, 56), kernel=3, padding=1),
    _Conv(batch=32, inputs=64, outputs=256, size=(56, 56), kernel=1),
    _Conv(batch=32, inputs=128, outputs=128, size=(28, 28), kernel=3, padding=1),
    _Conv(batch=32, inputs=256, outputs=256, size=(28, 28), kernel=3, stride=2, padding=1),
    _Conv(batch=32, inputs=256, outputs=512, size=(56, 56), kernel=1, stride=2),
    _Conv(batch=32, inputs=512, outputs=512, size=(7, 7), kernel=3, padding=1),
    _Conv(batch=32, inputs=512, outputs=2048, size=(7, 7), kernel=1),
)
_SMALL = (
    _Conv(batch=1, inputs=16, outputs=16, size=(32, 32), kernel=3, padding=1, bias=True),
    _Conv(batch=8, inputs=30, outputs=50, size=(33, 31), kernel=5, bias=True),
    _Conv(batch=8, inputs=320, outputs=320, size=(64, 64), kernel=3, padding=1, bias=True),
    _Conv(batch=8, inputs=64, outputs=64, size=(64, 64), kernel=3, padding=2, dilation=2),
    _Conv(batch=16, inputs=128, outputs=128, size=(28, 28), kernel=3, padding=1, groups=32),
    _Conv(batch=16, inputs=96, outputs=96, size=(28, 28), kernel=3, padding=1, groups=96),
    _Conv(batch=16, inputs=96, outputs=96, size=(28, 28), kernel=7, padding=3, groups=96, bias=True),
)
_OTHER = (
    _Conv(batch=16, inputs=80, outputs=512, size=(3000,), kernel=3, padding=1, bias=True),
    _Conv(batch=8, inputs=512, outputs=512, size=(1500,), kernel=3, stride=2, padding=1, bias=True),
    _Conv(batch=8, inputs=256, outputs=256, size=(1024,), kernel=31, padding=15, groups=256),
    _Conv(batch=1, inputs=1, outputs=16, size=(96, 96, 96), kernel=3, padding=1, bias=True),
    _Conv(batch=1, inputs=32, outputs=32, size=(64, 64, 64), kernel=3, padding=1, bias=True),
    _Conv(batch=2, inputs=64, outputs=128, size=(32, 32, 32), kernel=3, stride=2, padding=1),
    _Conv(batch=2, inputs=128, outputs=128, size=(16, 16, 16), kernel=1, bias=True),
    _Conv(batch=8, inputs=128, outputs=64, size=(28, 28), kernel=2, stride=2, transposed=True, bias=True),
    _Conv(batch=8, inputs=100, outputs=512, size=(4, 4), kernel=4, stride=2, padding=1, transposed=True),
    _Conv(batch=1, inputs=64, outputs=32, size=(32, 32, 32), kernel=2, stride=2, transposed=True, bias=True),
    _Conv(batch=4, inputs=64, outputs=64, size=(256,), kernel=4, stride=2, padding=1, transposed=True),
)


def _layouts(conv: _Conv) -> Iterator[_Conv]:
    yield conv
    if len(conv.size) > 1:
        yield replace(conv, last=True)


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.CONVOLUTION)
    for number, base in enumerate((*_RESNET, *_SMALL, *_OTHER)):
        for conv in _layouts(base):
            for dtype in _ALL:
                if dtype is torch.float16 and number % 6:  # it goes the way of bfloat16
                    continue
                grid.add(
                    f"{conv.name}/{short(dtype)}",
                    partial(_run, conv, dtype),
                    priority=0 if number in (2, 5) else 1,
                )
        if number % 3 == 0:
            grid.add(f"{base.name}/fp32/no tf32", partial(_run, base, torch.float32), Flag.NO_TF32)
    for base in (*_RESNET[:4], _SMALL[2], _SMALL[4], _OTHER[1], _OTHER[4]):
        for conv in _layouts(base):
            for dtype in (torch.float32, torch.bfloat16):
                grid.add(f"{conv.name}/{short(dtype)}/benchmark", partial(_run, conv, dtype), Flag.SEARCHES)
    for base in (_RESNET[2], _SMALL[4], _OTHER[4], _OTHER[7]):
        grid.add(f"{base.name}/fp32/no cudnn", partial(_run, base, torch.float32), Flag.NO_CUDNN)
        grid.add(f"{base.name}/fp32/deterministic", partial(_run, base, torch.float32), Flag.DETERMINISTIC)
        grid.add(f"{base.name}/fp64", partial(_run, base, torch.float64))
    for base in (_RESNET[2], _RESNET[0], _SMALL[2]):
        for dtype in (torch.float32, torch.bfloat16):
            grid.add(f"{base.name}/{short(dtype)}/inference", partial(_infer, base, dtype))
    return grid.cases


def _layer(conv: _Conv, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    kind = (_TRANSPOSED if conv.transposed else _LAYERS)[len(conv.size)]
    geometry = {name: getattr(conv, name) for name in ("stride", "padding", "dilation", "groups", "bias")}
    layer: nn.Module = kind(conv.inputs, conv.outputs, conv.kernel, **geometry, device="cuda", dtype=dtype)
    x = rand(conv.batch, conv.inputs, *conv.size, dtype=dtype)
    if conv.last:
        layer = layer.to(memory_format=_LAST[len(conv.size)])  # type: ignore[call-overload]  # stubs lack it
        x = x.contiguous(memory_format=_LAST[len(conv.size)])
    return layer, x


def _run(conv: _Conv, dtype: torch.dtype) -> Run:
    layer, x = _layer(conv, dtype)
    return module(layer, x.requires_grad_())


def _infer(conv: _Conv, dtype: torch.dtype) -> Run:
    return forward(*_layer(conv, dtype))
