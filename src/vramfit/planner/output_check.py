"""Compares what a plan for inference gives with what the plain program gives, on this machine's CPU.

Outputs are judged by what the plan promises:

- BITWISE: every value of every output is equal, bit for bit.
- ROUNDING: each output differs by at most `ROUNDING_ERROR` of its norm, by its dtype; of whole numbers, such as the
  classes of an argmax, `FLIPPED` of the values may differ, for two that are equal but for rounding are in any order.
- PRECISION: each output differs by at most `PRECISION_ERROR` of its norm.
- APPROXIMATE: outputs are shown, not judged.

NOTE [What rounding is here]: a norm of values that are all equal divides rounding by rounding, and a deep network may
amplify it by more than the bounds above. Where outputs differ by more, the plain program is run in float64 too: they
may be off by `OWN_ROUNDING` times what the plain program itself is off by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch

from vramfit.techniques import Numerics, live_of
from vramfit.techniques.support.promised_errors import allowed_error
from vramfit.torch_internals.pytree import keystr, tree_flatten_with_path, tree_map_only
from vramfit.workload import Workload

FLIPPED = 1e-3
"""Part of an output's whole numbers that rounding may change."""


OWN_ROUNDING = 4.0
"""How many times the plain program's own rounding outputs may be off by, where that is above the bounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputCheck:
    """Outputs of a plan for inference, beside the plain program's.

    Attributes:
        outputs: how many tensors were compared.
        equal: how many are equal, bit for bit.
        worst: the difference that comes closest to what is allowed, or goes furthest beyond it: a part of the output's
            norm, or of whole numbers the part that differs.
        worst_name: of that output; empty where the model gives one tensor.
        allowed: what the promise allows there; None where it allows anything.
        largest: the largest difference of one value there, as a part of the output's largest.
        passes: whether all keep the promise.
    """

    outputs: int
    equal: int
    worst: float
    worst_name: str
    allowed: float | None
    largest: float
    passes: bool


def outputs_of(workload: Workload, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """What a workload's model gives for one batch on the CPU, by the place of each tensor."""
    torch.manual_seed(0)
    state = workload.start("cpu")
    live = live_of(state)
    try:
        torch.manual_seed(0)
        leaves, _ = tree_flatten_with_path(_plain(workload.run_forward(state, sizes)))
        return {keystr(path): leaf.clone() for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
    finally:
        if live is not None:
            live.undo()


def _plain(value: Any) -> Any:
    """A dataclass as a dict; all else as it is."""
    if is_dataclass(value) and not isinstance(value, type | Mapping):
        return vars(value)
    return value


def compare_outputs(
    workload: Workload,
    planned: Workload,
    sizes: Mapping[str, int],
    numerics: Numerics,
    plain: Mapping[str, torch.Tensor] | None = None,
) -> OutputCheck:
    """Run a workload for inference on the CPU, plain and with a plan, and compare what comes out.

    Args:
        plain: outputs of the plain workload, where they are known.
    """
    if plain is None:
        plain = outputs_of(workload, sizes)
    found = outputs_of(planned, sizes)
    check = judge_outputs(plain, found, numerics)
    if check.passes or numerics is not Numerics.ROUNDING:
        return check
    return judge_outputs(plain, found, numerics, own=own_rounding(workload, sizes, plain))


def own_rounding(
    workload: Workload, sizes: Mapping[str, int], plain: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """By how much the plain program's outputs are off float64's, as a part of their norm; empty where it has none."""

    def widened(value: Any) -> Any:
        return tree_map_only(
            torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, value
        )

    precise = replace(
        workload,
        model=lambda: workload.model().double(),
        batch=lambda **sizes: widened(workload.batch(**sizes)),
    )
    try:
        wide = outputs_of(precise, sizes)
    except Exception:  # it names its dtypes itself
        return {}
    pairs = ((name, wide.get(name), value) for name, value in plain.items())
    return {
        name: _off(value, other, Numerics.ROUNDING).error
        for name, other, value in pairs
        if other is not None and other.shape == value.shape
    }


def judge_outputs(
    plain: Mapping[str, torch.Tensor],
    planned: Mapping[str, torch.Tensor],
    numerics: Numerics,
    *,
    own: Mapping[str, float] | None = None,
) -> OutputCheck:
    """Compare outputs by what is promised.

    Args:
        own: what the plain program is off by itself, by output; see NOTE [What rounding is here].
    """
    equal, passes = 0, set(plain) == set(planned)
    worst = _Off(error=0.0, allowed=allowed_error(numerics, torch.float32), largest=0.0)
    worst_name, nearest = "", -1.0
    for name, reference in plain.items():
        other = planned.get(name)
        if other is not None and _same(reference, other):
            equal += 1
            continue
        found = _off(reference, other, numerics)
        if found.allowed is not None and own is not None and math.isfinite(own.get(name, 0.0)):
            found = replace(found, allowed=max(found.allowed, OWN_ROUNDING * own.get(name, 0.0)))
        if (share := found.error / (found.allowed or 1.0)) > nearest:
            worst, worst_name, nearest = found, name, share
        if numerics is Numerics.BITWISE or (found.allowed is not None and not found.error <= found.allowed):
            passes = False
    return OutputCheck(
        outputs=len(plain),
        equal=equal,
        worst=worst.error,
        worst_name=worst_name,
        allowed=worst.allowed,
        largest=worst.largest,
        passes=passes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Off:
    """By how much an output is off."""

    error: float
    allowed: float | None
    largest: float


def _same(reference: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; no number is unlike another of its kind."""
    if reference.shape != other.shape or reference.dtype != other.dtype:
        return False
    return torch.equal(reference, other) or (
        reference.is_floating_point()
        and torch.equal(reference.isnan(), other.isnan())
        and torch.equal(reference.nan_to_num(), other.nan_to_num())
    )


def _off(reference: torch.Tensor, other: torch.Tensor | None, numerics: Numerics) -> _Off:
    whole = not (reference.is_floating_point() or reference.is_complex())
    allowed = FLIPPED if whole and numerics is Numerics.ROUNDING else allowed_error(numerics, reference.dtype)
    if other is None or reference.shape != other.shape:
        return _Off(error=math.inf, allowed=allowed, largest=math.inf)
    if whole:
        part = float((reference != other).double().mean())
        return _Off(error=part, allowed=allowed, largest=part)
    difference = (other.to(reference.dtype) - reference).abs().double()
    return _Off(
        error=_part(float(difference.norm()), float(reference.abs().double().norm())),
        allowed=allowed,
        largest=_part(float(difference.max()), float(reference.abs().max())),
    )


def _part(difference: float, scale: float) -> float:
    found = difference / scale if scale else math.inf
    return math.inf if math.isnan(found) else found
