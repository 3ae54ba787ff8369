"""Recurrent layers: cuDNN's workspaces and reserves, and single cells."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, forward, module, rand, short

_SIZES = ((35, 20, 200, 200, 2), (128, 32, 256, 512, 1), (50, 8, 64, 100, 3), (512, 64, 512, 1024, 2))

_KINDS: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.RNN)
    for kind in _KINDS:
        for steps, batch, inputs, hidden, layers in _SIZES:
            for dtype in (torch.float32, torch.float16):
                if dtype is torch.float16 and kind is nn.RNN:
                    continue
                name = f"{kind.__name__.lower()}/{steps}x{batch}x{inputs}/{hidden}x{layers}/{short(dtype)}"
                grid.add(name, partial(_layer, kind, steps, batch, inputs, hidden, layers, dtype))
        grid.add(
            f"{kind.__name__.lower()}/35x20x200/200x2/both ways",
            partial(_layer, kind, 35, 20, 200, 200, 2, torch.float32, bidirectional=True),
        )
        grid.add(
            f"{kind.__name__.lower()}/35x20x200/200x2/dropout",
            partial(_layer, kind, 35, 20, 200, 200, 2, torch.float32, dropout=0.5),
        )
        grid.add(
            f"{kind.__name__.lower()}/35x20x200/200x2/inference",
            partial(_infer, kind, 35, 20, 200, 200, 2),
        )
    grid.add(
        "lstm/128x32x256/512x1/no tf32",
        partial(_layer, nn.LSTM, 128, 32, 256, 512, 1, torch.float32),
        Flag.NO_TF32,
    )
    grid.add("lstm cell/64x256", partial(_cell, nn.LSTMCell))
    grid.add("gru cell/64x256", partial(_cell, nn.GRUCell))
    return grid.cases


def _layer(
    kind: Callable[..., nn.Module],
    steps: int,
    batch: int,
    inputs: int,
    hidden: int,
    layers: int,
    dtype: torch.dtype,
    *,
    bidirectional: bool = False,
    dropout: float = 0.0,
) -> Run:
    layer = kind(
        inputs, hidden, layers, bidirectional=bidirectional, dropout=dropout, device="cuda", dtype=dtype
    )
    return module(layer, rand(steps, batch, inputs, dtype=dtype, grad=True))


def _infer(
    kind: Callable[..., nn.Module], steps: int, batch: int, inputs: int, hidden: int, layers: int
) -> Run:
    return forward(kind(inputs, hidden, layers, device="cuda").eval(), rand(steps, batch, inputs))


def _cell(kind: Callable[..., nn.Module]) -> Run:
    return module(kind(256, 256, device="cuda"), rand(64, 256, grad=True))
