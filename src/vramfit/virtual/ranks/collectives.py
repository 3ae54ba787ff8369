"""Collectives in place: what each writes, what torch's side of NCCL allocates for it, and how long it takes.

Each collective arrives in the dispatch mode as an op ``c10d::*`` that writes into tensors of the program; a rule stands
for the backend. What the other ranks send is taken to equal what this rank holds (peer_values.py).

NOTE [What a collective allocates]
NCCL works in its own buffers, outside torch's allocator. Of the collectives in ProcessGroupNCCL.cpp only three take
blocks of the allocator: ``allgather`` gathers into one tensor as large as the list of outputs, and ``reduce_scatter``
takes the list of inputs together in one (both ``newLikeFlat``), where the tensors of the list are of one size; a
barrier reduces a tensor of one float. All others work on the tensors of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from vramfit.capture.ops import tensors_in
from vramfit.gpus.nccl.collective_times import NcclCollective
from vramfit.gpus.nccl.communicator_log import COLLECTIVE_OF_OP
from vramfit.torch_internals.cuda_device import initialize
from vramfit.torch_internals.distributed import backend_of
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import Category
from vramfit.virtual.fake_impls.registry import find_overload
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner
from vramfit.virtual.ranks.asked_sizes import AskedSizes
from vramfit.virtual.ranks.communicators import Communicator, Communicators, group_in, is_handle
from vramfit.virtual.ranks.peer_values import PeerValues
from vramfit.virtual.ranks.routed_tokens import RoutedTokens
from vramfit.virtual.ranks.sent_numbers import SentNumbers
from vramfit.virtual.ranks.works import finished

Move = Callable[[PeerValues, Communicator, OpCall], None]
_FLOAT_BYTES = 4
_TELLING = (NcclCollective.ALL_REDUCE, NcclCollective.ALL_GATHER, NcclCollective.ALL_TO_ALL)
"""What lets a rank know numbers of the others."""
_ROOTED = {"gather_": "gather", "gather_into_tensor_": "gather", "scatter_": "scatter"}
"""To NCCL these are sends and receives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one collective is done.

    Attributes:
        move: what becomes of known values.
        outputs: position of the tensors that it writes.
        whole: position of the tensors that hold what all ranks hold together, or what one rank sends.
        flattened: position of the list that torch lays into one block; None without.
    """

    move: Move
    outputs: int = 0
    whole: int = 0
    flattened: int | None = None


def _reduce_all(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for tensor in tensors_in(call.args[0]):
        values.reduce(tensor, reduction_in(call.args), group.size)


def _reduce_to_root(values: PeerValues, group: Communicator, call: OpCall) -> None:
    if call.argument(3, "root_rank") == group.rank:
        _reduce_all(values, group, call)


def _nothing(values: PeerValues, group: Communicator, call: OpCall) -> None:
    pass


def _gather(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for outs, source in zip(call.args[0], call.args[1], strict=False):
        for out in outs:
            values.copy(out, source)


def _gather_each(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for outs in call.args[0]:
        for out, source in zip(outs, call.args[1], strict=False):
            values.copy(out, source)


def _gather_whole(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for out, source in zip(tensors_in(call.args[0]), tensors_in(call.args[1]), strict=True):
        values.copy(out, source)


def _gather_whole_to_root(values: PeerValues, group: Communicator, call: OpCall) -> None:
    if call.argument(3, "root_rank") == group.rank:
        _gather_whole(values, group, call)


def _reduce_scatter(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for out, sources in zip(call.args[0], call.args[1], strict=False):
        values.pick(out, sources, group.rank)
        values.reduce(out, reduction_in(call.args), group.size)


def _reduce_scatter_whole(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for out, source in zip(tensors_in(call.args[0]), tensors_in(call.args[1]), strict=True):
        values.part(out, source, group.rank, group.size)
        values.reduce(out, reduction_in(call.args), group.size)


def _all_to_all_lists(values: PeerValues, group: Communicator, call: OpCall) -> None:
    for out in call.args[0]:
        values.pick(out, call.args[1], group.rank)


def _all_to_all(values: PeerValues, group: Communicator, call: OpCall) -> None:
    out, source, splits = call.args[0], call.args[1], call.argument(4, "input_split_sizes", [])
    if not splits:
        values.part(out, source, group.rank, group.size)
    elif group.size == 1:
        values.copy(out, source)
    else:
        start = sum(splits[: group.rank])
        mine = torch.ops.aten.slice.Tensor(source, 0, start, start + splits[group.rank])
        values.copy(out, mine)


def _scatter(values: PeerValues, group: Communicator, call: OpCall) -> None:
    # Only the root has inputs: nothing is known of what the others receive.
    outs, sources = call.args[0], call.args[1] or [[]] * len(call.args[0])
    for out, parts in zip(outs, sources, strict=False):
        values.pick(out, parts, group.rank)


RULES: dict[str, Rule] = {
    "allreduce_": Rule(move=_reduce_all),
    "allreduce_coalesced_": Rule(move=_reduce_all),
    "broadcast_": Rule(move=_nothing),
    "reduce_": Rule(move=_reduce_to_root),
    "barrier": Rule(move=_nothing),
    "allgather_": Rule(move=_gather, flattened=0),
    "allgather_coalesced_": Rule(move=_gather_each),
    "_allgather_base_": Rule(move=_gather_whole),
    "allgather_into_tensor_coalesced_": Rule(move=_gather_whole),
    "reduce_scatter_": Rule(move=_reduce_scatter, whole=1, flattened=1),
    "_reduce_scatter_base_": Rule(move=_reduce_scatter_whole, whole=1),
    "reduce_scatter_tensor_coalesced_": Rule(move=_reduce_scatter_whole, whole=1),
    "alltoall_": Rule(move=_all_to_all_lists, whole=1),
    "alltoall_base_": Rule(move=_all_to_all, whole=1),
    "gather_": Rule(move=_gather),
    "gather_into_tensor_": Rule(move=_gather_whole_to_root),  # since 2.14
    "scatter_": Rule(move=_scatter, whole=1),
}
"""By the name of the op; `COLLECTIVE_OF_OP` has what NCCL is asked for."""


def reduction_in(args: tuple[Any, ...]) -> Any:
    """The reduction among the arguments of a ``c10d`` op."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ReduceOp" in str(value._type()):
            return ReduceOp.RedOpType(value.op())  # type: ignore[attr-defined]
    return ReduceOp.SUM


