"""Measures cases on the card of this process, which may be the virtual GPU: the code is the same.

What an op takes comes from torch's own memory history. Two marks on a stream of their own, one when an op begins and
one when it ends, cut the history into the parts of single ops.

The same dispatch mode watches a real card and the virtual GPU: it stands above the kernels (or above the virtual
GPU's own mode) and below autograd and autocast, so both show the same ops.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from vramfit.calibrate.cases import Case, Flag
from vramfit.calibrate.records import BlockKind, CaseRecord, Give, OpRecord, Step, Take, canonical
from vramfit.capture.ops import OpInfo, strided_parts, tensors_in
from vramfit.torch_internals import cuda_memory
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.torch_internals.dispatch import OpOverload, TorchDispatchMode
from vramfit.virtual.kernels.measured import Switches, signature

# -- watching ops: when each begins and ends, and which blocks belong to it ----------------------------------


_PRIM_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor


@dataclass(frozen=True, slots=True)
class Taken:
    """A block was taken at an address."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Given:
    """The block at an address was given back."""

    address: int


Event = Taken | Given


@dataclass(slots=True)
class WatchedCall:
    """One call of an op, and where its results lie.

    Attributes:
        op: full name.
        signature: what decides its temporaries.
        places: address and position of each result on the card.
        results: how many results.
        reserve_at: position of a result of raw bytes that cuDNN keeps, None without one.
    """

    op: str
    signature: str
    places: list[tuple[int, int]] = field(default_factory=list)
    results: int = 1
    reserve_at: int | None = None


class Listener(Protocol):
    """Is called before and after each op; ops do not overlap."""

    def begin(self) -> None:
        """An op is about to run."""

    def end(self, call: WatchedCall) -> None:
        """The op has run."""


class OpWatch(TorchDispatchMode):
    """Calls a listener around every op but views and sums of gradients, in whichever thread it runs."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._views: dict[Any, bool] = {}
        self._switches = Switches.now()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op between the two calls of the listener."""
        del types
        kwargs = kwargs or {}
        if self._is_view(func) or _sums_gradients(func):
            return func(*args, **kwargs)
        call = WatchedCall(str(func), signature(func, args, kwargs, self._switches))
        self._listener.begin()
        out = func(*args, **kwargs)
        _place(call, out)
        self._listener.end(call)
        return out

    def _is_view(self, func: Any) -> bool:
        """Whether a call only looks at memory that is there."""
        found = self._views.get(func)
        if found is None:
            is_op = isinstance(func, OpOverload) and func is not _PRIM_DEVICE
            found = self._views[func] = not is_op or OpInfo(func, None).view
        return found


def _sums_gradients(func: Any) -> bool:
    """Whether the engine may be summing two gradients, which it does in place only where no mode is active."""
    return func is _ADD and current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _place(call: WatchedCall, out: Any) -> None:
    """Note where the results of a call lie."""
    results = list(out) if isinstance(out, (list, tuple)) else [out]
    call.results = len(results)
    for position, result in enumerate(results):
        for tensor in tensors_in(result):
            if tensor.device.type != "cuda":
                continue
            call.places += [(part.untyped_storage().data_ptr(), position) for part in strided_parts(tensor)]
            if "cudnn" in call.op and tensor.dtype is torch.uint8 and tensor.dim() == 1:
                call.reserve_at = position


def op_record(call: WatchedCall, events: Iterable[Event], *, below: int = 0, above: int = 0) -> OpRecord:
    """What an op did with memory, from the events between its begin and its end.

    Blocks that were there before and are given back meanwhile are not the op's.
    """
    return OpRecord(
        op=call.op,
        signature=call.signature,
        steps=canonical(_steps(list(events), dict(call.places))),
        results=call.results,
        reserve_at=call.reserve_at,
        below=below,
        above=above,
    )


def _steps(events: Sequence[Event], places: dict[int, int]) -> list[Step]:
    given_at: dict[int, int] = {}  # index of a block's taking to that of its giving back
    live: dict[int, int] = {}
    for index, event in enumerate(events):
        if isinstance(event, Taken):
            live[event.address] = index
        elif event.address in live:
            given_at[live.pop(event.address)] = index
    steps: list[Step] = []
    numbers: dict[int, int] = {}
    giving = {given: taken for taken, given in given_at.items()}
    for index, event in enumerate(events):
        if isinstance(event, Taken):
            numbers[index] = len(numbers) + 1
            if index in given_at:
                steps.append(Take(BlockKind.TEMPORARY, event.nbytes))
            elif event.address in places:
                steps.append(Take(BlockKind.RESULT, event.nbytes, places[event.address]))
            else:
                steps.append(Take(BlockKind.KEPT, event.nbytes))
        elif index in giving:
            steps.append(Give(numbers[giving[index]]))
    return steps


