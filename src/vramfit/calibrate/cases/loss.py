"""Softmax, cross-entropy in all its forms, the other losses, and CTC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from vramfit.calibrate.cases.case import Case, Flag, Grid, OpFamily, Run, both, integers, rand, short

_REDUCTIONS = ("mean", "sum", "none")


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.LOSS)
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((64, 1000), (512, 50_257), (8, 12, 512, 512)):
            name = "x".join(map(str, shape))
            grid.add(f"softmax/{name}/{short(dtype)}", partial(_softmax, torch.softmax, shape, -1, dtype))
            grid.add(
                f"log_softmax/{name}/{short(dtype)}", partial(_softmax, torch.log_softmax, shape, -1, dtype)
            )
        grid.add(
            f"softmax/8x21x64x64/1/{short(dtype)}",
            partial(_softmax, torch.softmax, (8, 21, 64, 64), 1, dtype),
        )
        for reduction in _REDUCTIONS:
            grid.add(
                f"cross_entropy/512x32000/{reduction}/{short(dtype)}",
                partial(_cross_entropy, dtype, reduction=reduction),
            )
        grid.add(
            f"cross_entropy/512x32000/smoothing/{short(dtype)}",
            partial(_cross_entropy, dtype, label_smoothing=0.1),
        )
        grid.add(
            f"cross_entropy/512x32000/ignoring/{short(dtype)}", partial(_cross_entropy, dtype, ignore_index=7)
        )
    grid.add(
        "cross_entropy/512x1000/probabilities",
        lambda: both(F.cross_entropy, rand(512, 1000, grad=True), torch.softmax(rand(512, 1000), 1)),
    )
    grid.add("cross_entropy/512x1000/weights", _cross_entropy_weights)
    grid.add(
        "cross_entropy/8x21x64x64",
        lambda: both(F.cross_entropy, rand(8, 21, 64, 64, grad=True), integers(21, 8, 64, 64)),
    )
    for name, function in _ELEMENTWISE.items():
        for reduction in _REDUCTIONS:
            grid.add(f"{name}/1000x100/{reduction}", partial(_elementwise, function, reduction))
    grid.add("kl_div/1000x100", _kl)
    grid.add("cosine_embedding/256x128", _cosine)
    grid.add(
        "triplet/256x128", lambda: both(F.triplet_margin_loss, *(rand(256, 128, grad=True) for _ in range(3)))
    )
    for name, function, size in (
        ("multi_margin", F.multi_margin_loss, (256,)),
        ("multilabel_margin", F.multilabel_margin_loss, (256, 100)),
    ):
        grid.add(f"{name}/256x100", partial(_margin, function, size))
    grid.add("ctc/native/150x16x40", partial(_ctc, zero=False), Flag.NO_CUDNN)
    grid.add("ctc/150x16x40/infinity", partial(_ctc, zero=True), Flag.NO_CUDNN)
    return grid.cases


def _softmax(function: Callable[..., Any], shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> Run:
    return both(function, rand(*shape, dtype=dtype, grad=True), axis)


def _cross_entropy(dtype: torch.dtype, **options: Any) -> Run:
    return both(F.cross_entropy, rand(512, 32_000, dtype=dtype, grad=True), integers(32_000, 512), **options)


def _cross_entropy_weights() -> Run:
    return both(
        F.cross_entropy,
        rand(512, 1000, grad=True),
        integers(1000, 512),
        weight=torch.ones(1000, device="cuda"),
    )


def _elementwise(function: Callable[..., Any], reduction: str) -> Run:
    target = (integers(2, 1000, 100)).float()
    return both(function, rand(1000, 100, grad=True), target, reduction=reduction)


def _binary(source: torch.Tensor, target: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.binary_cross_entropy(torch.sigmoid(source), target, **options)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": _binary,
    "bce with logits": F.binary_cross_entropy_with_logits,
    "soft_margin": F.soft_margin_loss,
}


def _kl() -> Run:
    return both(
        F.kl_div,
        torch.log_softmax(rand(1000, 100), 1).requires_grad_(),
        torch.softmax(rand(1000, 100), 1),
        reduction="batchmean",
    )


def _cosine() -> Run:
    return both(
        F.cosine_embedding_loss,
        rand(256, 128, grad=True),
        rand(256, 128, grad=True),
        torch.ones(256, device="cuda"),
    )


def _margin(function: Callable[..., Any], size: tuple[int, ...]) -> Run:
    return both(function, rand(256, 100, grad=True), integers(100, *size))


def _ctc(*, zero: bool) -> Run:
    scores = rand(150, 16, 40, grad=True)
    targets = integers(39, 16, 30) + 1
    lengths, sizes = torch.full((16,), 150), torch.full((16,), 30)

    def run() -> object:
        loss = F.ctc_loss(torch.log_softmax(scores, -1), targets, lengths, sizes, zero_infinity=zero)
        return torch.autograd.grad(loss, scores)

    return run
