"""Collectives of one rank: what each writes, and what torch's side of NCCL allocates for it.

With one rank every collective copies its inputs to its outputs, so known values stay known. ``c10d::*`` writes into
tensors of the program. ``_c10d_functional::*``, which DTensor and compiled programs call, returns new ones
(torch/csrc/distributed/c10d/Functional.cpp): a clone for ``all_reduce`` and ``broadcast``, a tensor of the gathered or
scattered size for the others, which with one rank is the input's.

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
from torch.distributed import distributed_c10d

from vramfit.capture.ops import tensors_in
from vramfit.patching import PatchStack
from vramfit.virtual.fake_impls.registry import LATE, RULES, find_overload
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner

Pair = tuple[torch.Tensor, torch.Tensor]
_COPY_ = torch.ops.aten.copy_.default
_CLONE = torch.ops.aten.clone.default


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
        # Pickled objects are known whatever their size.
        mode.shadows.set(target, value, guessed=shadow.guessed)


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
    """The backend that does a group's collectives of tensors on a device.

    Raises:
        RuntimeError: torch's own; the group has no such backend (a group of NCCL alone and CPU tensors).
    """
    boxed = next(value for value in args if isinstance(value, torch.ScriptObject))
    group = torch.distributed.ProcessGroup.unbox(boxed)
    return group._get_backend(torch.device(device.type))


def _no_peer(mode: OpRunner, call: OpCall) -> Any:
    raise ValueError(f"vramfit: {call.func} wants another rank, and this group has one")


def _nothing(mode: OpRunner, call: OpCall) -> None:
    return None


def _same(mode: OpRunner, call: OpCall) -> Any:
    """What came in: the op works in place, or waits."""
    return call.args[0]


def _copied(mode: OpRunner, call: OpCall) -> Any:
    if isinstance(call.args[0], (list, tuple)):
        return [_clone(mode, tensor) for tensor in call.args[0]]
    return _clone(mode, call.args[0])


def _clone(mode: OpRunner, tensor: torch.Tensor) -> Any:
    return mode.run(mode.call(_CLONE, tensor, memory_format=torch.contiguous_format))


def _into(mode: OpRunner, call: OpCall) -> Any:
    """The tensor that the program gave for the result."""
    copy(mode, call.kwargs["out"], call.args[0])
    return call.kwargs["out"]


_FUNCTIONAL: dict[str, Handler] = {
    **dict.fromkeys(("wait_tensor", "all_reduce_", "all_reduce_coalesced_", "broadcast_"), _same),
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "broadcast", "all_to_all_single"), _copied),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), _copied),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), _copied),
    **dict.fromkeys(("all_gather_into_tensor_out", "reduce_scatter_tensor_out"), _into),
}


def register() -> None:
    """Put the rules of all collectives into the table; a repeated call changes nothing."""
    rules = {f"c10d.{name}": _collective(name, copies) for name, copies in _COPIES.items()}
    rules |= dict.fromkeys(("c10d.send", "c10d.recv_", "c10d.recv_any_source_"), _no_peer)
    rules |= dict.fromkeys(("c10d.check_for_nan", "c10d.monitored_barrier_"), _nothing)
    rules |= {f"_c10d_functional.{name}": handler for name, handler in _FUNCTIONAL.items()}
    for name, handler in rules.items():
        overload = find_overload(f"{name}.default")
        if overload is None:
            LATE[f"{name}.default"] = handler
        else:
            RULES[overload] = handler


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Follow the bytes of every Python object that torch pickles for a collective, however large it is.

    ``all_gather_object`` and the like pickle an object into a tensor of bytes, move that to the card, and unpickle
    what comes back. The virtual card follows values of small tensors only, and a vocabulary is larger.
    """
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]] = distributed_c10d._object_to_tensor

    def object_to_tensor(obj: Any, device: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pickled, size = original(obj, torch.device("cpu"), *rest)
        moved, moved_size = pickled.to(device), size.to(device)
        if type(moved) is FakeTensor and mode.shadows.find(moved) is None:
            mode.shadows.set(moved, pickled)
        return moved, moved_size

    patches.set(distributed_c10d, "_object_to_tensor", object_to_tensor)