def handlers(
    communicators: Communicators,
    values: PeerValues,
    numbers: SentNumbers,
    sizes: AskedSizes,
    tokens: RoutedTokens,
) -> dict[Any, Handler]:
    """The handlers of all ops ``c10d::*`` by overload, as far as this torch has them."""
    made: dict[Any, Handler] = {}
    for name, rule in RULES.items():
        made[find_overload(f"c10d.{name}.default")] = _handler(
            name, rule, communicators, values, numbers, sizes, tokens
        )
    for name in ("send", "recv_", "recv_any_source_"):
        made[find_overload(f"c10d.{name}.default")] = _peer_handler(name, communicators, numbers)
    for name in ("check_for_nan", "monitored_barrier_"):
        made[find_overload(f"c10d.{name}.default")] = _silent
    made.pop(None, None)
    return made


def _silent(mode: OpRunner, call: OpCall) -> Any:
    """Nothing happens; gloo itself does what it is asked where it runs."""
    if call.info.name != "c10d.check_for_nan" and not is_handle(_backend(call, call.args[0])):
        return call.func(*call.args, **call.kwargs)
    return None


_silent.on_host = True  # type: ignore[attr-defined]


def _backend(call: OpCall, tensor: torch.Tensor) -> Any:
    """The backend that does a group's collectives of tensors on a device.

    Raises:
        RuntimeError: torch's own; the group has no such backend (a group of NCCL alone and CPU tensors).
    """
    return backend_of(group_in(call.args), torch.device(tensor.device.type))


def _handler(
    name: str,
    rule: Rule,
    communicators: Communicators,
    values: PeerValues,
    numbers: SentNumbers,
    sizes: AskedSizes,
    tokens: RoutedTokens,
) -> Handler:
    def handle(mode: OpRunner, call: OpCall) -> Any:
        tensors = tensors_in(call.args)
        backend = _backend(call, tensors[0])
        handle_of_ours = is_handle(backend)
        if not handle_of_ours and not any(type(tensor) is FakeTensor for tensor in tensors):
            return call.func(*call.args, **call.kwargs)  # gloo itself, on tensors of the host
        group = communicators.of(group_in(call.args))
        if group.size > 1:
            _tell_sizes(sizes, name, rule, call)
        if name == "broadcast_" and group.size > 1:
            root = group.ranks[call.argument(2, "root_rank")]
            if not numbers.broadcast(group, root, tensors):
                sizes.counts("broadcast", tensors)
        rule.move(values, group, call)
        if COLLECTIVE_OF_OP[name] is NcclCollective.ALL_TO_ALL and len(set(_parts(name, call))) <= 1:
            tokens.exchanged(tensors_in(call.args[0]), tensors_in(call.args[1]), group)
        mode.meter.ops += 1
        work = _on_card(mode, name, rule, communicators, group, call) if handle_of_ours else None
        if work is None:
            work = finished(tensors_in(call.args[rule.outputs]))
        return work if len(call.func._schema.returns) == 1 else (call.args[rule.outputs], work)

    handle.on_host = True  # type: ignore[attr-defined]
    return handle


