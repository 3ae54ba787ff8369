"""Operators that a program registered: run as Python on virtual tensors; and what a kernel that did not run leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.virtual.describe import OF_TORCH
from vramfit.virtual.foreign.fake_kernels import KERNELS, FakeKernel
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner
from vramfit.virtual.roofline import traffic_seconds

# -- What a kernel that did not run leaves behind: time has passed, and what it wrote has no known values.


NOT_RUN = (
    "kernels that are not torch's were not run: what they write has no values, and what they may take of the card "
    "themselves (Triton's global scratch memory) is not counted"
)


def note_launch(
    mode: OpRunner, name: str, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
) -> None:
    """Note that a kernel would have run.

    Args:
        mode: the virtual GPU.
        name: the kernel's.
        tensors: what it reads and writes.
        written: those that it writes.
    """
    mode.machine.warn("kernel-not-run", NOT_RUN, location=name)
    mode.meter.ops += 1
    seen = list(tensors)
    on_card = [tensor for tensor in seen if tensor.device.type == "cuda"]
    if on_card:
        device = on_card[0].device.index or 0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in on_card)
        seconds = traffic_seconds(moved, mode.machine.devices[device].spec, mode.machine.rates)
        mode.machine.advance(1e6 * seconds, device)
    for tensor in written:
        mode.shadows.forget(tensor)
        mode.meter.expect(tensor, None)


def virtual_tensors(tree: Any) -> list[torch.Tensor]:
    """Fake tensors among nested arguments; those that a descriptor or a view of Triton's wraps, too."""
    if isinstance(tree, FakeTensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in virtual_tensors(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in virtual_tensors(item)]
    base = getattr(tree, "base", None)  # triton.runtime.jit.TensorWrapper, triton.tools.tensor_descriptor
    return [base] if isinstance(base, FakeTensor) else []


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
