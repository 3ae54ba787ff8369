"""Works out rows: runs recorded programs on the virtual GPU and compares request by request."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import recordings
from configurations import ALL
from recording import store
from recordings_models import streams

from comparing import published, results
from comparing.addresses import peaks_at_recorded_addresses
from comparing.results import Results
from comparing.rows import Bar, Figure, Origin, Row, Stream, Tool, bars_of
from vramfit.analysis import Measure, curves, lifetimes
from vramfit.errors import VramfitError
from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.trace import EventKind, MemoryTrace, Run, read_any
from vramfit.virtual.virtual_run import run_in_child

BENCHMARKS = Path(__file__).parents[1]
PROGRAM = BENCHMARKS / "recording" / "program.py"
CHANGED = (
    "the sources of its program have changed since it was recorded; record it again if a difference remains"
)
COMPARED = ("segment.all.allocated", "segment.all.freed", "num_alloc_retries", "num_ooms")
"""Statistics that are compared beside the peaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """Requests in order, as `streams.differences` reads them: whether one takes a block, its bytes, what asked."""

    requests: list[streams.Request]
    labels: list[str]


def sequence_of(trace: MemoryTrace) -> Sequence:
    """The requests of device 0; blocks that are given back one after the other are sorted by size.

    Their order says nothing of memory, and is not the same in two runs of one program: autocast empties its cache of
    weights in the order of a hash table of addresses (aten/src/ATen/autocast_mode.cpp: clear_cache).
    """
    asked = (trace.kind == EventKind.ALLOC) | (trace.kind == EventKind.FREE_REQUESTED)
    rows = np.flatnonzero(asked & (trace.device == 0))
    takes = (trace.kind[rows] == EventKind.ALLOC).tolist()
    requests: list[tuple[streams.Request, str]] = []
    returned: list[tuple[streams.Request, str]] = []
    made: dict[int, str] = {}
    for row, taken in zip(rows.tolist(), takes, strict=True):
        address, size = int(trace.address[row]), int(trace.size[row])
        if taken:
            made[address] = label(trace, row)
            requests += [*sorted(returned), ((True, size), made[address])]
            returned = []
        else:
            returned.append(((False, size), made.pop(address, "")))
    requests += sorted(returned)
    return Sequence(requests=[request for request, _ in requests], labels=[label for _, label in requests])


def label(trace: MemoryTrace, row: int) -> str:
    """What asked for a block, as far as the trace knows: the operator and module, or the innermost frames."""
    if trace.op[row] >= 0:
        module = trace.modules[trace.module[row]] if trace.module[row] >= 0 else ""
        return f"{trace.ops[trace.op[row]]} {module}".rstrip()
    if trace.stack[row] >= 0:
        frames = [trace.frames[index] for index in trace.stacks[trace.stack[row]]]
        return " < ".join(f"{frame.filename}:{frame.line}" for frame in frames)
    return ""


# -- recordings of `record.py` -------------------------------------------------------------------------------


def row_of(recording: store.Recording) -> Row:
    """The row of a recording, with nothing predicted yet."""
    changed = CHANGED if recording.name in ALL and not recording.is_of_these_programs else ""
    return Row(
        name=recording.name,
        origin=Origin(recording.source.value),
        device=recording.facts["device"]["name"],
        torch=recording.facts["device"]["torch"],
        allocated=recording.peak_allocated_bytes,
        reserved=recording.peak_reserved_bytes,
        context=recording.context_bytes,
        out_of_memory=recording.facts["oom"] is not None,
        note="; ".join(filter(None, (changed, other_versions(recording.facts.get("packages", {}))))),
    )


def other_versions(recorded: Mapping[str, str]) -> str:
    """Packages of which another version is installed than was recorded with: their programs ask for other memory."""
    return ", ".join(
        f"{name} {installed} here, {version} where it was recorded"
        for name, version in recorded.items()
        if (installed := results.version_of(name)) not in (version, results.ABSENT)
    )


