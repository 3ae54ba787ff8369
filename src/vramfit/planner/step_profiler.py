"""Watches one step of a workload: what each block computes, keeps for its backward pass, and when.

NOTE [Intervals]: a step is cut into intervals where another part of the model begins to work: the forward pass of block
3, what lies between blocks, the backward pass of block 3. Hooks mark forward passes; backward passes are known by the
sequence numbers that autograd gives its nodes: those made during the forward pass of a block are the block's. The bytes
at the peak of each interval are what the planner starts from: whatever a block no longer keeps is missing in all
intervals between its forward and its backward pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from vramfit.capture.gradient_sums import summed
from vramfit.techniques import BlockOp, ModelBlock
from vramfit.techniques.activation_checkpointing.op_facts import repeats
from vramfit.techniques.core.model_profile import ALWAYS, Saved
from vramfit.techniques.support.blocks import find_blocks
from vramfit.torch_internals.autograd_engine import (
    current_autograd_node,
    leave_checkpoints_alone,
    sequence_number,
)
from vramfit.torch_internals.dispatch import TorchDispatchMode

BETWEEN = -1
"""Index of the intervals that belong to no block."""


Estimate: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, int], float]
"""The seconds of an operation, from itself, its arguments, its results and its FLOPs."""


class StepMeter(Protocol):
    """What knows time and memory on the device where the step runs.

    Attributes:
        device_type: of the tensors that count.
        boundaries: how many there were so far.
    """

    device_type: str
    boundaries: int

    def seconds(self) -> float:
        """The device's time so far."""
        ...

    def boundary(self) -> None:
        """An interval ends here; the bytes at its peak are asked for later."""
        ...

    def peaks(self) -> Sequence[int]:
        """The bytes at the peak of each interval that a boundary ended, in order."""
        ...


