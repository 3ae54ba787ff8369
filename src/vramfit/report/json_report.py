"""A run as JSON, with a schema of its own that is documented in docs/json.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vramfit.analysis import (
    NO_CARD,
    DeviceVerdict,
    Fragmentation,
    HeldMemory,
    KeptMemory,
    ModuleNode,
    Moment,
    Reconciliation,
    TensorGroup,
    Verdict,
    held,
    hints,
    phases,
)
from vramfit.plain import to_plain
from vramfit.report.rendering import json_values, to_json
from vramfit.trace import Category, Frame, OomReport, Run
from vramfit.trace.observed_program import ObservedProgram
from vramfit.trace.outcome import HostMemory, Progress

SCHEMA = "vramfit.run/1"
"""Name and version: the number grows when a key changes its meaning or goes away, not for new keys."""

_HOLDERS = 20


@json_values.register(Run)
def _json_values(run: Run, verdict: Verdict, against: Reconciliation | None = None) -> dict[str, Any]:
    """The whole report as values that `json` can write. Sizes are bytes, times are seconds unless the key
    says else.

    The keys at the top describe the card that decides (``device``); ``devices`` has all of them. ``against`` is what
    the run was compared with, None if it was not.
    """
    decisive = verdict.device
    breakdown = decisive.breakdown
    return {
        "schema": SCHEMA,
        "program": list(run.program),
        "exit_code": run.exit_code,
        "error": run.error,
        "source": run.source.value,
        "torch": run.torch_version,
        "platform": run.platform,
        "alloc_conf": str(run.trace.meta.get("alloc_conf", "")),
        "device": decisive.index,
        "gpu": {"name": decisive.gpu, "total_bytes": decisive.total},
        "fits": verdict.fits,
        "certain": verdict.certain,
        "close": verdict.close,
        "outcome": verdict.outcome.name.lower(),
        "end": run.progress.end.value,
        "steps": _steps(run.progress),
        "trains": _observed(run.observed),
        "remedies": None if run.remedies is None else to_json(run.remedies),
        "plan": None if run.plan is None else to_plain(run.plan),
        "assume": run.assume,
        "profile": _profile(run),
        "cudnn": _cudnn(run),
        "peak": peak_of(decisive),
        "outside_pytorch_bytes": decisive.context,
        "total_bytes": decisive.total,
        "host_pinned_peak_bytes": run.host_pinned_peak_bytes,
        "host_memory": None if run.host is None else _host(run.host),
        "headroom_bytes": decisive.headroom,
        "moment": moment_to_json(breakdown.moment),
        "categories": _categories(breakdown.categories),
        "requested_bytes": _categories(breakdown.requested),
        "fragmentation": _fragmentation(breakdown.fragmentation),
        "oom": None if run.oom is None else _oom(run.oom, verdict),
        "smallest_gpu": _smallest(verdict),
        "need": _need(run, verdict),
        "seconds_simulated": run.seconds_simulated,
        "seconds_wall": run.seconds_wall,
        "ops": run.ops,
        "warnings": to_plain(run.warnings),
        "hints": to_plain(hints(run, verdict)),
        "files": _files(run),
        "modules": _modules(breakdown.modules),
        "tensors": [group_to_json(group) for group in breakdown.tensors],
        "tensors_omitted": {"groups": breakdown.tensors_omitted[0], "bytes": breakdown.tensors_omitted[1]},
        "held": [held_to_json(one) for one in held(run.trace, decisive.index)],
        **_phases(run, verdict),
        "devices": [_device(device) for device in verdict.devices if device.index != NO_CARD],
        "against": None if against is None else to_json(against),
    }


def _profile(run: Run) -> dict[str, Any] | None:
    note = run.profile
    if note is None:
        return None
    return {
        "file": note.file or None,
        "gpu": note.gpu,
        "torch": note.torch,
        "date": note.date,
        "source": note.source,
        "calls_used": note.used,
    }


def _cudnn(run: Run) -> dict[str, Any] | None:
    note = run.cudnn
    if note is None:
        return None
    return {
        "version": note.version,
        "torch_has": note.torch_version,
        "card": note.card,
        "convolutions": note.convolutions,
        "attentions": note.attentions,
        "attention_by_rules": note.attention_by_rules or None,
    }


def _host(host: HostMemory) -> dict[str, Any]:
    return {
        "steps": list(host.steps),
        "bytes": list(host.bytes),
        "pinned_bytes": list(host.pinned),
        "grows_by_bytes": host.grows_by,
        "pinned_grows_by_bytes": host.pinned_grows_by,
        "sites": [
            {
                "file": site.file,
                "line": site.line,
                "bytes": list(site.bytes),
                "grows_by_bytes": host.per_step(site.bytes),
            }
            for site in host.sites
        ],
    }


def _observed(seen: ObservedProgram | None) -> dict[str, Any] | None:
    return to_plain(seen) if seen is not None and (seen.trains or seen.infers) else None


def _steps(progress: Progress) -> dict[str, Any]:
    return {
        "seen": progress.steps,
        "unit": None if progress.unit is None else progress.unit.value,
        "steady_for": progress.steady,
        "module": progress.module or None,
    }


def _files(run: Run) -> dict[str, Any] | None:
    changes = run.files
    if changes is None:
        return None
    return {
        "writes": changes.writes,
        "backend": changes.backend,
        "reason": changes.reason or None,
        "kept_at": changes.kept_at,
        "changes": [
            {"path": entry.path, "change": entry.kind.value, "size_bytes": entry.size_bytes}
            for entry in changes.entries
        ],
        "changes_omitted": changes.omitted,
        "notes": list(changes.notes),
    }


def peak_of(device: DeviceVerdict) -> dict[str, Any]:
    """Peaks of a card and their error bars."""
    return {
        "allocated_bytes": device.peak_allocated,
        "reserved_bytes": device.peak_reserved,
        "active_bytes": device.peak_active,
        "error": {"below_bytes": device.error_below, "above_bytes": device.error_above},
        "reserved_error": {
            "below_bytes": device.reserved_bar.below,
            "above_bytes": device.reserved_bar.above,
        },
        "used_error": {"below_bytes": device.below, "above_bytes": device.above},
    }


def _categories(categories: Mapping[Category, int]) -> dict[str, int]:
    return {kind.name.lower(): categories.get(kind, 0) for kind in (*list(Category)[1:], Category.OTHER)}


def moment_to_json(moment: Moment) -> dict[str, Any]:
    """A moment as ``moment`` of docs/json.md."""
    return {
        "event": moment.row,
        "time_us": moment.time_us,
        "phase": moment.phase or None,
        "op": moment.op or None,
        "line": frame_to_json(moment.line),
    }


def frame_to_json(frame: Frame | None) -> dict[str, Any] | None:
    """A source line, or null."""
    return None if frame is None else {"file": frame.filename, "line": frame.line, "function": frame.name}


def _fragmentation(fragments: Fragmentation) -> dict[str, Any]:
    return {
        "reserved_bytes": fragments.reserved,
        "occupied_bytes": fragments.occupied,
        "inactive_split_bytes": fragments.inactive_split,
        "releasable_bytes": fragments.releasable,
        "largest_free_bytes": fragments.largest_free,
        "slack_bytes": fragments.slack,
        "segments": fragments.segments,
        "ratio": round(fragments.ratio, 6),
    }


def _oom(oom: OomReport, verdict: Verdict) -> dict[str, Any]:
    """The request, the stack and the holders; the holders only where the run ended by it."""
    ended = verdict.moment is not None
    holders = [group_to_json(group) for group in verdict.device.breakdown.tensors[:_HOLDERS]] if ended else []
    return {
        "device": oom.device,
        "request": oom.requested_bytes,
        "free_bytes": oom.free_bytes,
        "short_by_bytes": verdict.short_by,
        "allocated_bytes": oom.allocated_bytes,
        "reserved_bytes": oom.reserved_bytes,
        "total_bytes": oom.total_bytes,
        "op": oom.op or None,
        "line": frame_to_json(oom.user_line),
        "stack": [frame_to_json(frame) for frame in oom.stack],
        "message": oom.message,
        "handled": oom.handled,
        "why": list(verdict.why),
        "advice": list(verdict.advice),
        "to_come": to_plain(oom.to_come),
        "dead_bytes": None if oom.dead is None else oom.dead.total_bytes,
        "dead": None if oom.dead is None else oom.dead.categories,
        "any_batch": verdict.any_batch if ended else None,
        "holders": holders,
    }


def _need(run: Run, verdict: Verdict) -> dict[str, Any] | None:
    need = verdict.need
    if need is None:
        return None
    second = None if run.again is None else run.again.run
    return {
        "bytes": need.bytes,
        "whole": need.whole,
        "why_not": need.why_not or None,
        "outside_pytorch_bytes": need.context,
        "peak_allocated_bytes": need.peak_allocated,
        "peak_reserved_bytes": need.peak_reserved,
        "error": {"below_bytes": need.below, "above_bytes": need.above},
        "garbage_collected": need.collected,
        "garbage_bytes": need.freed,
        "seconds_wall": None if second is None else second.seconds_wall,
    }


def _smallest(verdict: Verdict) -> dict[str, Any]:
    card = verdict.smallest_gpu
    return {
        "name": card.name if card else None,
        "total_bytes": card.total_bytes if card else None,
        "needed_bytes": verdict.needed,
        "at_least": verdict.need is not None and not verdict.need.whole,
    }


def _modules(tree: ModuleNode) -> list[dict[str, Any]]:
    """The tree as a list, parents before children; the first entry is the whole, with an empty path."""
    found = [
        {
            "path": tree.path,
            "total_bytes": tree.total_bytes,
            "own_bytes": tree.own_bytes,
            "categories": {kind.name.lower(): amount for kind, amount in tree.categories.items()},
        }
    ]
    for child in tree.children:
        found += _modules(child)
    return found


def group_to_json(group: TensorGroup) -> dict[str, Any]:
    """A group of tensors as an entry of ``tensors[]`` in docs/json.md."""
    return {
        "tensor": group.tensor or None,
        "op": group.op or None,
        "category": group.category.name.lower(),
        "module": group.module or None,
        "line": frame_to_json(group.line),
        "library_line": frame_to_json(group.library_line),
        "block_bytes": group.block_bytes,
        "count": group.count,
        "total_bytes": group.total_bytes,
    }


def held_to_json(held: HeldMemory) -> dict[str, Any]:
    """A holder as an entry of ``held[]`` in docs/json.md."""
    return {
        "name": held.name,
        "where": held.where or None,
        "root": held.root,
        "through": list(held.through),
        "chain": held.chain,
        "reason": held.reason.value,
        "moment": held.moment.value,
        "bytes": held.bytes,
        "count": held.count,
        "end_bytes": held.end_bytes,
        "line": frame_to_json(held.line),
        "op": held.op or None,
        "remedy": held.remedy,
    }


def _phases(run: Run, verdict: Verdict) -> dict[str, Any]:
    found, grown = phases(run.trace, verdict.device.index), verdict.growth
    return {
        "phases": [
            {
                "name": phase.name,
                "iteration": phase.iteration,
                "part": phase.part,
                "start_allocated_bytes": phase.start_allocated,
                "end_allocated_bytes": phase.end_allocated,
                "peak_allocated_bytes": phase.peak_allocated,
                "peak_reserved_bytes": phase.peak_reserved,
                "duration_us": phase.duration_us,
            }
            for phase in found
        ],
        "growth": {
            "iterations": list(grown.iterations),
            "end_allocated_bytes": list(grown.end_allocated),
            "least_allocated_bytes": list(grown.least_allocated),
            "bytes_per_iteration": grown.per_iteration,
            "evidence": grown.evidence.name.lower(),
            "rises": grown.rises,
            "last_rise_bytes": grown.last_rise,
            "runs_out_at_iteration": verdict.runs_out_at,
        },
        "kept": [_kept(one, verdict) for one in verdict.kept],
    }


def _kept(one: KeptMemory, verdict: Verdict) -> dict[str, Any]:
    """What a program keeps each time, as an entry of ``kept[]``."""
    place = one.place
    goes_on = verdict.fits is not False and verdict.device.total > 0
    return {
        "each": one.each.value,
        "every_steps": one.every or None,
        "unit": one.unit,
        "times": one.times,
        "bytes_each": one.bytes_each,
        "total_bytes": one.total_bytes,
        "stays": one.stays,
        "until": frame_to_json(one.until),
        "without_backward": one.graph,
        "evaluations": one.evaluations or None,
        "runs_out_at_evaluation": one.evaluation_at_end(verdict.device.headroom) if goes_on else None,
        "holder": one.holder,
        "line": frame_to_json(place.line) if place else None,
        "library_line": frame_to_json(place.library_line) if place else None,
        "module": (place.module or None) if place else None,
        "op": (place.op or None) if place else None,
        "tensor": (place.tensor or None) if place else None,
        "category": place.category.name.lower() if place else None,
        "stacks": one.places,
    }


def _device(device: DeviceVerdict) -> dict[str, Any]:
    return {
        "index": device.index,
        "gpu": {"name": device.gpu, "total_bytes": device.total},
        "peak": peak_of(device),
        "outside_pytorch_bytes": device.context,
        "headroom_bytes": device.headroom,
        "moment": moment_to_json(device.breakdown.moment),
        "categories": _categories(device.breakdown.categories),
        "requested_bytes": _categories(device.breakdown.requested),
        "fragmentation": _fragmentation(device.breakdown.fragmentation),
    }
