"""Fourier transforms: plans and their work areas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, both, forward, rand

_LENGTHS = (512, 1000, 1009, 4096, 65_536, 65_537)


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.FFT)
    for length in _LENGTHS:
        for name, function in (("fft", torch.fft.fft), ("rfft", torch.fft.rfft)):
            grid.add(f"{name}/64x{length}", partial(_plain, function, 64, length))
        grid.add(f"irfft/64x{length}", partial(_irfft, length))
    for size in ((256, 256), (250, 250), (64, 64, 64)):
        shape = "x".join(map(str, size))
        grid.add(f"fftn/4x{shape}", partial(_many, torch.fft.fftn, size))
        grid.add(f"rfftn/4x{shape}", partial(_many, torch.fft.rfftn, size))
    grid.add("rfft/64x1024/backward", lambda: both(torch.fft.rfft, rand(64, 1024, grad=True)))
    grid.add("fft2/8x3x224x224", lambda: forward(torch.fft.fft2, rand(8, 3, 224, 224)))
    grid.add("stft/16x16000", _stft)
    return grid.cases


def _plain(function: Callable[..., Any], rows: int, length: int) -> Run:
    return forward(function, rand(rows, length))


def _irfft(length: int) -> Run:
    half = torch.complex(rand(64, length // 2 + 1), rand(64, length // 2 + 1))
    return forward(torch.fft.irfft, half, n=length)


def _many(function: Callable[..., Any], size: tuple[int, ...]) -> Run:
    return forward(function, rand(4, *size), dim=tuple(range(1, len(size) + 1)))


def _stft() -> Run:
    window = torch.hann_window(400, device="cuda")
    return forward(
        torch.stft, rand(16, 16_000), n_fft=400, hop_length=160, window=window, return_complex=True
    )
