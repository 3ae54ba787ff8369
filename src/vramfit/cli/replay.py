"""`vramfit replay`: replay a recording through the allocator, as it was or under other settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli.options import Recording, check_alloc_conf
from vramfit.cli.printing import STANDARD_OUTPUT, check_outputs, write_document
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from rich.text import Text

    from vramfit.trace import DeviceReplay, MemoryTrace, Peaks, ReplayReport

REPLAY_SCHEMA = "vramfit.replay/1"
"""Name and version: the number grows when a key changes its meaning or goes away, not for new keys."""


def replay_command(
    file: Recording,
    alloc_conf: Annotated[
        str | None,
        typer.Option(
            "--alloc-conf",
            metavar="SETTINGS",
            help="What if PYTORCH_ALLOC_CONF had been this. Without it: as recorded.",
        ),
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for standard output."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the recording, as it was, as one HTML page."),
    ] = None,
) -> None:
    """Replay a recording's requests through the allocator and compare addresses, segments and peaks."""
    from vramfit.allocator import AllocatorConfig
    from vramfit.trace import read_any, replay

    check_alloc_conf(alloc_conf)
    config = None if alloc_conf is None else AllocatorConfig.parse(alloc_conf)
    check_outputs((("--json", json), ("--report", page)))
    trace = read_any(file)
    _check_requests(trace, file, alloc_conf)
    report = replay(trace, config)
    if page is not None:
        from vramfit.report import write_page

        write_page(page, trace, title=file.name, root=Path.cwd())
    if json is not None:
        write_document(json, replay_to_json(report))
    if json != STANDARD_OUTPUT:
        _print(report, file)


def _check_requests(trace: MemoryTrace, file: Path, alloc_conf: str | None) -> None:
    """Refuse settings for a snapshot without history: nothing would be served under them.

    Raises:
        UsageError: no device has a request, and settings are given.
    """
    from vramfit.trace.without_history import RECORD_HISTORY, STATE

    devices = trace.known_devices
    if alloc_conf is not None and devices and all(trace.is_state(index) for index in devices):
        raise UsageError(
            f"{file} is {STATE}: it holds no requests that {alloc_conf or 'the defaults'} could serve",
            RECORD_HISTORY,
        )


def replay_to_json(report: ReplayReport) -> dict[str, Any]:
    """The result as values that `json` can write; docs/json.md describes them. Sizes are bytes."""
    return {
        "schema": REPLAY_SCHEMA,
        "alloc_conf": report.alloc_conf,
        "recorded_alloc_conf": report.recorded_alloc_conf,
        "what_if": report.what_if,
        "exact": None
        if report.what_if or all(device.is_state for device in report.devices)
        else report.exact,
        "events": report.events,
        "seconds": round(report.seconds, 6),
        "devices": [_device(device) for device in report.devices],
    }


def _device(device: DeviceReplay) -> dict[str, Any]:
    return {
        "index": device.index,
        "events": device.events,
        "allocations": device.allocations,
        "addresses_matched": device.addresses_matched,
        "segments": device.segments,
        "segments_matched": device.segments_matched,
        "releases": device.releases,
        "releases_matched": device.releases_matched,
        "final_segments": device.final_segments,
        "final_segments_matched": device.final_segments_matched,
        "is_state": device.is_state,
        "surprises": device.surprises,
        "ooms": device.ooms,
        "ooms_replayed": device.ooms_replayed,
        "unknown_frees": device.unknown_frees,
        "capacity_bytes": device.total_bytes or None,
        "recorded": _peaks(device.recorded),
        "replayed": _peaks(device.replayed),
        "first_difference": device.first_difference,
    }


def _peaks(peaks: Peaks) -> dict[str, int]:
    return {"peak_allocated_bytes": peaks.peak_allocated, "peak_reserved_bytes": peaks.peak_reserved}


def _print(report: ReplayReport, file: Path) -> None:
    from vramfit.console import SafeConsole
    from vramfit.report.text import print_lines

    console = SafeConsole(highlight=False)
    print_lines(console, _lines(report, file, console.width), console.width)


