"""The outcome of a real run or of another prediction, read from files: a trace, figures, or one of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vramfit.errors import TraceFormatError, UsageError
from vramfit.trace.fileformat import read_file
from vramfit.trace.model import MemoryTrace
from vramfit.trace.snapshot_reading import as_snapshot, parse_own, parse_plain, trace_of
from vramfit.units import parse_bytes
from vramfit.writing import StrPath

RUN_SCHEMA = "vramfit.run/"
_READ = "1"

_HINT = (
    "Give a torch snapshot (torch.cuda.memory._dump_snapshot), a .vft trace, a report of vramfit run --json, or "
    "torch.cuda.memory_stats() as JSON, if you like with device_used_bytes; docs/reconciliation.md shows them"
)

_KEYS: Mapping[str, str] = {
    "allocated_bytes.all.peak": "peak_allocated",
    "max_memory_allocated": "peak_allocated",
    "peak_allocated_bytes": "peak_allocated",
    "peak.allocated_bytes": "peak_allocated",
    "reserved_bytes.all.peak": "peak_reserved",
    "max_memory_reserved": "peak_reserved",
    "peak_reserved_bytes": "peak_reserved",
    "peak.reserved_bytes": "peak_reserved",
    "requested_bytes.all.peak": "peak_requested",
    "reserved_bytes.all.current": "reserved_then",
    "memory_reserved": "reserved_then",
    "device_used_bytes": "used",
    "nvidia_smi_bytes": "used",
    "outside_pytorch_bytes": "outside",
    "outside_bytes": "outside",
    "outside_bytes.end": "outside",
}
"""How files call the figures: names of torch's statistics and functions, of our own reports, and a few plain ones."""

