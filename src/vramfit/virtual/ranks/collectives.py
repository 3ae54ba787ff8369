"""Collectives of one rank (``c10d::*``): what each writes, and what torch's side of NCCL allocates for it.

With one rank every collective copies what goes in to what comes out, so values that are known stay known.

NOTE [What a collective allocates]
NCCL works in its own buffers, outside torch's allocator. Of the collectives in ProcessGroupNCCL.cpp only two take
blocks of the allocator: ``allgather`` gathers into one tensor as large as the list of outputs, and ``reduce_scatter``
takes the list of inputs together in one (both ``newLikeFlat``), where the tensors of the list are of one size. All
others work on the tensors of the program. (A program that drops the input of an ``async_op`` before it waits, or that
lets a gathered list wait, holds those a little longer on a card; here they go at once.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.capture.ops import tensors_in
from vramfit.virtual.fake_impls.registry import LATE, RULES, find_overload
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner

Pair = tuple[torch.Tensor, torch.Tensor]
_COPY_ = torch.ops.aten.copy_.default


def _in_place(args: tuple[Any, ...]) -> list[Pair]:
    return []


def _whole(args: tuple[Any, ...]) -> list[Pair]:
    return [(args[0], args[1])]


def _each(args: tuple[Any, ...]) -> list[Pair]:
    return list(zip(args[0], args[1], strict=True))


def _to_lists(args: tuple[Any, ...]) -> list[Pair]:
    return [(out, source) for outs, source in zip(args[0], args[1], strict=False) for out in outs]


def _from_lists(args: tuple[Any, ...]) -> list[Pair]:
    return [(out, source) for out, sources in zip(args[0], args[1], strict=False) for source in sources]


_COPIES: dict[str, Callable[[tuple[Any, ...]], list[Pair]]] = {
    "allreduce_": _in_place,
    "allreduce_coalesced_": _in_place,
    "broadcast_": _in_place,
    "reduce_": _in_place,
    "barrier": _in_place,
    "allgather_": _to_lists,
    "allgather_coalesced_": lambda args: [
        pair for outs in args[0] for pair in zip(outs, args[1], strict=False)
    ],
    "_allgather_base_": _whole,
    "allgather_into_tensor_coalesced_": _each,
    "reduce_scatter_": _from_lists,
    "_reduce_scatter_base_": _whole,
    "reduce_scatter_tensor_coalesced_": _each,
    "alltoall_": _each,
    "alltoall_base_": _whole,
    "gather_": _to_lists,
    "scatter_": _from_lists,
}
"""By op: which tensors it copies to which."""

_FLATTENED = {"allgather_": 0, "reduce_scatter_": 1}
"""By op: position of the list that NCCL's side of torch lays into one block. See NOTE [What a collective allocates]."""


def copy(mode: OpRunner, target: torch.Tensor, source: torch.Tensor) -> None:
    """Let a tensor have the values of another, of as many elements: nothing is allocated."""
    if type(target) is not FakeTensor:
        return  # a real tensor beside virtual ones keeps what it holds, as whatever is written from them
    if type(source) is not FakeTensor:
        source = mode.wrap(source)
    if source.shape != target.shape:
        source = torch.ops.aten.reshape.default(source, target.shape)
    mode.settle(mode.call(_COPY_, target, source), target)
    value, shadow = mode.shadows.view(source), mode.shadows.find(source)
    if (
        value is not None
        and shadow is not None
        and mode.shadows.find(target) is None
        and _whole_storage(target)
    ):
        mode.shadows.set(
            target, value, guessed=shadow.guessed
        )  # pickled objects are known whatever their size


def _whole_storage(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()


def finished(tensors: list[torch.Tensor]) -> Any:
    """A ``Work`` that is done, and holds its results as NCCL's does: DDP's reducer reads them there."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def _collective(name: str, copies: Callable[[tuple[Any, ...]], list[Pair]]) -> Any:
    def handle(mode: OpRunner, call: OpCall) -> Any:
        tensors = tensors_in(call.args)
        backend = backend_of(call.args, tensors[0].device)
        held = []
        if name in _FLATTENED and isinstance(backend, FakeProcessGroup):
            held = _flattened(mode, name, call.args[_FLATTENED[name]])
        for target, source in copies(call.args):
            copy(mode, target, source)
        mode.meter.give_back(held, tensors[0].device.index or 0)
        mode.meter.ops += 1
        work = finished(tensors_in(call.args[0]))
        returned = [str(result.type) for result in call.func._schema.returns]
        if len(returned) == 1:
            return work
        return call.args[0], work

    return handle


def _flattened(mode: OpRunner, name: str, lists: Any) -> list[Any]:
    """Take the block into which a list of tensors is laid; none for a list of several sizes, or on the host."""
    tensors = [tensor for tensor in tensors_in(lists) if type(tensor) is FakeTensor]
    if not tensors or tensors[0].device.type != "cuda" or len({tensor.shape for tensor in tensors}) > 1:
        return []
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return mode.meter.temporary([size], tensors[0].device.index or 0, f"c10d.{name}")


def backend_of(args: tuple[Any, ...], device: torch.device) -> Any:
    """What a group does collectives of such tensors with.

    Raises:
        RuntimeError: it has no backend for them (a group of NCCL alone and CPU tensors); the error is torch's own.
    """
    boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
    group = torch.distributed.ProcessGroup.unbox(boxed)
    return group._get_backend(torch.device(device.type))


def _no_peer(mode: OpRunner, call: OpCall) -> Any:
    raise ValueError(f"vramfit: {call.func} wants another rank, and this group has one")


def _nothing(mode: OpRunner, call: OpCall) -> None:
    return None


def register() -> None:
    """Put the rules of all ``c10d`` ops into the table; a repeated call changes nothing."""
    rules = {name: _collective(name, copies) for name, copies in _COPIES.items()}
    rules |= dict.fromkeys(("send", "recv_", "recv_any_source_"), _no_peer)
    rules |= dict.fromkeys(("check_for_nan", "monitored_barrier_"), _nothing)
    for name, handler in rules.items():
        full = f"c10d.{name}.default"
        overload = find_overload(full)
        if overload is None:
            LATE[full] = handler
        else:
            RULES[overload] = handler
