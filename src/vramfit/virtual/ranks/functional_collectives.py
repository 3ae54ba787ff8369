"""Collectives that return their results, ``_c10d_functional::*``, which DTensor and compiled programs call.

A result is a fresh tensor of the gathered, scattered or exchanged size, made before the collective begins on the
group's own stream; ``wait_tensor`` lets the current stream wait for it (torch/csrc/distributed/c10d/Functional.cpp).
Until then the input stays alive, as in NOTE [What an asynchronous collective holds] in works.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceOp

from vramfit.capture.ops import tensors_in
from vramfit.gpus.nccl.collective_times import NcclCollective
from vramfit.torch_internals.distributed import AsyncCollectiveTensor, backend_of, resolve_process_group
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.fake_impls.registry import find_overload
from vramfit.virtual.noted import Noted
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner
from vramfit.virtual.ranks.asked_sizes import AskedSizes
from vramfit.virtual.ranks.communicators import Communicator, Communicators, is_handle
from vramfit.virtual.ranks.peer_values import PeerValues, named_reduction
from vramfit.virtual.ranks.routed_tokens import RoutedTokens
from vramfit.virtual.simulated_streams import Engine

Shape = tuple[int, ...]
_ON_COPIES = (NcclCollective.ALL_REDUCE, NcclCollective.BROADCAST)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """What is held for a result until the program waits for it."""

    until: float
    device: int
    inputs: tuple[torch.Tensor, ...]


class FunctionalCollectives:
    """The rules of all functional collectives.

    Args:
        communicators: of the run.
        values: moves known values.
        sizes: says where sizes of other ranks decide.
        tokens: says how many tokens a rank of experts receives.
    """

    def __init__(
        self, communicators: Communicators, values: PeerValues, sizes: AskedSizes, tokens: RoutedTokens
    ) -> None:
        self._sizes = sizes
        self._tokens = tokens
        self._communicators = communicators
        self._values = values
        self._waiting: Noted[_Waiting] = Noted()

    def handlers(self) -> dict[Any, Handler]:
        """By overload, as far as this torch has them."""
        by_name: dict[str, Callable[[OpRunner, OpCall], Any]] = {
            "wait_tensor": self._wait,
            "wait_tensors": self._wait_for_all,  # since 2.15
            "_wrap_tensor_autograd": self._wrapped,
            "all_reduce": self._reduced,
            "all_reduce_coalesced": self._reduced,
            "all_reduce_": self._reduced_in_place,
            "all_reduce_coalesced_": self._reduced_in_place,
            "broadcast": self._broadcast,
            "broadcast_": self._broadcast_in_place,
            "all_gather_into_tensor": self._gathered,
            "all_gather_into_tensor_coalesced": self._gathered,
            "all_gather_into_tensor_out": self._gathered,
            "reduce_scatter_tensor": self._scattered,
            "reduce_scatter_tensor_coalesced": self._scattered,
            "reduce_scatter_tensor_out": self._scattered,
            "all_to_all_single": self._exchanged,
            "isend": self._sent,
            "irecv": self._received,
            "batch_p2p_ops": self._sent_together,
        }
        made: dict[Any, Handler] = {}
        for name, function in by_name.items():
            made[find_overload(f"_c10d_functional.{name}.default")] = _on_host_too(function)
        made[find_overload("_dtensor.shard_dim_alltoall.default")] = _on_host_too(self._dimension_exchanged)
        made.pop(None, None)
        return made

    # -- the rules ---------------------------------------------------------------------------------------------

    def _wait(self, mode: OpRunner, call: OpCall) -> Any:
        return self._waited(mode, call.args[0])

    def _wait_for_all(self, mode: OpRunner, call: OpCall) -> Any:
        return [self._waited(mode, tensor) for tensor in call.args[0]]

    def _waited(self, mode: OpRunner, tensor: torch.Tensor) -> torch.Tensor:
        waiting = self._waiting.find(tensor) if type(tensor) is FakeTensor else None
        if waiting is not None:
            clock = mode.machine.clock
            clock.hold(waiting.device, mode.machine.current_stream(waiting.device), waiting.until)
            self._waiting.forget(tensor)
        return tensor

    def _wrapped(self, mode: OpRunner, call: OpCall) -> Any:
        """The tensor that waits at its first use, around a result: no memory; torch's description makes a copy."""
        return AsyncCollectiveTensor(call.args[0])

    def _reduced(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)
        op = named_reduction(call.argument(1, "reduce_op"))
        return self._each(
            mode, call, group, NcclCollective.ALL_REDUCE, lambda t: tuple(t.shape), self._take(op, group)
        )

    def _reduced_in_place(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)
        op = named_reduction(call.argument(1, "reduce_op"))
        for tensor in tensors_in(call.args[0]):
            self._values.reduce(tensor, op, group.size)
        self._run(
            mode, call, group, NcclCollective.ALL_REDUCE, tensors_in(call.args[0]), tensors_in(call.args[0])
        )
        return call.args[0]

    def _broadcast(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)
        take = self._take(ReduceOp.AVG, group)
        return self._each(mode, call, group, NcclCollective.BROADCAST, lambda t: tuple(t.shape), take)

    def _broadcast_in_place(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)
        self._run(
            mode, call, group, NcclCollective.BROADCAST, tensors_in(call.args[0]), tensors_in(call.args[0])
        )
        return call.args[0]

    def _gathered(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)

        def shape(tensor: torch.Tensor) -> Shape:
            return (tensor.shape[0] * group.size, *tensor.shape[1:]) if tensor.dim() else (group.size,)

        return self._each(mode, call, group, NcclCollective.ALL_GATHER, shape, self._values.copy)

    def _scattered(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)
        op = named_reduction(call.argument(1, "reduce_op"))

        def take(target: torch.Tensor, source: torch.Tensor) -> None:
            self._values.part(target, source, group.rank, group.size)
            self._values.reduce(target, op, group.size)

        def shape(tensor: torch.Tensor) -> Shape:
            return (tensor.shape[0] // group.size, *tensor.shape[1:])

        return self._each(mode, call, group, NcclCollective.REDUCE_SCATTER, shape, take)

    def _exchanged(self, mode: OpRunner, call: OpCall) -> Any:
        group = self._group(call)
        outs: Sequence[int] = call.argument(1, "output_split_sizes") or ()
        ins: Sequence[int] = call.argument(2, "input_split_sizes") or ()
        if group.size > 1:
            self._sizes.uneven(list(ins))

        def take(target: torch.Tensor, source: torch.Tensor) -> None:
            if len(set(ins)) > 1:
                self._values.forget(target)
            else:
                self._values.part(target, source, group.rank, group.size)

        def shape(tensor: torch.Tensor) -> Shape:
            return (sum(int(n) for n in outs) if outs else tensor.shape[0], *tensor.shape[1:])

        found = self._each(mode, call, group, NcclCollective.ALL_TO_ALL, shape, take)
        if len({*ins, *outs}) <= 1:  # torch names the sizes of equal parts
            self._tokens.exchanged(tensors_in(found), tensors_in(call.args[0]), group)
        return found

    def _dimension_exchanged(self, mode: OpRunner, call: OpCall) -> Any:
        """DTensor's change of the sharded dimension, as in Functional.cpp: a tensor for each rank, and their join."""
        group = self._group(call)
        gather_dim, shard_dim = call.args[1], call.args[2]
        given: torch.Tensor = call.args[0]
        length = given.shape[shard_dim] // group.size
        shape = [length if axis == shard_dim else size for axis, size in enumerate(given.shape)]
        with mode:
            parts = [given.narrow(shard_dim, i * length, length).contiguous() for i in range(group.size)]
            outs = [torch.empty(shape, dtype=given.dtype, device=given.device) for _ in range(group.size)]
            _process_group(call).alltoall(outs, parts).wait()
            return torch.cat(outs, gather_dim)

    def _sent(self, mode: OpRunner, call: OpCall) -> Any:
        return call.args[0]

    def _received(self, mode: OpRunner, call: OpCall) -> Any:
        self._values.forget(call.args[0])
        return call.args[0]

    def _sent_together(self, mode: OpRunner, call: OpCall) -> Any:
        for kind, tensor in zip(call.args[0], call.args[3], strict=True):
            if "recv" in kind:
                self._values.forget(tensor)
        return list(call.args[3])

    # -- what they share ---------------------------------------------------------------------------------------

    def _group(self, call: OpCall) -> Communicator:
        return self._communicators.of(_process_group(call))

    def _take(self, op: Any, group: Communicator) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def take(target: torch.Tensor, source: torch.Tensor) -> None:
            self._values.copy(target, source)
            self._values.reduce(target, op, group.size)

        return take

    def _each(
        self,
        mode: OpRunner,
        call: OpCall,
        group: Communicator,
        kind: NcclCollective,
        shape: Callable[[torch.Tensor], Shape],
        take: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> Any:
        """A fresh result, or the one that the program gave, for each tensor that comes in."""
        several = isinstance(call.args[0], (list, tuple))
        sources = tensors_in(call.args[0])
        given = call.kwargs.get("out")
        results = [given] if given is not None else [_fresh(mode, t, shape(t)) for t in sources]
        if given is None and any(type(t) is FakeTensor for t in results):
            call.info.shadowed = False  # never run for real
            mode.settle(call, results if several else results[0], engine=Engine.LINK)
        for target, source in zip(results, sources, strict=True):
            take(target, source)
        self._run(mode, call, group, kind, results, sources)
        return results if several else results[0]

    def _run(
        self,
        mode: OpRunner,
        call: OpCall,
        group: Communicator,
        kind: NcclCollective,
        results: list[torch.Tensor],
        sources: list[torch.Tensor],
    ) -> None:
        """Give the group's stream its work, and hold the inputs until somebody waits for a result.

        Reductions and broadcasts work on the result alone, which begins as a copy (Functional.cpp: ``all_reduce``).
        """
        card = next((t for t in results if type(t) is FakeTensor and t.device.type == "cuda"), None)
        if card is None:
            return
        device = card.device.index or 0
        wholes = results if kind is NcclCollective.ALL_GATHER else sources
        nbytes = sum(t.numel() * t.element_size() for t in wholes)
        until, _ = self._communicators.run(group, kind, nbytes, device, own_stream=True)
        for result in results:
            if type(result) is FakeTensor:
                held = () if kind in _ON_COPIES else tuple(s for s in sources if s is not result)
                self._waiting.set(result, _Waiting(until, device, held))


def _fresh(mode: OpRunner, like: torch.Tensor, shape: Shape) -> torch.Tensor:
    if type(like) is FakeTensor:
        return mode.fake_empty(shape, like.dtype, like.device)
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _on_host_too(function: Callable[[OpRunner, OpCall], Any]) -> Handler:
    """A handler that real tensors of the host reach as well, for groups of more than one rank."""

    def handle(mode: OpRunner, call: OpCall) -> Any:
        fake = any(type(t) is FakeTensor for t in (*call.tensors(),))
        if not fake and not _ours(call):
            return call.func(*call.args, **call.kwargs)
        return function(mode, call)

    handle.on_host = True  # type: ignore[attr-defined]
    return handle


def _process_group(call: OpCall) -> ProcessGroup:
    """The group of a call, which older torch names by text and newer also hands over."""
    given = call.by_name()["group_name"]
    if isinstance(given, torch.ScriptObject):
        return ProcessGroup.unbox(given)
    resolve: Any = resolve_process_group  # its argument has a type of its own only in newer torch
    found: ProcessGroup = resolve(given) if isinstance(given, str) else given
    return found


_WAITING = (
    "_c10d_functional.wait_tensor",
    "_c10d_functional.wait_tensors",
    "_c10d_functional._wrap_tensor_autograd",
)


def _ours(call: OpCall) -> bool:
    """Whether a handle of ours would have to do it."""
    if call.info.name in _WAITING:
        return False
    device = call.tensors()[0].device.type
    return is_handle(backend_of(_process_group(call), torch.device(device)))