def predict(recording: store.Recording, kept: Results) -> Row:
    """Run a recorded configuration on the virtual GPU and compare."""
    row = row_of(recording)
    reason = why_not(recording)
    if reason is not None:
        return row.with_figures({Tool.VRAMFIT: Figure(reason=reason)})
    key = results.digest(
        results.of_vramfit(),
        recording.file,
        recording.file.with_suffix(".vft"),
        BENCHMARKS / "recording",
        BENCHMARKS / "comparing" / "addresses.py",
        BENCHMARKS / "comparing" / "predictions.py",
        BENCHMARKS / "comparing" / "rows.py",
        results.versions(*ALL[recording.name].packages),
    )
    name = f"{recording.file.parent.name}-{recording.name}"
    found = kept.get(name, key)
    if found is None:
        found = _prediction(recording)
        kept.put(name, key, found)
    stream = found["stream"]
    return replace(
        row.with_figures({Tool.VRAMFIT: Figure(**found["figure"])}),
        stream=None if stream is None else _stream(stream),
        predicted_context=found["context"],
        bars=_bars(found["bars"]),
    )


def why_not(recording: store.Recording) -> str | None:
    """Why a recording cannot be predicted here, None if it can."""
    if recording.name not in ALL:
        return "there is no such configuration any more"
    missing = [p for p in ALL[recording.name].packages if results.versions(p).endswith("absent")]
    return f"needs {', '.join(missing)}, which is not installed" if missing else None


def _stream(plain: Mapping[str, Any]) -> Stream:
    lists = {name: tuple(plain[name]) for name in ("differences", "unequal")}
    if plain.get("at_addresses") is not None:
        lists["at_addresses"] = tuple(plain["at_addresses"])
    return Stream(**{**plain, **lists})


def _bars(plain: Mapping[str, Mapping[str, int]]) -> dict[str, Bar]:
    return {of: Bar(**bar) for of, bar in plain.items()}


def _prediction(recording: store.Recording) -> dict[str, Any]:
    configuration = ALL[recording.name]
    began = time.perf_counter()
    try:
        spec = find_gpu(recording.facts["device"]["name"])
        spec = replace(spec, total_bytes=int(recording.facts["device"]["total_bytes"]))
        with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
            run = run_in_child(
                [str(PROGRAM), configuration.name, "--out", folder],
                RunOptions(gpu=spec, alloc_conf=configuration.alloc_conf, writes_through=(folder,)),
            )
            if run.exit_code:
                return _failed(run.error or f"the program ended with code {run.exit_code}")
            file = Path(folder) / f"{configuration.name}.json"
            facts = json.loads(file.read_text(encoding="utf-8"))
    except VramfitError as error:
        return _failed(error.message)
    seconds = time.perf_counter() - began
    return {
        "figure": asdict(
            Figure(
                allocated=facts["statistics"]["allocated_bytes.all.peak"],
                reserved=facts["statistics"]["reserved_bytes.all.peak"],
                seconds=seconds,
            )
        ),
        "stream": asdict(_compare(recording, run, facts)),
        "context": run.devices[0].context_bytes,
        "bars": {of: asdict(bar) for of, bar in bars_of(run).items()},
    }


def _failed(reason: str) -> dict[str, Any]:
    return {"figure": asdict(Figure(reason=reason)), "stream": None, "context": None, "bars": {}}


def _compare(recording: store.Recording, run: Run, facts: Mapping[str, Any]) -> Stream:
    recorded, predicted = sequence_of(recording.trace), sequence_of(run.trace)
    found = streams.differences(recorded, predicted)
    unequal = [
        f"{name} {recording.facts['statistics'][name]:,} recorded, {facts['statistics'][name]:,} predicted"
        for name in COMPARED
        if recording.facts["statistics"][name] != facts["statistics"][name]
    ]
    for one, other, how in ((recording.facts, facts, "predicted"), (facts, recording.facts, "recorded")):
        if one["oom"] and not other["oom"]:
            unequal.append(f"ran out of memory in step {one['oom']['step']}, not so {how}")
    return Stream(
        recorded=len(recorded.requests),
        predicted=len(predicted.requests),
        differing=sum(difference.count for difference in found),
        differences=tuple(str(difference) for difference in found[:10]),
        unequal=tuple(unequal),
        at_addresses=peaks_at_recorded_addresses(recording.trace, run.trace),
    )