_NAMES: Mapping[str, str] = {
    "gpu": "gpu",
    "gpu.name": "gpu",
    "device.name": "gpu",
    "torch": "torch",
    "device.torch": "torch",
}
_DEEPEST = 4
_UNNAMED = frozenset({"memory_stats", "statistics"})
"""Objects whose keys count as those of the document around them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFigures:
    """The figures of one device without a trace, in bytes; None where the file does not give one.

    Attributes:
        device: its index, None if the file does not say.
        peak_allocated, peak_reserved: highest figures of the run.
        peak_requested: the most bytes that live blocks were asked for.
        slack: bytes of blocks that nobody asked for, at the peak of allocated bytes.
        workspaces: bytes of workspaces of libraries, at that peak.
        outside: memory of the device outside torch's allocator.
        used: memory of the device that is used in all, where the file does not say how much of it torch had reserved.
        whole_run: the peaks are those of the whole run; else they count from where the program last reset them.
        gpu: name of the card, empty if unknown.
        torch: version of torch, empty if unknown.
    """

    device: int | None = None
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    peak_requested: int | None = None
    slack: int | None = None
    workspaces: int | None = None
    outside: int | None = None
    used: int | None = None
    whole_run: bool = False
    gpu: str = ""
    torch: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Actual:
    """A run to compare a prediction with.

    Attributes:
        name: of its file or files.
        trace: what it asked of the allocator, if that is known.
        figures: one entry for each device of which figures are known.
        report: the report of ``vramfit run --json`` that the figures come from; None where they come from elsewhere.
    """

    name: str
    trace: MemoryTrace | None = None
    figures: tuple[DeviceFigures, ...] = ()
    report: Mapping[str, Any] | None = None

    @property
    def devices(self) -> tuple[int, ...]:
        """Indices of the devices with a trace or figures."""
        found = {figures.device or 0 for figures in self.figures}
        return tuple(sorted(found if self.trace is None else found.union(self.trace.known_devices)))

    def figures_of(self, device: int) -> DeviceFigures:
        """The figures of a device, with the card and context that the trace names."""
        known = next(
            (figures for figures in self.figures if (figures.device or 0) == device), DeviceFigures()
        )
        if self.trace is None:
            return known
        described = next((found for found in self.trace.devices if found.index == device), None)
        return replace(
            known,
            outside=self.trace.outside_bytes(device) if known.outside is None else known.outside,
            gpu=known.gpu or (described.name if described is not None else ""),
            torch=known.torch or str(self.trace.meta.get("torch_version", "")),
        )


def read_actual(*paths: StrPath) -> Actual:
    """Read the outcome of a run from one file or two: a trace or snapshot, and figures.

    Raises:
        TraceFormatError: a file is none of the forms that docs/json.md lists, or damaged.
        UsageError: two files of the same sort.
    """
    found = [_read(Path(path)) for path in paths]
    if not found:
        raise UsageError("no file to compare with is given", _HINT)
    traces = [one.trace for one in found if one.trace is not None]
    figures = [one.figures for one in found if one.figures]
    if len(traces) > 1 or len(figures) > 1:
        what = "recordings" if len(traces) > 1 else "files of figures"
        raise UsageError(
            f"{' and '.join(one.name for one in found)} are two {what}",
            "Compare with one run: its recording, its figures, or one of each",
        )
    trace = traces[0] if traces else None
    return Actual(
        name=" + ".join(one.name for one in found),
        trace=trace,
        figures=tuple(_with_outside(each, trace) for each in figures[0]) if figures else (),
        report=next((one.report for one in found if one.report is not None), None),
    )


def _with_outside(figures: DeviceFigures, trace: MemoryTrace | None) -> DeviceFigures:
    """Figures with the bytes outside torch worked out from what the recording held at its end."""
    if figures.used is None:
        return figures
    if trace is None:
        raise TraceFormatError(
            f"{figures.used} bytes of the device were used, but the file does not say how many torch had reserved",
            "Add reserved_bytes.all.current, or all of torch.cuda.memory_stats(), of the same moment",
        )
    segments = (each.segments for each in trace.devices if each.index == (figures.device or 0))
    held = sum(int(segment["total_size"]) for those in segments for segment in those)
    return replace(figures, outside=_outside(figures.used, held), used=None)


def _outside(used: int, held: int) -> int:
    if held > used:
        raise TraceFormatError(
            f"{used} bytes of the device were used, less than the {held} that torch had reserved",
            "Read both at the same moment of the same process",
        )
    return used - held


def _read(path: Path) -> Actual:
    data = read_file(path)
    own = parse_own(data, str(path))
    if own is not None:
        return Actual(name=path.name, trace=own)
    plain = parse_plain(data, str(path), kinds=_HINT)
    if _is_snapshot(plain.value) or not plain.is_json:
        return Actual(name=path.name, trace=trace_of(as_snapshot(plain, str(path)), str(path)))
    figures = figures_from(plain.value, str(path))
    return Actual(name=path.name, figures=figures, report=plain.value if is_report(plain.value) else None)


def is_report(value: Any) -> bool:
    """Whether a JSON document is a report of ``vramfit run --json`` of the version that is read."""
    return isinstance(value, dict) and value.get("schema") == RUN_SCHEMA + _READ


def _is_snapshot(value: Any) -> bool:
    if isinstance(value, list):
        return not value or (isinstance(value[0], dict) and "blocks" in value[0])
    return isinstance(value, dict) and bool({"segments", "device_traces"} & set(value))


def figures_from(value: Any, name: str) -> tuple[DeviceFigures, ...]:
    """The figures in a JSON document; ``name`` is for messages.

    Raises:
        TraceFormatError: there are none, or one is not a size.
    """
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, str) and schema.startswith("vramfit") and schema != RUN_SCHEMA + _READ:
        raise TraceFormatError(f"{name} is a {schema} document, not one of {RUN_SCHEMA}{_READ}", _HINT)
    found = tuple(_each_device(value, name))
    if not found and not is_report(value):  # which has none where the program saw no card
        raise TraceFormatError(f"{name} holds no figures of memory that vramfit knows", _HINT)
    indices = [figures.device or 0 for figures in found]
    if len(set(indices)) < len(indices):
        raise TraceFormatError(f"{name} gives figures of the same device twice", _HINT)
    return found


def _each_device(value: Any, name: str) -> Iterator[DeviceFigures]:
    if isinstance(value, dict) and isinstance(value.get("devices"), list):
        shared = {key: value[key] for key in ("gpu", "torch") if key in value}
        entries: list[Any] = [{**shared, **entry} for entry in value["devices"] if isinstance(entry, dict)]
        positions: list[int | None] = list(range(len(entries)))
    elif isinstance(value, list):
        entries, positions = value, list(range(len(value)))
    else:
        entries, positions = [value], [None]
    for entry, position in zip(entries, positions, strict=True):
        if isinstance(entry, dict):
            figures = _figures(entry, position, name)
            if figures is not None:
                yield figures


def _figures(entry: Mapping[str, Any], position: int | None, name: str) -> DeviceFigures | None:
    sizes: dict[str, int] = {}
    names: dict[str, str] = {}
    index = position
    for key, value in _flat(entry):
        if key in _KEYS:
            sizes.setdefault(_KEYS[key], _size(value, key, name))
        elif key in _NAMES and isinstance(value, str):
            names.setdefault(_NAMES[key], value)
        elif key in ("device", "index") and type(value) is int and 0 <= value < 1 << 15:
            index = value
    if not sizes:
        return None
    used, then = sizes.pop("used", None), sizes.pop("reserved_then", None)
    if used is not None and "outside" not in sizes:
        held = sizes.get("peak_reserved") if then is None else then
        if held is None:
            sizes["used"] = used
        else:
            sizes["outside"] = _outside(used, held)
    sizes.update(_at_peak(entry, sizes))
    return DeviceFigures(
        device=index,
        whole_run="peak_allocated_bytes" in entry or "peak" in entry,
        gpu=names.get("gpu", ""),
        torch=names.get("torch", ""),
        **sizes,
    )


def _at_peak(entry: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Slack and workspaces of our own report, where it describes the peak of allocated bytes."""
    categories, fragments = entry.get("categories"), entry.get("fragmentation")
    if not isinstance(categories, dict) or not isinstance(fragments, dict):
        return {}
    amounts = [*categories.values(), fragments.get("slack_bytes")]
    if not all(type(amount) is int for amount in amounts):
        return {}
    if sum(amounts[:-1]) != sizes.get("peak_allocated"):
        return {}  # the run ended by running out: these are of that moment
    return {"slack": amounts[-1], "workspaces": categories.get("workspaces", 0)}


def _flat(entry: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Keys of nested objects joined by dots, as torch joins those of its statistics."""
    for key, value in entry.items():
        if isinstance(value, dict) and depth < _DEEPEST:
            yield from _flat(value, prefix if key in _UNNAMED else f"{prefix}{key}.", depth + 1)
        else:
            yield f"{prefix}{key}", value


def _size(value: Any, key: str, name: str) -> int:
    size: int | None = None
    if type(value) is int:
        size = value
    elif isinstance(value, str):
        try:
            size = parse_bytes(value)
        except ValueError:
            size = None
    if size is None or not 0 <= size < 1 << 62:
        raise TraceFormatError(
            f"{name}: {key} is {value!r:.40}, not a size",
            'Write it as a number of bytes, or as text with a unit such as "23.5GiB"',
        )
    return size
