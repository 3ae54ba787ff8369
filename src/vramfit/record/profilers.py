"""torch.profiler's memory events joined to a trace: each allocation with its category, module, phase and line.

NOTE [How the two are joined]
torch.profiler hears of each block from the allocator itself; a `MemoryTrace` that was recorded at the same time knows
what the block is for. On a card both tell the address, so a block is found by address, size and time. A trace of
metered CPU has the addresses of its own allocator: there a block is found by size, operator and time. The clocks
differ by a constant that is not known: of all pairs of like blocks the difference that most of them share is taken.
An allocation that the trace does not know (a kernel's own scratch memory on the CPU, or what was made before the
trace began) keeps no category: it is counted as unmatched, never guessed. A release has the category of its allocation.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vramfit.errors import UsageError
from vramfit.torch_internals.autograd_engine import EventType
from vramfit.trace import Category, EventKind, Frame, MemoryTrace
from vramfit.trace.frames import user_frame
from vramfit.writing import write_text

_BIN_US = 1_000.0
"""Width within which differences of the clocks count as the same."""
_EARLY_US = 2_000.0
"""How far the clocks' difference may be off."""
_LATE_US = 100_000.0
"""On a card, how long after the allocator's note of a block the profiler may note it."""
_LIFT = "aten::lift_fresh"
_VOTERS = 20_000
_COMMON = 64
"""Sizes that occur more often than this say little about the clocks."""
_COUNTERS = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledEvent:
    """A block that was taken or given back while torch.profiler ran.

    Attributes:
        time_ns: on the profiler's clock.
        device: ``cpu`` or ``cuda:0``.
        address: of the block.
        nbytes: its size, negative where it is given back.
        ops: the operators that were running, the innermost first: ``aten::addmm``.
        category: what it is for; None where the trace does not know the block.
        module: dotted path of the module that made it.
        phase: as ``step 1/forward``, when it was made.
        line: the program's line that made it.
    """

    time_ns: int
    device: str
    address: int
    nbytes: int
    ops: tuple[str, ...] = ()
    category: Category | None = None
    module: str = ""
    phase: str = ""
    line: Frame | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledMemory:
    """The memory events of a profile, with what a trace knows about them.

    Attributes:
        offset_us: the trace's clock less the profiler's, None where nothing matched.
    """

    events: tuple[ProfiledEvent, ...]
    offset_us: float | None

    @property
    def allocated_bytes(self) -> int:
        """Bytes that were allocated over the profile, those given back since included."""
        return sum(event.nbytes for event in self.events if event.nbytes > 0)

    @property
    def matched_bytes(self) -> int:
        """Bytes of `allocated_bytes` that have a category."""
        return sum(e.nbytes for e in self.events if e.nbytes > 0 and e.category is not None)

    def peak(self, device: str = "cpu") -> Mapping[Category | None, int]:
        """Bytes by category at the moment when most of what the profile saw allocated was alive on a device."""
        held: dict[Category | None, int] = defaultdict(int)
        best: dict[Category | None, int] = {}
        now = most = 0
        for event in self.events:
            if event.device == device:
                held[event.category] += event.nbytes
                now += event.nbytes
                if now > most:
                    most, best = now, dict(held)
        return {category: nbytes for category, nbytes in best.items() if nbytes}

    def modules(self) -> Mapping[str, int]:
        """Bytes allocated by each module over the profile, the largest first, without those outside modules."""
        found: dict[str, int] = defaultdict(int)
        for event in self.events:
            if event.nbytes > 0 and event.module:
                found[event.module] += event.nbytes
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def write_chrome_trace(self, source: Any, path: str | Path) -> None:
        """Write torch.profiler's own Chrome trace with our counters and with categories on its memory events.

        Args:
            source: the profiler of these events, or the file that it exported: it can export only once.
            path: the file to write, whole or not at all.

        Raises:
            UsageError: the profiler has exported already, or there is no such file.
            WriteError: it cannot be written.
        """
        write_text(Path(path), json.dumps(enriched(_chrome_trace(source), self)))


