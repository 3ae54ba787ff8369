"""Functional collectives of one rank (``_c10d_functional::*``), as DTensor and compiled programs call them.

Out of place they give a tensor of their own (torch/csrc/distributed/c10d/Functional.cpp): a clone for ``all_reduce``
and ``broadcast``, a new one for those that gather or scatter; with one rank it has the input's size.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.fake_impls.registry import LATE, RULES, find_overload
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner
from vramfit.virtual.ranks.collectives import copy

_CLONE = torch.ops.aten.clone.default
_CONTIGUOUS = {"memory_format": torch.contiguous_format}


def _same(mode: OpRunner, call: OpCall) -> Any:
    """In place, or a wait: what came in."""
    return call.args[0]


def _copied(mode: OpRunner, call: OpCall) -> Any:
    if isinstance(call.args[0], (list, tuple)):
        return [_clone(mode, tensor) for tensor in call.args[0]]
    return _clone(mode, call.args[0])


def _clone(mode: OpRunner, tensor: torch.Tensor) -> Any:
    return mode.run(mode.call(_CLONE, tensor, **_CONTIGUOUS))


def _into(mode: OpRunner, call: OpCall) -> Any:
    """A result that the program allocated."""
    copy(mode, call.kwargs["out"], call.args[0])
    return call.kwargs["out"]


_RULES: dict[str, Handler] = {
    "wait_tensor": _same,
    "all_reduce_": _same,
    "all_reduce_coalesced_": _same,
    "broadcast_": _same,
    "all_reduce": _copied,
    "all_reduce_coalesced": _copied,
    "broadcast": _copied,
    "all_gather_into_tensor": _copied,
    "all_gather_into_tensor_coalesced": _copied,
    "reduce_scatter_tensor": _copied,
    "reduce_scatter_tensor_coalesced": _copied,
    "all_to_all_single": _copied,
    "all_gather_into_tensor_out": _into,
    "reduce_scatter_tensor_out": _into,
}


def register() -> None:
    """Put the rules of all functional collectives into the table; a repeated call changes nothing."""
    for name, handler in _RULES.items():
        full = f"_c10d_functional.{name}.default"
        overload = find_overload(full)
        if overload is None:
            LATE[full] = handler
        else:
            RULES[overload] = handler
