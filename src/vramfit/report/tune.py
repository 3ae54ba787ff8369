"""What `vramfit tune` found: in the terminal and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from vramfit.analysis.allocator_tuning import DeviceRecording, Tuning
from vramfit.analysis.trials import Trial
from vramfit.report.folding import broken, table
from vramfit.report.rendering import Destination, json_values, printer
from vramfit.report.text import print_lines, signed
from vramfit.trace import CapacitySource
from vramfit.units import counted, format_bytes

TUNE_SCHEMA = "vramfit.tune/1"
_ROWS = 12
_WIDEST = 140
_DEFAULTS = "(defaults)"


@printer.register(Tuning)
def _print(tuning: Tuning, *, to: Destination) -> None:
    """Print the settings to use, the evidence, and what to keep away from."""
    width = min(to.console.width, _WIDEST)
    print_lines(to.console, _headline(tuning), width)
    if not tuning.keep:
        to.console.print()
        # Whole whatever the width, so that it can be copied.
        to.console.print(Text(f"    {tuning.export_line}", style="bold"), soft_wrap=True, highlight=False)
        to.console.print()
        print_lines(to.console, [Text(f"  {_price(tuning)}"), *_unknown_rest(tuning, width)], width)
    to.console.print()
    print_lines(to.console, _evidence(tuning, width), width)


def _evidence(tuning: Tuning, width: int) -> Iterator[Text]:
    """What was tried, and what to keep away from."""
    yield from _table(tuning, width)
    for note in _notes(tuning):
        yield from broken(Text(note), width)
    if tuning.traps:
        yield Text()
        yield Text("Traps", style="bold")
        for trap in tuning.traps:
            conf = trap.alloc_conf or _DEFAULTS
            trapped = Text.assemble(("  ! ", "yellow"), (conf, "bold"), f": {trap.text}")
            yield from broken(trapped, width, indent=4)
    yield Text()
    tried, events = counted(len(tuning.trials), "setting"), counted(tuning.events, "event")
    yield Text(f"{tried}, each with all {events}, in {tuning.seconds:.1f} s", style="dim")


def _headline(tuning: Tuning) -> Iterator[Text]:
    best, baseline = tuning.best, tuning.baseline
    if tuning.keep:
        name = tuning.recorded_alloc_conf or "the defaults"
        peak = format_bytes(baseline.peak_reserved)
        better = f"nothing tried lowers the peak of {peak} by more than {format_bytes(tuning.tolerance)}"
        yield Text.assemble(("✓ keep ", "bold green"), (name, "bold"), f": {better}")
        if baseline.ooms:
            fails = "The request that failed fails" if baseline.ooms == 1 else "Requests fail"
            yield Text(f"  {fails} under every setting: vramfit explain says what holds the memory.")
        return
    share = 100 * tuning.saved / baseline.peak_reserved if baseline.peak_reserved else 0.0
    if tuning.serves_failure:
        failed = "the request that ran out of memory"
        if baseline.ooms > 1:
            failed = f"{baseline.ooms - best.ooms} of {baseline.ooms} requests that ran out of memory"
        yield Text.assemble(
            ("~ ", "bold yellow"), f"{failed} would be served; what comes after the failure is not known"
        )
        return
    if best.ooms < baseline.ooms:
        what = (
            f"{baseline.ooms - best.ooms} of {baseline.ooms} requests that ran out of memory would be served"
        )
    elif tuning.saved:
        what = (
            f"peak reserved {format_bytes(best.peak_reserved)} instead of {format_bytes(baseline.peak_reserved)}: "
            f"{format_bytes(tuning.saved)} or {share:.1f} % less"
        )
    else:
        often = counted(best.retries, "time")
        what = f"the cache is given back for want of memory {often} instead of {baseline.retries}"
    yield Text.assemble(("✓ ", "bold green"), what)


def _unknown_rest(tuning: Tuning, width: int) -> Iterator[Text]:
    """That settings which serve a last request that failed are tried only up to there, and what tells more."""
    if not tuning.serves_failure:
        return
    again = (
        f"run the program again with {rerun_command(tuning)}"
        if tuning.virtual
        else "record it again with them"
    )
    text = (
        f"  The recording ends at the failure: these settings serve the requests up to there, and may fail at a later "
        f"one. To know, {again}."
    )
    yield from broken(Text(text, style="yellow"), width, indent=2)


def rerun_command(tuning: Tuning) -> str:
    """The command that runs the program of a virtual recording under the settings to take."""
    gpu = (
        f" --gpu {shlex.quote(device.gpu)}"
        if (device := tuning.failed_last) is not None and device.gpu
        else ""
    )
    return f"vramfit run{gpu} --alloc-conf {shlex.quote(tuning.best.alloc_conf)} SCRIPT"


def _price(tuning: Tuning) -> str:
    """Calls to the driver: each takes from microseconds to a millisecond, and a free waits for the card."""
    calls, before = (one.device_allocs + one.device_frees for one in (tuning.best, tuning.baseline))
    if calls > before:
        driver = f"{counted(calls, 'call')} to the driver"
        return f"The price: {driver} for memory instead of {before:,}, mostly in the first step."
    if calls < before:
        return (
            f"It also asks the driver for memory less often: {counted(calls, 'call')} instead of {before:,}."
        )
    return f"The calls to the driver for memory stay the same: {calls:,}."


def _table(tuning: Tuning, width: int) -> Iterator[Text]:
    heads = ("settings", "peak reserved", "against", "allocs", "frees", "retries", "failed")
    rows = [_row(trial, alike, tuning) for trial, alike in shown_trials(tuning)]
    return table(heads, rows, width)


def shown_trials(tuning: Tuning) -> list[tuple[Trial, int]]:
    """The best trials, the one to take and the recorded one; of those with equal figures one, with how many more."""
    named = (tuning.best.alloc_conf, tuning.baseline.alloc_conf)
    alike: dict[tuple[object, ...], list[Trial]] = {}
    for trial in tuning.trials:
        figures = (trial.devices, trial.device_allocs, trial.device_frees, trial.retries, trial.ooms)
        key = (trial.alloc_conf,) if trial.alloc_conf in named else (*figures, trial.complete)
        alike.setdefault(key, []).append(trial)
    rows = [(min(found, key=lambda one: one.settings), len(found) - 1) for found in alike.values()]
    last = [row for row in rows[_ROWS:] if row[0].alloc_conf in named]
    return [*rows[:_ROWS], *last]


def _row(trial: Trial, alike: int, tuning: Tuning) -> list[Text]:
    name = Text(trial.alloc_conf or _DEFAULTS)
    if alike:
        name.append(f"  and {alike} alike", style="dim")
    if trial.alloc_conf == tuning.best.alloc_conf:
        name.stylize("bold green")
    if trial.alloc_conf == tuning.baseline.alloc_conf:
        name.append("  ← recorded", style="cyan")
    difference = trial.peak_reserved - tuning.baseline.peak_reserved
    against = signed(difference) if difference else ""
    peak = format_bytes(trial.peak_reserved)
    return [
        name,
        Text(peak if trial.complete else f"> {peak}"),
        Text(against),
        Text(f"{trial.device_allocs:,}"),
        Text(f"{trial.device_frees:,}"),
        Text(f"{trial.retries:,}"),
        Text(f"{trial.ooms:,}", style="red" if trial.ooms else ""),
    ]


def _notes(tuning: Tuning) -> Iterator[str]:
    left_out = len(tuning.trials) - sum(1 + alike for _, alike in shown_trials(tuning))
    if left_out > 0:
        yield f"{left_out} more settings were tried; --json has them all."
    for device in tuning.devices:
        where = f"GPU {device.index}: " if len(tuning.devices) > 1 else ""
        same = "as recorded" if device.predicted == device.recorded else "not as recorded"
        yield (
            f"{where}replayed under the recorded settings: peak reserved "
            f"{format_bytes(device.predicted.peak_reserved)}, {same}."
        )
        yield f"{where}{_capacity(device)}"
    recorded = max(device.recorded.peak_reserved for device in tuning.devices)
    if tuning.baseline.peak_reserved != recorded:
        now = format_bytes(tuning.baseline.peak_reserved)
        why = f"On an empty card the recorded settings reserve {now}, and not {format_bytes(recorded)}."
        if any(device.begins_in_use for device in tuning.devices):
            why = "The recording begins with memory in use, whose history is unknown."
        yield (
            f"{why} All settings, the recorded ones too, begin here on an empty card, so compare the rows with one "
            "another."
        )
    if not tuning.version_known:
        major, minor = tuning.torch_version
        yield (
            f"The recording does not name its torch: the rules of {major}.{minor} apply, and settings that older "
            "versions lack were not tried."
        )


def _capacity(device: DeviceRecording) -> str:
    capacity = device.capacity
    size = format_bytes(capacity.bytes)
    if capacity.source is CapacitySource.CARD:
        return f"the allocator can have {size} of the card."
    if capacity.source is CapacitySource.OOM:
        return f"the allocator can have {size}, by what was reserved and free when it ran out."
    if capacity.source is CapacitySource.RETRIES:
        below = format_bytes(capacity.below)
        return f"the allocator can have at least {size} and less than {below}: its cache was given back for want of it."
    return (
        "the memory of the card is unknown, so no request fails here, and garbage collection was not tried."
    )


@json_values.register(Tuning)
def _json_values(tuning: Tuning) -> dict[str, Any]:
    """Everything that was tried; sizes are in bytes."""
    return {
        "schema": TUNE_SCHEMA,
        "torch": "{}.{}".format(*tuning.torch_version),
        "torch_known": tuning.version_known,
        "variable": tuning.variable,
        "export": tuning.export_line,
        "keep": tuning.keep,
        "saved_bytes": tuning.saved,
        "recorded_alloc_conf": tuning.recorded_alloc_conf,
        "recorded_from": tuning.recorded_from or None,
        "serves_failure": tuning.serves_failure,
        "rerun": rerun_command(tuning) if tuning.serves_failure and tuning.virtual else None,
        "events": tuning.events,
        "seconds": round(tuning.seconds, 3),
        "devices": [_device(device) for device in tuning.devices],
        "baseline": _trial(tuning.baseline),
        "best": _trial(tuning.best),
        "trials": [_trial(trial) for trial in tuning.trials],
        "traps": [
            {"kind": trap.kind.name.lower(), "alloc_conf": trap.alloc_conf, "text": trap.text}
            for trap in tuning.traps
        ],
    }


def _device(device: DeviceRecording) -> dict[str, Any]:
    capacity = device.capacity
    return {
        "index": device.index,
        "recorded_peak_reserved_bytes": device.recorded.peak_reserved,
        "recorded_peak_allocated_bytes": device.recorded.peak_allocated,
        "predicted_peak_reserved_bytes": device.predicted.peak_reserved,
        "exact": device.exact,
        "begins_in_use": device.begins_in_use,
        "ends_at_failure": device.ends_at_failure,
        "capacity_bytes": capacity.known,
        "capacity_source": capacity.source.name.lower(),
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "alloc_conf": trial.alloc_conf,
        "family": trial.family,
        "complete": trial.complete,
        "peak_reserved_bytes": trial.peak_reserved,
        "peak_allocated_bytes": trial.peak_allocated,
        "device_peaks_reserved_bytes": [peaks.peak_reserved for peaks in trial.devices],
        "driver_allocs": trial.device_allocs,
        "driver_frees": trial.device_frees,
        "retries": trial.retries,
        "ooms": trial.ooms,
    }
