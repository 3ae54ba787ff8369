"""What a run held at its peak, in a form that two runs can be compared in: from a trace, or from a JSON report."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from vramfit.analysis._lifetimes import Ints, Lifetimes, Measure, born_column, trace_device
from vramfit.analysis._phases import phases, split_name
from vramfit.analysis.breakdown import last_oom_row, moment, peak_row
from vramfit.analysis.device_timeline import DeviceTimeline
from vramfit.analysis.groups import entry, fold_path, stack_frames
from vramfit.errors import TraceFormatError, UsageError
from vramfit.trace import Actual, Category, Frame, MemoryTrace, Source
from vramfit.trace.frame_categories import BY_FRAMES
from vramfit.trace.frames import Origin, innermost, origin, user_frame

_T = TypeVar("_T")
_OTHER_LAST = (*list(Category)[1:], Category.OTHER)
_KINDS: Mapping[str, Category] = {kind.name.lower(): kind for kind in Category}


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """Blocks that were alive at the peak and were asked for by the same stack for the same modules.

    Attributes:
        op: the operator that made them.
        module: dotted path with layer numbers replaced by ``*``.
        tensor: dtype and shape of the largest.
        line: the user's line.
        stack: the frames of the user and of libraries, innermost first; of a JSON report only those that it names.
        total_bytes: their bytes.
        block_bytes: bytes of each; 0 where they differ in size, or the source does not say.
    """

    category: Category
    op: str
    module: str
    tensor: str
    line: Frame | None
    stack: tuple[Frame, ...]
    count: int
    total_bytes: int
    block_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakState:
    """What one device of a run held at its peak. Bytes throughout; None where the source does not say.

    Attributes:
        name: name of the file or run.
        gpu: name of the card, empty if unknown.
        allocated, reserved: peaks of the run.
        outside: memory outside torch's allocator.
        ran_out: whether the run ended by running out of memory, so that it would have held more.
        phase: what the program was doing at the peak of allocated bytes, or when it ran out.
        categories: bytes by category at that moment; empty where the source holds figures alone.
        modules: bytes by folded module path at that moment, each without the modules below it.
        holdings: what was alive, largest first.
        omitted: bytes alive that ``holdings`` leaves out.
        phases: highest allocated bytes of each part of the iterations (``forward``, ``backward``, ``step``).
        deep: whether the stacks are whole.
        torch: its version, empty if unknown.
        is_state: the figures are those of the moment when a snapshot without history was dumped, and no peaks.
        by_frames: categories are those that stacks tell, so that many blocks have none.
    """

    name: str
    device: int
    gpu: str = ""
    allocated: int | None = None
    reserved: int | None = None
    outside: int | None = None
    ran_out: bool = False
    phase: str = ""
    categories: Mapping[Category, int] = field(default_factory=dict)
    modules: Mapping[str, int] = field(default_factory=dict)
    holdings: tuple[Holding, ...] = ()
    omitted: int = 0
    phases: Mapping[str, int] = field(default_factory=dict)
    deep: bool = False
    torch: str = ""
    is_state: bool = False
    by_frames: bool = False

    @property
    def used(self) -> int | None:
        """Bytes of the card taken at the peak: reserved, and what is known to lie outside torch."""
        return None if self.reserved is None else self.reserved + (self.outside or 0)

    @property
    def is_used(self) -> bool:
        """Whether the device held anything, or its source does not say."""
        return self.used is None or bool(self.used or self.allocated or self.ran_out)

    @property
    def detailed(self) -> bool:
        """Whether it is known what was alive."""
        return bool(self.holdings)


def states(actual: Actual) -> tuple[PeakState, ...]:
    """The devices of what `read_actual` read, by index; a recording is preferred to figures beside it.

    Raises:
        TraceFormatError: a JSON report is not as docs/json.md says.
        UsageError: there is nothing of any device in it.
    """
    if actual.report is not None and actual.trace is None:
        return states_from_report(actual.report, actual.name) or (no_card(actual.name),)
    if actual.trace is None:
        return tuple(
            PeakState(
                name=actual.name,
                device=known.device or 0,
                gpu=known.gpu,
                allocated=known.peak_allocated,
                reserved=known.peak_reserved,
                outside=known.outside,
                torch=known.torch,
            )
            for known in actual.figures
        )
    found = []
    for device in actual.devices:
        outside = actual.figures_of(device).outside
        found.append(state_from_trace(actual.trace, device, name=actual.name, outside=outside))
    if found:
        return tuple(found)
    if actual.trace.meta.get("source") != Source.VIRTUAL.value:
        raise UsageError(
            f"{actual.name} holds no memory of any device", "Record a program that uses the card"
        )
    return (no_card(actual.name),)


def no_card(name: str) -> PeakState:
    """The state of a program that saw no card because ``CUDA_VISIBLE_DEVICES`` hides them all: zero bytes."""
    return PeakState(name=name, device=0, allocated=0, reserved=0, outside=0)


def state_from_trace(
    trace: MemoryTrace, device: int = 0, *, name: str = "", outside: int | None = None
) -> PeakState:
    """What a device held at the peak of a trace, or when it last ran out of memory at the end of it.

    Args:
        name: name of the file or run.
        outside: memory outside torch's allocator; None takes the context that the trace names.
    """
    timeline = DeviceTimeline.of(trace, device)
    lives, bytes_over = timeline.lives, timeline.curves
    row = peak_row(bytes_over, Measure.ALLOCATED)
    failed = last_oom_row(trace, device)
    if failed is not None:
        row = failed
    alive = lives.alive(row)
    holdings = _holdings(trace, lives, alive)
    described = trace_device(trace, device)
    category = timeline.categories[alive]
    sums = np.bincount(category, weights=lives.block[alive], minlength=len(Category)).astype(np.int64)
    parts: dict[str, int] = {}
    for phase in phases(trace, device):
        parts[phase.part] = max(parts.get(phase.part, 0), phase.peak_allocated)
    return PeakState(
        name=name,
        device=device,
        gpu=described.name if described is not None else "",
        allocated=bytes_over.peak(Measure.ALLOCATED),
        reserved=bytes_over.peak(Measure.RESERVED),
        outside=trace.outside_bytes(device) if outside is None else outside,
        ran_out=failed is not None,
        phase=moment(trace, row).phase,
        categories={kind: int(sums[kind]) for kind in _OTHER_LAST},
        modules=_by_module(holdings),
        holdings=holdings,
        phases=parts,
        deep=True,
        torch=str(trace.meta.get("torch_version", "")),
        is_state=trace.is_state(device),
        by_frames=trace.meta.get("categories") == BY_FRAMES,
    )


def _holdings(trace: MemoryTrace, lives: Lifetimes, alive: Ints) -> tuple[Holding, ...]:
    """The live blocks, joined where stack, operator, category and folded module are the same."""
    born = lives.born[alive]
    keys = np.stack(
        [
            lives.stack[alive],
            born_column(trace.op, born),
            lives.category[alive],
            born_column(trace.module, born),
            born_column(trace.tensor, born),
            lives.block[alive],
        ]
    )
    distinct, counts = np.unique(keys, axis=1, return_counts=True)
    stacks: dict[int, tuple[Frame | None, tuple[Frame, ...]]] = {}
    drafts: dict[tuple[int, str, str, Frame | None, tuple[Frame, ...]], list[tuple[int, int, str]]] = {}
    for (stack, op, kind, module, tensor, size), count in zip(
        distinct.T.tolist(), counts.tolist(), strict=True
    ):
        told = stacks.get(stack)
        if told is None:
            frames = stack_frames(trace, stack)
            told = stacks[stack] = (user_frame(frames), _of_people(frames))
        key = (kind, entry(trace.ops, op), fold_path(entry(trace.modules, module)), *told)
        drafts.setdefault(key, []).append((size * count, count, entry(trace.tensors, tensor)))
    return _sorted(
        Holding(
            category=Category(kind),
            op=op,
            module=module,
            tensor=max(blocks)[2],
            line=line,
            stack=frames,
            count=sum(count for _, count, _ in blocks),
            total_bytes=sum(size for size, _, _ in blocks),
            block_bytes=_of_each({size // count for size, count, _ in blocks}),
        )
        for (kind, op, module, line, frames), blocks in drafts.items()
    )


def _of_each(sizes: Collection[int]) -> int:
    """The size that all have; 0 where they differ."""
    return next(iter(sizes)) if len(sizes) == 1 else 0


def _of_people(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The user's frames, and before them the innermost of a library."""
    users = tuple(frame for frame in frames if origin(frame.filename) is Origin.USER)
    library = innermost(frames, Origin.LIBRARY)
    return users if library is None or library in users else (library, *users)