def _lines(report: ReplayReport, file: Path, width: int) -> Iterator[Text]:
    from rich.text import Text

    from vramfit.units import counted

    settings = report.alloc_conf or "the defaults"
    if report.what_if:
        recorded = report.recorded_alloc_conf or "the defaults"
        head = f"{file.name}: what if, under {settings} instead of {recorded}"
    else:
        head = f"{file.name}: replayed as recorded, under {settings}"
    states = [device for device in report.devices if device.is_state]
    if states and len(states) == len(report.devices):
        head = f"{file.name}: nothing to replay"
    yield Text(head, style="bold")
    if not report.devices:
        yield Text("The recording holds no events and no segments.")
        return
    for device in states:
        yield Text(f"GPU {device.index}: {_state(device)}", style="yellow")
    if states:
        from vramfit.trace.without_history import RECORD_HISTORY

        yield Text(f"{RECORD_HISTORY}.")
    if len(states) == len(report.devices):
        return
    yield from _table(report, width)
    for device in report.devices:
        for note in _notes(report, device):
            yield Text(f"GPU {device.index}: {note}")
    rate = report.events / report.seconds if report.seconds else 0.0
    yield Text(f"{counted(report.events, 'event')} in {report.seconds:.2f} s ({rate:,.0f}/s)", style="dim")


def _state(device: DeviceReplay) -> str:
    """What a device whose events were not recorded is."""
    from vramfit.trace.without_history import STATE
    from vramfit.units import counted, format_bytes

    held = f"{format_bytes(device.recorded.peak_allocated)} of {format_bytes(device.recorded.peak_reserved)}"
    segments = counted(device.final_segments, "segment")
    return f"{STATE}. It holds {held} reserved in {segments}, and no request that could be replayed."


def _table(report: ReplayReport, width: int) -> Iterator[Text]:
    from rich.text import Text

    from vramfit.report.folding import table
    from vramfit.units import format_bytes

    cells: list[list[Text]] = []
    for device in report.devices:
        if device.is_state:
            continue
        rows: list[tuple[str, str, int, int | None]] = [
            ("requests, at their addresses", "", device.allocations, device.addresses_matched),
            ("segments taken", "", device.segments, device.segments_matched),
            ("segments given back", "", device.releases, device.releases_matched),
            ("segments at the end", "", device.final_segments, device.final_segments_matched),
            ("requests out of memory", "", device.ooms, device.ooms_replayed),
            ("peak allocated", "B", device.recorded.peak_allocated, device.replayed.peak_allocated),
            ("peak reserved", "B", device.recorded.peak_reserved, device.replayed.peak_reserved),
        ]
        shown = [row for row in rows if row[3] is not None and (row[2] or row[3])]
        for number, (name, unit, recorded, replayed) in enumerate(shown):
            form = format_bytes if unit else "{:,}".format
            style = "" if report.what_if else ("green" if recorded == replayed else "yellow")
            label = f"GPU {device.index}  " if number == 0 else " " * len(f"GPU {device.index}  ")
            found = "" if replayed is None else form(replayed)
            cells.append([Text(f"{label}{name}"), Text(form(recorded)), Text(found, style=style)])
    if cells:
        yield from table(("", "recorded", "replayed"), cells, width)


def _notes(report: ReplayReport, device: DeviceReplay) -> list[str]:
    from vramfit.units import counted, format_bytes

    notes = []
    if device.first_difference is not None and not report.what_if:
        notes.append(f"first difference: {device.first_difference}")
    if device.unknown_frees:
        notes.append(
            f"{counted(device.unknown_frees, 'free')} of unknown blocks: from before the recording, or not allocated"
        )
    if report.what_if and device.ooms > device.ooms_replayed:
        notes.append(
            f"{counted(device.ooms - device.ooms_replayed, 'request')} that ran out of memory would have been served"
        )
    if report.what_if and device.ooms_replayed > device.ooms:
        notes.append(
            f"requests that would have run out of memory as well: {device.ooms_replayed - device.ooms}"
        )
    if report.what_if:
        saved = device.recorded.peak_reserved - device.replayed.peak_reserved
        word = "less" if saved > 0 else "more"
        if saved:
            notes.append(f"peak reserved would be {format_bytes(abs(saved))} {word}")
    return notes
