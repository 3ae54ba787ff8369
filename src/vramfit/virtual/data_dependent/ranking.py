"""Guesses at indices: which entries a ranking (``topk``, ``sort``) would name, where nobody computed the values.

The indices of one ranking differ from each other, as those of a card do. A choice among few (experts, classes) is
spread evenly; one among many (a vocabulary) is the same for each row and keeps away from both ends, where vocabularies
keep their special tokens.
"""

from __future__ import annotations

import torch

from vramfit.virtual.op_call import OpCall

_aten = torch.ops.aten
_AXIS_AT = {_aten.topk.default: 2, _aten.sort.default: 1, _aten.argsort.default: 1}
_RANKINGS = {
    _aten.topk.default,
    _aten.sort.default,
    _aten.sort.stable,
    _aten.argsort.default,
    _aten.argsort.stable,
}
_FEW = 512


def ranks(call: OpCall, out: torch.Tensor) -> torch.Tensor | None:
    """Plausible indices for the small result of a ranking; None for other ops.

    Args:
        call: the op, whose first argument is a tensor without values.
        out: the result that holds the indices.
    """
    func, args = call.func, call.args
    source = args[0] if args else None
    if func not in _RANKINGS or not isinstance(source, torch.Tensor) or not source.dim() or not out.numel():
        return None
    at = _AXIS_AT.get(func, len(args))
    axis = call.kwargs.get("dim", args[at] if len(args) > at else -1) % source.dim()
    choices, taken = source.shape[axis], out.shape[axis]
    rows = out.numel() // taken
    first = torch.full((rows, 1), choices // 3, device="cpu")
    if choices <= _FEW:
        first = first + torch.arange(rows, device="cpu").unsqueeze(1) * taken
    values = (first + torch.arange(taken, device="cpu")) % choices
    others = [size for dimension, size in enumerate(out.shape) if dimension != axis]
    shaped: torch.Tensor = values.reshape(*others, taken).movedim(-1, axis).to(out.dtype)
    return shaped
