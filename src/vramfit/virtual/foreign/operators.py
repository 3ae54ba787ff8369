"""Operators that a program registered: those that are written in Python run as they are, on virtual tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.triton import triton_ops_to_kernels

from vramfit.capture.ops import Handler
from vramfit.virtual.foreign.effects import note_launch, virtual_tensors
from vramfit.virtual.foreign.fake_kernels import KERNELS, FakeKernel
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.undescribed import OF_TORCH


def handler_of(func: torch._ops.OpOverload) -> Handler | None:
    """How a program's operator runs, None where its fake implementation tells all that can be known.

    A stand-in of the user comes first. Then the operator's own Python: on a card it runs too, and what it allocates on
    its way is seen; ``register_fake`` would tell the results alone. Where the author gave both, Python may call what
    cannot run (a compiled function), so the description is taken, except for ``triton_op``, whose description is its
    Python.
    """
    if func.namespace in OF_TORCH:
        return None
    name = func._schema.name
    overload = func._overloadname
    kernel = KERNELS.get(name if overload in ("", "default") else f"{name}.{overload}")
    if kernel is not None:
        return _stand_in(kernel)
    definition = OPDEFS.get(name)
    if definition is None or (definition._abstract_fn is not None and name not in triton_ops_to_kernels):
        return None
    return _python(definition)


def _stand_in(kernel: FakeKernel) -> Handler:
    def handle(mode: OpRunner, call: OpCall) -> Any:
        with mode:
            out = kernel.function(*call.args, **call.kwargs)
        names = [argument.name for argument in call.func._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        declared = {
            a.name for a in call.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        }
        written = virtual_tensors([given.get(name) for name in declared | kernel.writes])
        note_launch(mode, kernel.name, virtual_tensors((call.args, call.kwargs, out)), written)
        return out

    return handle


def _python(definition: Any) -> Handler:
    def handle(mode: OpRunner, call: OpCall) -> Any:
        implementation: Callable[..., Any] = definition._backend_fns.get("cuda") or definition._init_fn
        with mode:
            return implementation(*call.args, **call.kwargs)

    return handle