def join_profile(profile: Any, trace: MemoryTrace) -> ProfiledMemory:
    """Give the memory events of torch.profiler their categories, modules and lines.

    >>> model = torch.nn.Linear(1024, 1024)
    >>> with vramfit.track(model, device="cpu") as track, torch.profiler.profile(profile_memory=True) as profile:
    ...     model(torch.ones(256, 1024)).sum().backward()
    >>> joined = vramfit.join_profile(profile, track.trace)
    >>> joined.write_chrome_trace(profile, "step.json")

    Args:
        profile: a `torch.profiler.profile` that has stopped, with ``profile_memory=True``.
        trace: what was recorded at the same time, by `vramfit.track` or ``vramfit run``.

    Raises:
        UsageError: the profiler has not run, or did not profile memory.
    """
    events = profiled_events(profile)
    if not events:
        raise UsageError(
            "this profile holds no memory events",
            "Profile with torch.profiler.profile(profile_memory=True), and join after its block",
        )
    rows = np.flatnonzero(trace.kind == EventKind.ALLOC)
    exact = str(trace.meta.get("source", "")) != "cpu"
    offset, found = _match(events, trace, rows, exact=exact)
    return ProfiledMemory(events=tuple(_told(events, trace, found)), offset_us=offset)


def profiled_events(profile: Any) -> list[ProfiledEvent]:
    """The memory events of a profile, without categories."""
    results = getattr(getattr(profile, "profiler", None), "kineto_results", None)
    if results is None:
        raise UsageError("this is no profile that has run", "Give a torch.profiler.profile after its block")
    found: list[ProfiledEvent] = []
    pending: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in results.experimental_event_tree()]
    while pending:
        event, ops = pending.pop()
        if event.tag == EventType.Allocation:
            fields = event.extra_fields
            found.append(
                ProfiledEvent(
                    time_ns=event.start_time_ns,
                    device=str(fields.device),
                    address=fields.ptr,
                    nbytes=fields.alloc_size,
                    ops=ops,
                )
            )
        elif event.tag == EventType.TorchOp:
            ops = (event.name, *ops)
        pending.extend((child, ops) for child in event.children)
    found.sort(key=lambda event: event.time_ns)  # stable: blocks of one instant keep their order
    return found


# -- matching ------------------------------------------------------------------------------------------------


def _match(
    events: Sequence[ProfiledEvent], trace: MemoryTrace, rows: np.ndarray[Any, Any], *, exact: bool
) -> tuple[float | None, dict[int, int]]:
    """The difference of the clocks, and for each matched event its row of the trace, by position."""
    by_key: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for position, event in enumerate(events):
        if event.nbytes > 0:
            by_key[_event_key(event, exact)].append(position)
    keys = [_row_key(trace, int(row), exact) for row in rows]
    names = [_op_name(trace, int(row)) for row in rows]
    offset = _offset(events, trace, rows, keys, names, by_key)
    if offset is None:
        return None, {}
    expected = trace.time_us[rows].astype(float) - offset
    later = np.searchsorted(expected, expected, side="right")
    ends = np.append(expected, np.inf)[later]  # when the next operator began
    starts = np.append(-np.inf, expected)[
        np.searchsorted(expected, expected, side="left")
    ]  # and the one before
    found: dict[int, int] = {}
    for number, (key, name) in enumerate(zip(keys, names, strict=True)):
        like = [position for position in by_key.get(key, ()) if position not in found]
        if exact:
            first, last = expected[number] - _EARLY_US, expected[number] + _LATE_US
        elif name == _LIFT:  # torch.tensor: what it made before the operator that brings it in
            first, last = starts[number] - _EARLY_US, expected[number] + _EARLY_US
        else:
            first, last = expected[number] - _EARLY_US, ends[number] + _EARLY_US
        for position in like:
            event = events[position]
            if first <= event.time_ns / 1e3 <= last and (exact or _runs(event, name)):
                found[position] = int(rows[number])
                break
    return offset, found


def _offset(
    events: Sequence[ProfiledEvent],
    trace: MemoryTrace,
    rows: np.ndarray[Any, Any],
    keys: Sequence[tuple[Any, ...]],
    names: Sequence[str],
    by_key: Mapping[tuple[Any, ...], list[int]],
) -> float | None:
    """The trace's time minus the profiler's in microseconds, as most blocks of the same size have it."""
    differences: list[float] = []
    for row, key, name in zip(rows.tolist(), keys, names, strict=True):
        like = by_key.get(key, [])
        if len(like) <= _COMMON:
            differences += [
                float(trace.time_us[row]) - events[position].time_ns / 1e3
                for position in like
                if not name or _runs(events[position], name)
            ]
        if len(differences) > _VOTERS:
            break
    if not differences:
        return None
    ordered = np.sort(np.array(differences))
    ends = np.searchsorted(ordered, ordered + _BIN_US, side="right")
    best = int(np.argmax(ends - np.arange(len(ordered))))
    return float(np.median(ordered[best : ends[best]]))


def _event_key(event: ProfiledEvent, exact: bool) -> tuple[Any, ...]:
    return (event.device, event.address, event.nbytes) if exact else (event.nbytes,)


