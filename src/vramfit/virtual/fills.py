"""Plausible values for tensors that nobody computed: what a softmax, a sigmoid, a norm or an exponential must give.

NOTE [Fills]
A program may look at probabilities on the host: draw from them, check that they sum to one, take their logarithm. All
elements of a softmax over n that nobody computed are taken for 1/n, of a sigmoid for a half, of a normalised vector for
one over the root of its length. Such a *fill* is one number for a storage; copies and picks keep it, arithmetic on
fills alone is done with the numbers, and anything else that is written there ends it. A fill is used only where the
program looks (fake_impls/host.py), so nothing is computed from it that decides a shape, a token or an index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.data_dependent.shadow import map_tensors
from vramfit.virtual.noted import Noted
from vramfit.virtual.op_call import OpCall

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Fill:
    """The number that each element of a tensor is taken for.

    Attributes:
        value: the number.
        low, high: no element can be less, or more.
        length: of the vectors, where the number is their norm; 0 for other values.
    """

    value: float
    low: float = -math.inf
    high: float = math.inf
    length: int = 0


_Rule = Callable[["Fills", OpCall], Fill | None]


class Concern(IntEnum):
    """Whether `Fills.follow` has something to do for an op."""

    NEVER = 0
    WITH_FILLS = 1
    """Where there are fills."""
    ALWAYS = 2


def concern(call: OpCall) -> Concern:
    """Whether an op makes fills, only carries on those that exist, or has nothing to do with any."""
    if call.func in _SOURCES:
        return Concern.ALWAYS
    return Concern.WITH_FILLS if call.info.mutated or call.func in _RULES else Concern.NEVER


class Fills:
    """The fills of a virtual GPU."""

    def __init__(self) -> None:
        self._noted: Noted[Fill] = Noted()

    def find(self, tensor: torch.Tensor) -> Fill | None:
        """The fill of a fake tensor; None where nothing is known."""
        return self._noted.find(tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the fill of a tensor that was overwritten."""
        self._noted.forget(tensor)

    def __len__(self) -> int:
        """The number of tensors that have one."""
        return len(self._noted)

    def follow(self, call: OpCall) -> None:
        """Note the fill that an op gives, and drop those that it overwrites."""
        info, out = call.info, call.out
        rule = _RULES.get(call.func)
        if rule is None and not (info.mutated and len(self._noted)):
            return
        found = None if rule is None else rule(self, call)
        for tensor in call.written() if info.mutated else ():
            self._noted.forget(tensor)
        target = out[0] if isinstance(out, (tuple, list)) and out else out
        if found is not None and isinstance(target, torch.Tensor) and target.layout is torch.strided:
            whole = target.numel() * target.element_size() == target.untyped_storage().nbytes()
            if target.is_floating_point() and (info.fresh or whole):
                self._noted.set(target, found)