def _parts(name: str, call: OpCall) -> list[int]:
    """The sizes of the parts that an all-to-all sends, if it names them."""
    parts: list[int] = call.argument(4, "input_split_sizes", []) if name == "alltoall_base_" else []
    return parts


def _tell_sizes(sizes: AskedSizes, name: str, rule: Rule, call: OpCall) -> None:
    if name == "alltoall_base_":
        sizes.uneven(_parts(name, call))
    elif COLLECTIVE_OF_OP[name] in _TELLING and name != "barrier":
        sizes.counts(_ROOTED.get(name, COLLECTIVE_OF_OP[name].value), tensors_in(call.args[rule.outputs]))


def _on_card(
    mode: OpRunner, name: str, rule: Rule, communicators: Communicators, group: Communicator, call: OpCall
) -> Any:
    """Take blocks and time on the card; the work of an asynchronous collective, None for others."""
    whole = tensors_in(call.args[rule.whole])
    tensors = tensors_in(call.args)
    card = next((t for t in tensors if type(t) is FakeTensor and t.device.type == "cuda"), None)
    if card is None:
        return None
    if mode.machine.init_pid is None:
        initialize()
    device = card.device.index or 0
    held = mode.meter.temporary(
        _blocks(name, rule, call), device, f"c10d.{name}", category=Category.COMMUNICATION_BUFFERS
    )
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in whole)
    own = bool(call.by_name().get("async_op", True))
    until, _ = communicators.run(group, COLLECTIVE_OF_OP[name], nbytes, device, own_stream=own)

    def let_go() -> None:
        mode.meter.give_back(held, device)

    if not own:
        let_go()
        return None
    results = tensors_in(call.args[rule.outputs])
    return communicators.work(group, device, until, results=results, tensors=tensors, let_go=let_go)


def _blocks(name: str, rule: Rule, call: OpCall) -> list[int]:
    """Bytes that torch takes for a collective. See NOTE [What a collective allocates]."""
    if name == "barrier":
        return [_FLOAT_BYTES]
    if rule.flattened is None:
        return []
    tensors = [tensor for tensor in tensors_in(call.args[rule.flattened]) if type(tensor) is FakeTensor]
    if not tensors or len({tensor.shape for tensor in tensors}) > 1:
        return []
    return [sum(tensor.numel() * tensor.element_size() for tensor in tensors)]


def _peer_handler(name: str, communicators: Communicators, numbers: SentNumbers) -> Handler:
    """What is sent from one rank to another, always on a stream of its own; a receiver waits when the program does."""

    def handle(mode: OpRunner, call: OpCall) -> Any:
        tensors = tensors_in(call.args[0])
        if not is_handle(_backend(call, tensors[0])) and type(tensors[0]) is not FakeTensor:
            return call.func(*call.args, **call.kwargs)
        process_group = group_in(call.args)
        group = communicators.of(process_group)
        if group.size == 1:
            raise ValueError(f"vramfit: {call.func} wants another rank, and this group has one")
        mode.meter.ops += 1
        let_go: Callable[[], object] = _held_nothing
        peer = None if name == "recv_any_source_" else group.ranks[call.args[2]]
        if name == "send":
            numbers.send(group.name, group.ranks[call.args[2]], tensors)
        elif name == "recv_":
            let_go = numbers.receive(group.name, group.ranks[call.args[2]], tensors)
        else:
            numbers.forget(tensors)
        card = tensors[0].device if tensors[0].device.type == "cuda" else None
        if card is None:
            return communicators.work(group, None, 0.0, results=tensors, tensors=tensors, let_go=let_go)
        nbytes, device = sum(t.numel() * t.element_size() for t in tensors), card.index or 0
        if peer is not None:
            group = communicators.towards(process_group, peer)
            communicators.note_peer(group, peer, nbytes, device, sends=name == "send")
        until, _ = communicators.run(group, NcclCollective.SEND_RECEIVE, nbytes, device, own_stream=True)
        return communicators.work(group, device, until, results=tensors, tensors=tensors, let_go=let_go)

    handle.on_host = True  # type: ignore[attr-defined]
    return handle


def _held_nothing() -> None:
    pass
