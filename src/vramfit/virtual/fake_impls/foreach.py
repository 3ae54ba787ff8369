"""Ops over lists of tensors (``torch._foreach_*``, fused optimizers).

FakeTensorMode would take each list apart and run every element through its slow path. Their results are known
without: an in-place op returns nothing new, and an out-of-place one returns a list of tensors like its first.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.torch_internals.dispatch import all_op_names
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.fake_impls.registry import RULES, find_overload, rule
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

# Out-of-place list ops whose results are not shaped and typed like their first list.
_OTHERWISE = {"_foreach_norm", "_foreach_max", "_foreach_copy", "_foreach_powsum"}


def in_place(mode: OpRunner, call: OpCall) -> Any:
    """An in-place list op: shapes stay; only temporaries, time and shadows matter."""
    first = call.args[0]
    written = [t for t in first if isinstance(t, torch.Tensor)] if isinstance(first, (list, tuple)) else []
    mode.settle(call, written)
    return None if not call.func._schema.returns else first


def like_first(mode: OpRunner, call: OpCall) -> Any:
    """An out-of-place list op: one result like each tensor of the first list, in the list's order."""
    first = call.args[0]
    if any(type(t) is not FakeTensor for t in first):
        return mode.run(call)
    other = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], (list, tuple)) else first
    peers = other if len(other) == len(first) and isinstance(other[0], torch.Tensor) else first
    if any(a.dtype != b.dtype or a.shape != b.shape for a, b in zip(first, peers, strict=True)) or any(
        not t.dtype.is_floating_point for t in first
    ):
        return mode.run(call)  # type promotion or broadcasting: let torch say
    out = [mode.fake_like(t) for t in first]
    mode.settle(call, out)
    return out


def _register() -> None:
    # torch.ops.aten lists only the ops that were used before; the dispatcher knows them all.
    for full_name in all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or not name.startswith(("_foreach_", "_fused_")):
            continue
        packet, _, overload = name.partition(".")
        func = find_overload(f"aten.{packet}.{overload or 'default'}")
        if func is None or overload.endswith("out"):
            continue
        first = func._schema.arguments[0]
        if "List" not in str(first.type):
            continue
        if first.alias_info is not None and first.alias_info.is_write:
            RULES[func] = in_place
        elif packet.startswith("_foreach_") and packet not in _OTHERWISE:
            RULES[func] = like_first


_register()


@rule("aten._amp_foreach_non_finite_check_and_unscale_.default")
def unscale_(mode: OpRunner, call: OpCall) -> None:
    """GradScaler's check: gradients that nobody computed are taken as finite, so ``found_inf`` keeps its value."""
    grads, _found_inf, inverse_scale = call.args
    views = [mode.shadows.view(g) for g in grads]
    if all(v is not None for v in views):
        mode.settle(call, None)
        return
    for gradient in grads:
        mode.shadows.forget(gradient)
    mode.settle(call.with_arguments((), (), inverse_scale), None)