# -- published recordings ------------------------------------------------------------------------------------


def published_names() -> list[str]:
    """Every published recording that lies here."""
    return sorted(file.name.removesuffix(".json.gz") for file in recordings.RECORDINGS.glob("*.json.gz"))


def predict_published(names: Iterable[str], kept: Results) -> list[Row]:
    """Rows of published recordings: predicted where we have the program, else with the reason why not."""
    wanted = set(names)
    comparisons: dict[str, dict[str, Any]] = {}
    reasons = dict(published.NOT_REPRODUCED)
    for session in recordings.SESSIONS:
        if not wanted & set(session.snapshots):
            continue
        try:
            comparisons |= {comparison["name"]: comparison for comparison in _session(session, kept)}
        except (VramfitError, SystemExit) as error:
            reasons |= dict.fromkeys(session.snapshots, f"its program failed here: {error}")
    return [
        _compared(name, comparisons[name])
        if name in comparisons
        else _unpredicted(name, reasons.get(name, "no program of ours reproduces it"), kept)
        for name in sorted(wanted)
    ]


def _session(session: recordings.Session, kept: Results) -> list[dict[str, Any]]:
    key = results.digest(
        results.of_vramfit(),
        repr(session),
        recordings.MODELS / session.script,
        Path(streams.__file__),
        BENCHMARKS / "recordings.py",
        BENCHMARKS / "comparing" / "rows.py",
        *(recordings.RECORDINGS / f"{name}.json.gz" for name in session.snapshots),
    )
    name = "session-" + min(session.snapshots)
    found = kept.get(name, key)
    if found is None:
        began = time.perf_counter()
        compared = [asdict(c) for c in recordings.run(session, list(session.snapshots))]
        seconds = (time.perf_counter() - began) / len(compared)
        found = [{**c, "seconds": seconds} for c in compared]
        kept.put(name, key, found)
    return found


def _compared(name: str, comparison: Mapping[str, Any]) -> Row:
    """A row of the comparison that `recordings.py` makes."""
    pairs = (
        "start_allocated",
        "start_reserved",
        "workspaces",
        "segments_taken",
        "segments_released",
        "slack",
        "inactive_split",
    )
    session = next(s for s in recordings.SESSIONS if name in s.snapshots)
    allocated, reserved = comparison["peak_allocated"], comparison["peak_reserved"]
    return Row(
        name=name,
        origin=Origin.PUBLISHED,
        device=session.card,
        torch=session.torch,
        allocated=allocated[0],
        reserved=reserved[0],
        figures={
            Tool.VRAMFIT: Figure(allocated=allocated[1], reserved=reserved[1], seconds=comparison["seconds"])
        },
        bars=_bars(comparison["bars"]),
        stream=Stream(
            recorded=comparison["requests"][0],
            predicted=comparison["requests"][1],
            differing=comparison["requests_differing"],
            differences=tuple(comparison["differences"]),
            unequal=tuple(
                f"{pair.replace('_', ' ')} {comparison[pair][0]:,} recorded, {comparison[pair][1]:,} predicted"
                for pair in pairs
                if comparison[pair][0] != comparison[pair][1]
            ),
        ),
    )


def _unpredicted(name: str, reason: str, kept: Results) -> Row:
    """A published recording without a program of ours: its fullest device, and why it has none."""
    file = recordings.RECORDINGS / f"{name}.json.gz"
    key = results.digest(results.of_vramfit(), file)
    found = kept.get(f"peaks-{name}", key)
    if found is None:
        trace = read_any(file)
        peaks = [_peaks(trace, device.index) for device in trace.devices]
        found = max(peaks, key=lambda pair: pair[1])
        kept.put(f"peaks-{name}", key, found)
    return Row(
        name=name,
        origin=Origin.PUBLISHED,
        device="not told",
        torch="not told",
        allocated=found[0],
        reserved=found[1],
        figures={Tool.VRAMFIT: Figure(reason=reason)},
    )


def _peaks(trace: MemoryTrace, device: int) -> list[int]:
    over = curves(trace, lifetimes(trace, device))
    return [over.peak(Measure.ALLOCATED), over.peak(Measure.RESERVED)]