def _row_key(trace: MemoryTrace, row: int, exact: bool) -> tuple[Any, ...]:
    if not exact:
        return (int(trace.size[row]),)
    return (f"cuda:{int(trace.device[row])}", int(trace.address[row]), int(trace.block[row]))


def _op_name(trace: MemoryTrace, row: int) -> str:
    """``aten::addmm`` of ``aten.addmm.default``; empty where the trace has no operator."""
    op = int(trace.op[row])
    parts = trace.ops[op].split(".") if op >= 0 else []
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else ""


def _runs(event: ProfiledEvent, name: str) -> bool:
    """Whether an allocation was made by an operator, or as ``torch.tensor`` makes its own."""
    return name in event.ops or (name == _LIFT and event.ops[:1] == ("aten::empty",))


def _told(
    events: Sequence[ProfiledEvent], trace: MemoryTrace, found: Mapping[int, int]
) -> Iterator[ProfiledEvent]:
    """The events with what the trace knows; a release gets the category of its allocation."""
    alive: dict[tuple[str, int], ProfiledEvent] = {}
    for position, event in enumerate(events):
        key = (event.device, event.address)
        if event.nbytes <= 0:
            born = alive.pop(key, None)
            if born is not None:
                event = replace(
                    event, category=born.category, module=born.module, phase=born.phase, line=born.line
                )
        else:
            if position in found:
                event = _described(event, trace, found[position])
            alive[key] = event
        yield event


def _described(event: ProfiledEvent, trace: MemoryTrace, row: int) -> ProfiledEvent:
    module, phase, stack = int(trace.module[row]), int(trace.phase[row]), int(trace.stack[row])
    frames = tuple(trace.frames[frame] for frame in trace.stacks[stack]) if stack >= 0 else ()
    return replace(
        event,
        category=Category(int(trace.category[row])),
        module=trace.modules[module] if module >= 0 else "",
        phase=trace.phases[phase] if phase >= 0 else "",
        line=user_frame(frames),
    )


# -- Chrome trace --------------------------------------------------------------------------------------------


def _chrome_trace(source: Any) -> dict[str, Any]:
    """The document that torch.profiler exports, or has exported into a file."""
    if isinstance(source, (str, os.PathLike)):
        try:
            document = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{source} cannot be read as a Chrome trace: {error}") from error
    else:
        with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
            plain = os.path.join(folder, "trace.json")
            try:
                source.export_chrome_trace(plain)
            except RuntimeError as error:
                raise UsageError(
                    f"torch.profiler does not export: {error}", "Give the file that it has exported instead"
                ) from error
            document = json.loads(Path(plain).read_text(encoding="utf-8"))
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise UsageError(
            "this is not a Chrome trace of torch.profiler", "Export one with export_chrome_trace"
        )
    return document


def enriched(document: dict[str, Any], memory: ProfiledMemory) -> dict[str, Any]:
    """A Chrome trace of torch.profiler with counters of bytes by category, and with categories on memory events."""
    base = int(document.get("baseTimeNanoseconds", 0))
    told = {(event.time_ns, event.address, event.nbytes): event for event in memory.events}
    for entry in document["traceEvents"]:
        if entry.get("name") == "[memory]":
            about = entry["args"]
            time = base + round(float(entry["ts"]) * 1e3)
            for near in (time, time - 1, time + 1):  # a double holds these times to about a nanosecond
                event = told.get((near, int(about["Addr"]), int(about["Bytes"])))
                if event is not None:
                    about |= _arguments(event)
                    break
    counters = list(_counters(memory, base))
    return {**document, "traceEvents": [*document["traceEvents"], *counters]}


def _arguments(event: ProfiledEvent) -> dict[str, str]:
    line = f"{event.line.filename}:{event.line.line}" if event.line else ""
    told = {"Category": _name(event.category), "Module": event.module, "Phase": event.phase, "Line": line}
    return {name: value for name, value in told.items() if value}


def _name(category: Category | None) -> str:
    return "unmatched" if category is None else category.name.lower().replace("_", " ")


def _counters(memory: ProfiledMemory, base: int) -> Iterator[dict[str, Any]]:
    """One counter for each device, with a series for each category; thinned out evenly where there are too many."""
    every = max(1, -(-len(memory.events) // _COUNTERS))
    held: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(map(_name, [*Category, None]), 0))
    for number, event in enumerate(memory.events):
        name = _name(event.category)
        held[event.device][name] += event.nbytes
        if number % every == 0 or number == len(memory.events) - 1:
            yield {
                "ph": "C",
                "name": f"vramfit: bytes by category ({event.device})",
                "pid": "vramfit",
                "ts": (event.time_ns - base) / 1e3,
                "args": dict(held[event.device]),
            }
