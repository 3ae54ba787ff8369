"""Which call of a model first gives something else in the kept part of a tile, when what lies beyond it differs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vramfit.inference.trial_model import TrialModel
from vramfit.workload.containers import tensors_in

_MOST = 1 << 16
"""Elements of a result without spatial axes that is compared."""


@dataclass(frozen=True, kw_only=True)
class TrialRun:
    """An input and what of it is kept.

    Attributes:
        given: the input ``[b, C, *spatial]``.
        kept: the first and the last step whose results are kept, by axis, in the input's own steps.
    """

    given: torch.Tensor
    kept: tuple[tuple[int, int], ...]


def first_difference(model: TrialModel, one: TrialRun, other: TrialRun, bar: float) -> str:
    """The call and its line in the model's code, e.g. ``mean (net.py:12)``; empty where it is not known."""
    logs: list[list[_Call]] = []
    for run in (one, other):
        log = _CallLog(run)
        model.run(run.given, watch=log)
        logs.append(log.calls)
    for before, after in zip(logs[0], logs[1], strict=False):
        if before.name != after.name:
            return f"a branch that depends on values, before {after.named()}"
        for first, second in zip(before.results, after.results, strict=False):
            if first is not None and second is not None and _differ(first, second, bar):
                return after.named()
    return ""


@dataclass(frozen=True)
class _Call:
    name: str
    place: str
    results: Sequence[Any]

    def named(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name


class _CallLog(TorchFunctionMode):
    """Notes what each call gives for the kept part."""

    def __init__(self, run: TrialRun) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        del types
        found = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__"):
            results = [self._kept(tensor) for tensor in tensors_in(found)]
            if isinstance(found, bool | int | float):
                results = [torch.tensor(float(found))]
            self.calls.append(_Call(name.strip("_"), _place(), results))
        return found

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The kept part of a result that follows the input; a small result without spatial axes as it is."""
        sizes = self._run.given.shape[2:]
        axes = len(sizes)
        if tensor.dim() > axes and all(length > 1 for length in tensor.shape[-axes:]):
            index: list[Any] = [...]
            for length, size, (first, last) in zip(tensor.shape[-axes:], sizes, self._run.kept, strict=True):
                scale = Fraction(length, size).limit_denominator(max(1, size // 8))
                index.append(slice(-(-first * scale.numerator // scale.denominator), int(last * scale)))
            return tensor[tuple(index)].detach().cpu().clone()
        if tensor.numel() > _MOST or any(length >= min(sizes) for length in tensor.shape):
            return None
        return tensor.detach().cpu().clone()


def _differ(one: torch.Tensor, other: torch.Tensor, bar: float) -> bool:
    if one.shape != other.shape or not one.numel():
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return not torch.equal(one, other)
    scale = max(float(one.abs().nan_to_num(0, 0, 0).max()), 1e-30)
    return bool(((one - other).abs().nan_to_num(0, 0, 0) > bar * scale).any())


_TORCH = str(Path(torch.__file__).parent) + os.sep
_OWN = str(Path(__file__).parent) + os.sep


def _place() -> str:
    """The line of the model's own code that calls: the nearest that is neither torch's nor of the check."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OWN):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