def _sizes(source: torch.Tensor, dims: Any) -> int:
    """The number of elements along some dimensions; of all elements where no dimension is named."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return source.numel()
    axes = (dims,) if isinstance(dims, int) else dims
    return math.prod(source.shape[axis] for axis in axes) if source.dim() else 1


def _softmax(_fills: Fills, call: OpCall) -> Fill:
    return Fill(1 / max(1, _sizes(call.args[0], call.argument(1, "dim", -1))), 0.0, 1.0)


def _log_softmax(fills: Fills, call: OpCall) -> Fill:
    return Fill(math.log(_softmax(fills, call).value), high=0.0)


def _constant(fill: Fill) -> _Rule:
    def give(_fills: Fills, _call: OpCall) -> Fill:
        return fill

    return give


def _norm(_fills: Fills, call: OpCall) -> Fill | None:
    """The fill of a norm of vectors (``linalg_vector_norm``) of order two, by which vectors are normalised."""
    order = call.args[1] if len(call.args) > 1 else 2
    if order != 2 or not call.out.numel():
        return None
    return Fill(1.0, low=0.0, length=call.args[0].numel() // call.out.numel())


def _same(fills: Fills, call: OpCall) -> Fill | None:
    return fills.find(call.args[0])


def _copied(fills: Fills, call: OpCall) -> Fill | None:
    return fills.find(call.args[1]) if isinstance(call.args[1], torch.Tensor) else None


def _joined(fills: Fills, call: OpCall) -> Fill | None:
    found = {fills.find(part) for part in call.args[0]}
    return found.pop() if len(found) == 1 else None


def _summed(fills: Fills, call: OpCall) -> Fill | None:
    known = fills.find(call.args[0])
    if known is None or not call.out.numel():
        return None
    count = call.args[0].numel() // call.out.numel()
    return Fill(known.value * count, known.low * count if known.low else 0.0, known.high * count)


def _computed(func: OpOverload) -> _Rule:
    """Arithmetic on fills and numbers."""

    def compute(fills: Fills, call: OpCall) -> Fill | None:
        known = [fills.find(value) for value in call.args if isinstance(value, torch.Tensor)]
        given = [fill for fill in known if fill is not None]
        if func is _DIVIDE and known[0] is None and given and given[0].length:
            return Fill(1 / math.sqrt(given[0].length), -1.0, 1.0)
        if not given or len(given) < len(known):
            return None
        if len(known) == 1 and given[0].length and func in _KEEPING:
            return given[0]
        value = func(*map_tensors(lambda t: _number(fills, t), call.args), **call.kwargs).item()
        return replace(Fill(value), low=0.0) if min(fill.low for fill in given) >= 0 <= value else Fill(value)

    return compute


def _number(fills: Fills, tensor: torch.Tensor) -> torch.Tensor:
    found = fills.find(tensor)
    assert found is not None
    return torch.tensor(found.value, dtype=torch.float64, device="cpu")


_DIVIDE = _aten.div.Tensor
_KEEPING = {_aten.clamp_min.default, _aten.clamp.default, _aten.add.Tensor}
_TABLE: dict[tuple[str, ...], _Rule] = {
    ("_softmax", "_safe_softmax"): _softmax,
    ("_log_softmax",): _log_softmax,
    ("sigmoid", "sigmoid_"): _constant(Fill(0.5, 0.0, 1.0)),
    ("log_sigmoid_forward",): _constant(Fill(-math.log(2), high=0.0)),
    ("exp", "exp_"): _constant(Fill(1.0, low=0.0)),
    ("softplus",): _constant(Fill(math.log(2), low=0.0)),
    ("linalg_vector_norm",): _norm,
    ("clone", "_to_copy", "index.Tensor", "index_select", "gather", "repeat", "expand_copy", "flip"): _same,
    ("topk", "sort", "sort.stable", "max.dim", "min.dim", "amax", "amin", "max", "min"): _same,
    ("mean", "mean.dim", "masked_select", "take_along_dim", "roll"): _same,
    ("copy_",): _copied,
    ("cat", "stack"): _joined,
    ("sum", "sum.dim_IntList"): _summed,
}
_FROM_FILLS = {_same, _copied, _joined, _summed}
_RULES: dict[OpOverload, _Rule] = {}
_SOURCES: set[OpOverload] = set()  # they give fills whatever they read
for _names, _rule in _TABLE.items():
    for _name in _names:
        _packet, _, _overload = _name.partition(".")
        _op = getattr(getattr(_aten, _packet, None), _overload or "default", None)
        if isinstance(_op, OpOverload):
            _RULES[_op] = _rule
            if _rule not in _FROM_FILLS:
                _SOURCES.add(_op)
for _op in (
    *(_aten.mul.Tensor, _aten.div.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Scalar),
    *(_aten.neg.default, _aten.log.default, _aten.log1p.default, _aten.sqrt.default, _aten.rsub.Scalar),
    *(_aten.pow.Tensor_Scalar, _aten.reciprocal.default, _aten.abs.default, _aten.expm1.default),
    *(_aten.clamp.default, _aten.clamp_min.default, _aten.clamp_max.default),
):
    _RULES[_op] = _computed(_op)