@dataclass(frozen=True, slots=True)
class StepInterval:
    """A part of a step in which one block works, or none.

    Attributes:
        block: index of the block, `BETWEEN` for none.
        backward: whether it is part of the backward pass.
        peak_bytes: allocated on the device at its highest.
        call: a number of the block's call that it belongs to; each has another. -1 where that is not known, and between
            blocks.
        position: how far the block's pass was: in the forward pass the number of the operation, in the backward pass
            the position of the node, as `BlockOp` counts them. Of a block's intervals those are left out in which no
            decisions could make a difference.
    """

    block: int
    backward: bool
    peak_bytes: int
    call: int = -1
    position: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One step of a workload.

    Attributes:
        blocks: the blocks that ran, in the order in which they first did.
        tail_seconds: of what follows the last backward pass: the optimizer.
        logits_bytes: the largest input of a softmax whose classes a cross-entropy picks, 0 without one.
        weight_bytes: the model's parameters and buffers on the device.
        gradient_bytes: that the parameters hold on the device when the optimizer's work begins, and did not hold before
            the step.
    """

    blocks: tuple[ModelBlock, ...]
    intervals: tuple[StepInterval, ...]
    seconds: float
    flops: int
    logits_bytes: int
    tail_seconds: float = 0.0
    weight_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(kw_only=True, slots=True)
class _Op:
    """What is known of an operation so far: `made` without what follows it, and the fields that change."""

    made: BlockOp
    shape: tuple[int, ...]
    storages: set[StorageWeakRef]
    reads: set[int]
    last_read: int
    last_saved: int = -1
    kept: bool = False
    mutated: bool = False


@dataclass(slots=True)
class _Seen:
    """What is known of a block so far."""

    path: str
    module: nn.Module
    ops: list[_Op] = field(default_factory=list)
    kept: dict[StorageWeakRef, int] = field(default_factory=dict)
    inputs: dict[StorageWeakRef, int] = field(default_factory=dict)
    computed: set[StorageWeakRef] = field(default_factory=set)
    saves: dict[StorageWeakRef, Saved] = field(default_factory=dict)
    made: dict[StorageWeakRef, int] = field(default_factory=dict)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    calls: int = 0
    running: int = 0
    """Operations of the call that runs."""


class StepProfiler(TorchDispatchMode):
    """Watches one step. Enter it, run the step, leave it, and ask for the `step profile`.

    Args:
        places: the paths of its blocks; none may lie inside another.
        estimate: the seconds of an operation, from itself, its arguments, its results and its FLOPs; None takes the
            meter's.
    """

    def __init__(
        self, model: nn.Module, places: Sequence[str], meter: StepMeter, *, estimate: Estimate | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._estimate = estimate
        self._meter = meter
        self._blocks = {path: _Seen(path, model.get_submodule(path)) for path in places}
        # Where the model as a whole is the block, its parts are what is found again when other things change.
        self._counted_apart = [place.path for place in find_blocks(model)] if "" in self._blocks else []
        self._part_of: dict[str, str] = {}
        self._order: list[_Seen] = []
        self._model = model
        self._running: list[_Seen] = []
        self._parents: list[str] = []
        self._starts: list[int] = []  # sequence numbers from which on autograd's nodes are another part's
        self._parts: list[int] = []
        self._intervals: list[tuple[int, bool, int, int]] = [(BETWEEN, False, -1, -1)]
        self._backward = False
        self._flops = 0
        self._estimated = 0.0
        self._logits = 0
        self._packers: dict[StorageWeakRef, set[int]] = {}  # the parts of the model that keep a storage
        self._savers: dict[StorageWeakRef, _Seen] = {}  # the block that saved it first, until it is needed
        self._began = self._ended = self._backward_ended = 0.0
        self._first = 0
        self._parameters: set[StorageWeakRef] = set()
        self._weight_bytes = self._first_gradients = self._gradients = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    # -- the step ------------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside."""
        self._parameters = {StorageWeakRef(t.untyped_storage()) for t in self._tensors()}
        self._weight_bytes = self._on_device(self._tensors())
        self._first_gradients = self._gradient_bytes()
        with ExitStack() as stack:
            for seen in self._blocks.values():
                for handle in self._hook(seen):
                    stack.callback(handle.remove)
            pack = partial(self._pack)
            leave_checkpoints_alone(pack)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, self._unpack))
            self._first = self._meter.boundaries
            self._began = self._now()
            self._meter.boundary()
            self._starts.append(sequence_number())
            self._parts.append(BETWEEN)
            stack.enter_context(self)
            yield
            self._ended = self._now()
            self._meter.boundary()

    def _tensors(self) -> Iterator[torch.Tensor]:
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if tensor.layout is torch.strided:
                yield tensor

    def _on_device(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of tensors on the device, each storage once."""
        storages = {}
        for tensor in tensors:
            if tensor.device.type == self._meter.device_type and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                storages[StorageWeakRef(storage)] = storage.nbytes()
        return sum(storages.values())

    def _gradient_bytes(self) -> int:
        return self._on_device(p.grad for p in self._model.parameters() if p.grad is not None)

    def _hook(self, seen: _Seen) -> Iterator[Any]:
        yield seen.module.register_forward_pre_hook(lambda *given: self._enter(seen, given), with_kwargs=True)
        yield seen.module.register_forward_hook(lambda *given: self._leave(seen, given[2]), always_call=True)
        for name, module in seen.module.named_modules():
            if name:
                yield module.register_forward_pre_hook(lambda *_, name=name: self._parents.append(name))
                yield module.register_forward_hook(lambda *_: self._parents.pop() and None, always_call=True)

    def _enter(self, seen: _Seen, given: tuple[Any, ...]) -> None:
        if not seen.calls:
            self._order.append(seen)
        seen.calls += 1
        seen.running = 0
        for tensor in _strided(given[1:]) if seen.calls == 1 else ():
            storage = tensor.untyped_storage()
            seen.inputs.setdefault(StorageWeakRef(storage), storage.nbytes())
            if tensor.grad_fn is not None:
                seen.computed.add(StorageWeakRef(storage))
        self._running.append(seen)
        self._part(self._order.index(seen))
        seen.forward_seconds -= self._now()

    def _leave(self, seen: _Seen, returned: Any) -> None:
        seen.forward_seconds += self._now()
        for tensor in _strided(returned) if seen.calls == 1 else ():
            made = seen.made.get(StorageWeakRef(tensor.untyped_storage()))
            if made is not None:
                seen.ops[made].last_read = ALWAYS
        self._running.pop()
        self._part(BETWEEN)

    def _now(self) -> float:
        return self._meter.seconds() if self._estimate is None else self._estimated

    def _part(self, index: int) -> None:
        """What follows in the forward pass belongs to another part of the model."""
        self._starts.append(sequence_number())
        self._parts.append(index)
        self._begin_interval(index, backward=False)

    def _begin_interval(self, index: int, *, backward: bool, call: int = -1, position: int = -1) -> None:
        if index != BETWEEN and not backward:
            call = len(self._starts) - 1
        if self._intervals[-1] != (index, backward, call, position):
            self._meter.boundary()
            self._intervals.append((index, backward, call, position))

    # -- operations ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and note what it cost."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question for the device of a fake tensor
        node: Any = current_autograd_node()
        owner = self._owner(node)
        if node is None and self._running:
            running = self._running[-1]
            self._begin_interval(self._order.index(running), backward=False, position=running.running)
            running.running += 1
        before = self._meter.seconds()
        out = called(func, args, kwargs)
        seconds = self._meter.seconds() - before
        flops = flops_of(func, args, kwargs, out)
        self._flops += flops
        if self._estimate is not None:
            seconds = self._estimate(func, args, kwargs, out, flops)
            self._estimated += seconds
        if node is not None:
            self._backward_ended = self._now()
            if owner is not None:
                owner.backward_seconds += seconds
        else:
            self._note(func, args, kwargs, out, seconds, flops)
        return out

    def _owner(self, node: Any) -> _Seen | None:
        """The block whose backward pass runs, if any; an interval begins when it is another than before."""
        if node is None:
            return None
        number = node._sequence_nr()
        at = bisect_right(self._starts, number) - 1
        # Nodes that accumulate gradients have the highest number: they go with whatever runs.
        if number >= (1 << 63) - 1:
            index, backward, call, position = self._intervals[-1]
            index, call, position = (index, call, position) if backward else (BETWEEN, -1, -1)
        else:
            index = self._parts[at] if at >= 0 else BETWEEN
            call, position = (-1, -1) if index == BETWEEN else (at, number - self._starts[at])
        self._begin_interval(index, backward=True, call=call, position=position)
        return self._order[index] if index != BETWEEN else None

    def _part_at(self, parent: str) -> str:
        """The part of the model, counted apart, that a module is in."""
        if parent not in self._part_of:
            self._part_of[parent] = next(
                (path for path in self._counted_apart if parent == path or parent.startswith(f"{path}.")), ""
            )
        return self._part_of[parent]

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        seconds: float,
        flops: int,
    ) -> None:
        name = func._schema.name.partition("::")[2]
        if name in ("_log_softmax", "log_softmax") and isinstance(args[0], torch.Tensor):
            self._logits = max(self._logits, args[0].numel() * args[0].element_size())
        if not self._running:
            if self._intervals[-1][1]:
                self._gradients = self._gradient_bytes()
                self._begin_interval(BETWEEN, backward=False)
            return
        seen = self._running[-1]
        if seen.calls > 1:
            return
        given = {StorageWeakRef(t.untyped_storage()) for t in _strided((args, kwargs))}
        number = len(seen.ops)
        read = {seen.made[ref] for ref in given if ref in seen.made}
        for made in read:
            seen.ops[made].last_read = max(seen.ops[made].last_read, number)
        if func._schema.is_mutable:
            for ref in _mutated(func, args):
                if ref in seen.made:
                    changed = seen.ops[seen.made[ref]]
                    changed.mutated = True
                    changed.reads |= read - {seen.made[ref]} | {number}
                    read = set()
        fresh = {}
        for tensor in _strided(out):
            ref = StorageWeakRef(tensor.untyped_storage())
            if ref not in given and ref not in seen.made:
                fresh[ref] = tensor.untyped_storage().nbytes()
        for ref in fresh:
            seen.made[ref] = number
        shape = next((tuple(t.shape) for t in _strided(out)), ())
        parent = self._parents[-1] if self._parents else ""
        op = BlockOp(
            name=name,
            bytes=sum(fresh.values()),
            seconds=seconds,
            flops=flops,
            kept=False,
            random=torch.Tag.nondeterministic_seeded in func.tags,
            parent=parent,
            part=self._part_at(parent),
            fixed=not repeats(func, args, kwargs),
        )
        seen.ops.append(_Op(made=op, shape=shape, storages=set(fresh), reads=read, last_read=number))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        ref = StorageWeakRef(storage)
        running = self._order.index(self._running[-1]) if self._running else BETWEEN
        packers = self._packers.setdefault(ref, set())
        first = not packers
        packers.add(running)
        if self._running and self._running[-1].calls == 1:
            seen = self._running[-1]
            if first and ref not in self._parameters and (ref not in seen.inputs or ref in seen.computed):
                seen.saves[ref] = Saved(storage.nbytes(), seen.forward_seconds + self._now(), -1.0)
                self._savers[ref] = seen
            if ref not in self._parameters and ref not in seen.inputs:
                seen.kept.setdefault(ref, storage.nbytes())
                made = seen.made.get(ref)
                if made is not None:
                    op = seen.ops[made]
                    op.kept = True
                    # The node that saves it was made last.
                    node = sequence_number() - 1
                    op.last_saved = max(op.last_saved, node - self._starts[-1])
        return tensor

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            return tensor
        ref = StorageWeakRef(tensor.untyped_storage())
        if (seen := self._savers.pop(ref, None)) is not None:
            seen.saves[ref] = seen.saves[ref]._replace(needed_at=seen.backward_seconds)
        return tensor

    # -- the result ----------------------------------------------------------------------------------------------

    def profile(self) -> StepProfile:
        """What was seen, once the step is over."""
        # Boundaries end intervals: the first of ours ends what came before the step.
        peaks = self._meter.peaks()[self._first + 1 :]
        blocks = self._found()
        intervals = (
            StepInterval(block, backward, peak, call, position)
            for (block, backward, call, position), peak in zip(self._intervals, peaks, strict=True)
        )
        return StepProfile(
            blocks=blocks,
            intervals=tuple(worth_looking_at(intervals, blocks)),
            seconds=self._ended - self._began,
            tail_seconds=self._ended - max(self._backward_ended, self._began),
            flops=self._flops,
            logits_bytes=self._logits,
            weight_bytes=self._weight_bytes,
            gradient_bytes=max(0, self._gradients - self._first_gradients),
        )

    def _found(self) -> tuple[ModelBlock, ...]:
        alike: dict[Any, int] = {}
        given = {ref for seen in self._order for ref in seen.inputs}
        blocks = []
        for index, seen in enumerate(self._order):
            kept = sum(seen.kept.values())
            shared = {ref for ref in seen.kept if ref in given or self._packers.get(ref, set()) - {index}}
            inputs = {ref: size for ref, size in seen.inputs.items() if ref not in self._parameters}
            likeness = (
                type(seen.module).__name__,
                tuple((op.made.name, op.made.bytes, op.shape, op.kept) for op in seen.ops),
                kept,
                tuple(bool(op.storages & shared) for op in seen.ops),
            )
            blocks.append(
                ModelBlock(
                    path=seen.path,
                    kind=type(seen.module).__name__,
                    index=index,
                    like=alike.setdefault(likeness, index),
                    ops=_block_ops(seen, shared),
                    input_bytes=sum(inputs.values()),
                    new_input_bytes=sum(size for ref, size in inputs.items() if ref not in self._packers),
                    saves=tuple(seen.saves.values()),
                    kept_bytes=kept,
                    shared_bytes=sum(seen.kept[ref] for ref in shared),
                    forward_seconds=seen.forward_seconds / seen.calls,
                    backward_seconds=seen.backward_seconds / seen.calls,
                    calls=seen.calls,
                )
            )
        return tuple(blocks)


def _block_ops(seen: _Seen, shared: set[StorageWeakRef]) -> tuple[BlockOp, ...]:
    """The operations of a block, as the planner knows them."""
    return tuple(
        replace(
            op.made,
            kept=op.kept,
            mutated=op.mutated,
            own_bytes=sum(size for ref, size in seen.kept.items() if ref in op.storages - shared),
            shared=bool(op.storages & shared),
            reads=tuple(sorted(op.reads)),
            last_read=op.last_read,
            last_saved=op.last_saved,
        )
        for op in seen.ops
    )


def worth_looking_at(
    intervals: Iterable[StepInterval], blocks: Sequence[ModelBlock]
) -> Iterator[StepInterval]:
    """The intervals that can be the peak for some decisions.

    During one pass of a block more and more of what it keeps could be gone (forward), or less and less (backward). A
    interval in which more can be gone than in another that is as high is never the peak.
    """
    for (index, backward, _), group in groupby(intervals, lambda one: (one.block, one.backward, one.call)):
        ordered = list(group)
        if index == BETWEEN:
            yield from ordered
            continue
        kept: list[StepInterval] = []
        for one in reversed(ordered) if backward else ordered:
            if not kept or one.peak_bytes > kept[-1].peak_bytes:
                if kept and _absent(blocks[index], one) == _absent(blocks[index], kept[-1]):
                    kept.pop()
                kept.append(one)
        yield from reversed(kept) if backward else kept


def _absent(block: ModelBlock, interval: StepInterval) -> int:
    """How many of a block's results could be gone in an interval of its own."""
    return sum(
        bool(op.own_bytes) and op.absent(interval.position, backward=interval.backward) for op in block.ops
    )


def _strided(tree: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_of(tree):
        if tensor.layout is torch.strided:
            yield tensor


def _mutated(func: Any, args: tuple[Any, ...]) -> Iterator[StorageWeakRef]:
    for declared, value in zip(func._schema.arguments, args, strict=False):
        if declared.alias_info is not None and declared.alias_info.is_write:
            for tensor in _strided(value):
                yield StorageWeakRef(tensor.untyped_storage())


# -- one operation ---------------------------------------------------------------------------------------------------


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation; of a sum of gradients, in place where it would be without a mode."""
    total = summed(func, args, kwargs)
    return func(*args, **kwargs) if total is None else total


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Multiplications and additions as torch's own counter counts them, of in-place and ``out=`` forms too."""
    packet = func._overloadpacket
    if packet.__name__.endswith("_") and func.namespace == "aten":
        packet = getattr(torch.ops.aten, packet.__name__[:-1], packet)
    count: Callable[..., int] | None = flop_registry.get(packet)
    if count is None:
        return 0
    given = {name: value for name, value in kwargs.items() if name != "out"}
    try:
        return int(count(*args, **given, out_val=out))
    except (TypeError, AssertionError, ValueError, IndexError):
        return 0  # a form of the operation that the counter does not know


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation, or of a module: in lists, tuples and dicts.

    It is asked several times for every operation, which `torch.utils._pytree` with its registry is slow at.
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_of(item)
