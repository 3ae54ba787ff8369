"""Optimizer steps, one tensor after the other, foreach and fused; clipping; GradScaler; foreach ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from vramfit.calibrate.cases.case import Case, Grid, OpFamily, Run, forward, rand, short
from vramfit.torch_internals.optimizers import (
    foreach_add,
    foreach_copy_,
    foreach_lerp_,
    foreach_norm,
    unscale_foreach_,
)

_SIZES = ((1000, 768), (768,), (3072, 768), (64, 64, 3, 3), (1,))
_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {}),
}
_FOREACH_ONLY: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "rmsprop": (torch.optim.RMSprop, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


def cases() -> list[Case]:
    """The grid of this family."""
    grid = Grid(OpFamily.OPTIMIZER)
    for name, (kind, options) in (_OPTIMIZERS | _FOREACH_ONLY).items():
        for way in ("loop", "foreach", "fused"):
            if way == "fused" and name not in _OPTIMIZERS:
                continue
            for dtype in (torch.float32, torch.bfloat16):
                if dtype is torch.bfloat16 and name not in ("adamw", "sgd momentum"):
                    continue
                grid.add(
                    f"{name}/{way}/{short(dtype)}",
                    partial(_step, kind, options, way, dtype),
                    priority=0 if name == "adamw" else 1,
                )
    for norm in (2.0, float("inf"), 1.0):
        for foreach in (True, False):
            grid.add(
                f"clip_grad_norm_/{norm}/{'foreach' if foreach else 'loop'}", partial(_clip, norm, foreach)
            )
    grid.add("clip_grad_value_", lambda: partial(torch.nn.utils.clip_grad_value_, _parameters(), 0.5))
    grid.add("unscale/fp32", partial(_unscale, torch.float32))
    grid.add("unscale/fp16", partial(_unscale, torch.float16))
    grid.add(
        "foreach_norm/200 tensors",
        lambda: forward(foreach_norm, [rand(1000 + 100 * n) for n in range(200)], 2),
    )
    grid.add("foreach_add/200 tensors", lambda: forward(foreach_add, [rand(1000) for _ in range(200)], 1.0))
    grid.add("foreach_copy/bf16 from fp32", _foreach_copy)
    grid.add(
        "foreach_lerp",
        lambda: forward(foreach_lerp_, [rand(*s) for s in _SIZES], [rand(*s) for s in _SIZES], 0.1),
    )
    return grid.cases


def _parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    parameters = [rand(*size, dtype=dtype, grad=True) for size in _SIZES]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters


def _step(kind: type[torch.optim.Optimizer], options: dict[str, Any], way: str, dtype: torch.dtype) -> Run:
    more = {"fused": True} if way == "fused" else {"foreach": way == "foreach"}
    make: Any = kind
    return make(_parameters(dtype), lr=1e-3, **options, **more).step  # type: ignore[no-any-return]


def _clip(norm: float, foreach: bool) -> Run:
    parameters = _parameters()
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0, norm_type=norm, foreach=foreach)


def _unscale(dtype: torch.dtype) -> Run:
    grads = [rand(*size, dtype=dtype) for size in _SIZES]
    found, inverse = torch.zeros(1, device="cuda"), torch.ones((), device="cuda")
    return forward(unscale_foreach_, grads, found, inverse)


def _foreach_copy() -> Run:
    sources = [rand(*size) for size in _SIZES]
    return forward(foreach_copy_, [source.bfloat16() for source in sources], sources)