_HISTORY = 1_000_000  # events that torch keeps of one case
_GIVEN = frozenset({"free_requested", "free"})
_TIMING_SECONDS = 0.03
_FEWEST_RUNS, _MOST_RUNS = 3, 20


class _Marks:
    """Marks the history: blocks of one byte on a stream that nothing else uses."""

    def __init__(self, device: int) -> None:
        self.stream: int = torch.cuda.Stream(device).cuda_stream
        self._device = device

    def set(self) -> None:
        """Leave a mark."""
        address = torch.cuda.caching_allocator_alloc(1, self._device, self.stream)
        torch.cuda.caching_allocator_delete(address)


class _History:
    """A listener that marks the history around each op."""

    def __init__(self, marks: _Marks) -> None:
        self.calls: list[WatchedCall] = []
        self._marks = marks

    def begin(self) -> None:
        """Mark the begin of an op."""
        self._marks.set()

    def end(self, call: WatchedCall) -> None:
        """Mark its end."""
        self._marks.set()
        self.calls.append(call)


class CaseMeter:
    """Measures one case after the other on a device of this process."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._marks = _Marks(device)

    def measure(self, case: Case, *, timed: bool = True) -> CaseRecord:
        """What a case does with memory once it is warm, and how long it takes.

        Args:
            timed: whether its time is measured as well.

        Raises:
            Exception: whatever the case raises, out of memory for one.
        """
        torch.cuda.reset_peak_memory_stats(self._device)
        with case.switched():
            run = case.build()
            first = self.watch(run) if Flag.SEARCHES in case.flags else None
            if first is None:
                run()
            torch.cuda.synchronize(self._device)
            ops = self.watch(run)
            if first is not None:
                ops = with_first(ops, first)
            peak = torch.cuda.max_memory_allocated(self._device)
            seconds = self.time(run) if timed and Flag.UNTIMED not in case.flags else None
        return CaseRecord(case=case.name, ops=tuple(ops), seconds=seconds, peak_bytes=peak)

    def watch(self, run: Callable[[], object]) -> list[OpRecord]:
        """Run something once; returns what each of its ops did with memory."""
        listener = _History(self._marks)
        cuda_memory.record_history(
            "all", context=None, stacks="python", max_entries=_HISTORY, clear_history=True
        )
        try:
            self._marks.set()
            with OpWatch(listener):
                run()
            torch.cuda.synchronize(self._device)
            events = cuda_memory.snapshot()["device_traces"][self._device]
        finally:
            cuda_memory.record_history(None)
        parts = list(_parts(events))
        if len(parts) != len(listener.calls):
            raise RuntimeError(f"{len(listener.calls)} ops ran, but the history shows {len(parts)}")
        return [op_record(call, part) for call, part in zip(listener.calls, parts, strict=True)]

    def time(self, run: Callable[[], object]) -> float:
        """Median seconds of a run that is warm, between two events of the card."""
        began = time.perf_counter()
        run()
        torch.cuda.synchronize(self._device)
        once = time.perf_counter() - began
        count = int(max(_FEWEST_RUNS, min(_MOST_RUNS, _TIMING_SECONDS / max(once, 1e-6))))
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self._device)
        return float(statistics.median(begin.elapsed_time(end) for begin, end in events)) / 1e3


def with_first(ops: Sequence[OpRecord], first: Sequence[OpRecord]) -> list[OpRecord]:
    """Records of warm ops, with what the first call of each did where that differs."""
    if [(op.op, op.signature) for op in ops] != [(op.op, op.signature) for op in first]:
        return list(ops)
    return [
        warm if warm.steps == cold.steps else replace(warm, first=cold.steps)
        for warm, cold in zip(ops, first, strict=True)
    ]


def _parts(events: Sequence[dict[str, Any]]) -> Iterator[list[Event]]:
    """Events between each mark that begins an op and the one that ends it; the first mark names the stream."""
    marked = next(event["stream"] for event in events if event["action"] == "alloc")
    part: list[Event] | None = None
    skipped_first = False
    for event in events:
        action = event["action"]
        if event["stream"] == marked:
            if action != "alloc":
                continue
            if not skipped_first:
                skipped_first = True
            elif part is None:
                part = []
            else:
                yield part
                part = None
        elif part is not None:
            if action == "alloc":
                part.append(Taken(event["addr"], event["size"]))
            elif action in _GIVEN:
                part.append(Given(event["addr"]))