def _by_module(holdings: Sequence[Holding]) -> dict[str, int]:
    modules: dict[str, int] = {}
    for one in holdings:
        modules[one.module] = modules.get(one.module, 0) + one.total_bytes
    return modules


def _sorted(holdings: Iterator[Holding]) -> tuple[Holding, ...]:
    return tuple(sorted(holdings, key=lambda one: (-one.total_bytes, one.op, one.module, str(one.line))))


def states_from_report(report: Mapping[str, Any], name: str = "") -> tuple[PeakState, ...]:
    """The devices of a report of ``vramfit run --json``, by index; the report is detailed for one of them only.

    Raises:
        TraceFormatError: it is not as docs/json.md says.
    """
    reader = _ReportReader(name)
    decisive = reader.get(report, "device", int, default=0)
    found = []
    for entry_ in reader.each(report, "devices"):
        index = reader.get(entry_, "index", int)
        peak = reader.get(entry_, "peak", dict)
        oom = report.get("oom")
        state = PeakState(
            name=name,
            device=index,
            gpu=reader.get(reader.get(entry_, "gpu", dict), "name", str, default=""),
            allocated=reader.get(peak, "allocated_bytes", int),
            reserved=reader.get(peak, "reserved_bytes", int),
            outside=reader.get(entry_, "outside_pytorch_bytes", int),
            ran_out=report.get("outcome") == "does_not_fit"
            and isinstance(oom, dict)
            and oom.get("device") == index,
            phase=reader.get(reader.get(entry_, "moment", dict, default={}), "phase", str, default=""),
            categories=reader.categories(reader.get(entry_, "categories", dict)),
            torch=reader.get(report, "torch", str, default=""),
        )
        found.append(reader.details(report, state) if index == decisive else state)
    return tuple(sorted(found, key=lambda one: one.device))


class _ReportReader:
    """Takes values out of a JSON document, naming what is wrong with it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get(self, value: Mapping[str, Any], key: str, kind: type[_T], *, default: _T | None = None) -> _T:
        """A value of a kind; null counts as not there."""
        found = value.get(key)
        if found is None and default is not None:
            return default
        if type(found) is not kind:
            raise TraceFormatError(
                f"{self.name}: {key} is {found!r:.40}, not what a report of vramfit has there",
                "Write it again: vramfit run --json, or vramfit check --write-baseline",
            )
        return found

    def each(self, value: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
        """The objects of a list."""
        for position, one in enumerate(self.get(value, key, list)):
            if not isinstance(one, dict):
                self.get({f"{key}[{position}]": one}, f"{key}[{position}]", dict)
            yield one

    def categories(self, value: Mapping[str, Any]) -> dict[Category, int]:
        """Bytes by category."""
        return {kind: self.get(value, kind.name.lower(), int, default=0) for kind in _OTHER_LAST}

    def frame(self, value: Mapping[str, Any], key: str) -> Frame | None:
        """A source line."""
        if value.get(key) is None:
            return None
        found = self.get(value, key, dict)
        return Frame(
            self.get(found, "file", str),
            self.get(found, "line", int),
            self.get(found, "function", str, default=""),
        )

    def details(self, report: Mapping[str, Any], state: PeakState) -> PeakState:
        """The state of the deciding device, with the details that the report has for it only."""
        modules: dict[str, int] = {}
        for module in self.each(report, "modules"):
            own = self.get(module, "own_bytes", int)
            if own:
                path = fold_path(self.get(module, "path", str))
                modules[path] = modules.get(path, 0) + own
        parts: dict[str, int] = {}
        for phase in self.each(report, "phases"):
            part = split_name(self.get(phase, "name", str))[1]
            parts[part] = max(parts.get(part, 0), self.get(phase, "peak_allocated_bytes", int))
        omitted = self.get(report, "tensors_omitted", dict, default={})
        return replace(
            state,
            modules=modules,
            holdings=_sorted(self.holdings(report)),
            omitted=self.get(omitted, "bytes", int, default=0),
            phases=parts,
        )

    def holdings(self, report: Mapping[str, Any]) -> Iterator[Holding]:
        """The groups of tensors."""
        for group in self.each(report, "tensors"):
            line, library = self.frame(group, "line"), self.frame(group, "library_line")
            yield Holding(
                category=_KINDS.get(self.get(group, "category", str), Category.OTHER),
                op=self.get(group, "op", str, default=""),
                module=self.get(group, "module", str, default=""),
                tensor=self.get(group, "tensor", str, default=""),
                line=line,
                stack=tuple(frame for frame in (library, line) if frame is not None),
                count=self.get(group, "count", int),
                total_bytes=self.get(group, "total_bytes", int),
                block_bytes=self.get(group, "block_bytes", int, default=0),
            )
