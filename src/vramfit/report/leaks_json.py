"""What grows from step to step, as values for JSON; docs/json.md describes them."""

from __future__ import annotations

from typing import Any

from vramfit.analysis import GrowingStack, LeakPlace, LeakReport
from vramfit.report.json_report import frame_to_json


def leaks_to_json(report: LeakReport) -> dict[str, Any]:
    """The report as values that `json` can write. Sizes are bytes."""
    return {
        "device": report.device,
        "verdict": report.verdict.name.lower(),
        "leaks": report.leaks,
        "steps": {
            "source": report.steps.source.value,
            "unit": report.steps.unit,
            "count": max(0, len(report.steps) - 1),
            "warmup": report.warmup,
            "least": report.least_steps,
        },
        "alpha": report.alpha,
        "p_value": report.p_value,
        "stacks_tested": report.tested,
        "bytes_per_step": report.bytes_per_step,
        "levels": list(report.levels),
        "growing": [_growing(stack) for stack in report.growing],
        "settled": [
            {**_place(one.place), "grown_bytes": one.grown_bytes, "last_step": one.last_step}
            for one in report.settled
        ],
        "sawteeth": [
            {**_place(one.place), "most_bytes": one.most_bytes, "times": one.times, "steps": one.steps}
            for one in report.sawteeth
        ],
    }


def _growing(stack: GrowingStack) -> dict[str, Any]:
    return {
        **_place(stack.place),
        "bytes_per_step": stack.bytes_per_step,
        "requested_per_step": stack.requested_per_step,
        "grown_bytes": stack.grown_bytes,
        "blocks": stack.blocks,
        "first_step": stack.first_step,
        "p_value": stack.p_value,
        "adjusted_p": stack.adjusted_p,
        "release": stack.release.name.lower(),
        "owners": [
            {
                "root": owner.root.value,
                "text": owner.text,
                "through": sorted(kind.value for kind in owner.through),
                "cycle": list(owner.cycle),
            }
            for owner in stack.owners
        ],
    }


def _place(place: LeakPlace) -> dict[str, Any]:
    return {
        "line": frame_to_json(place.line),
        "library_line": frame_to_json(place.library_line),
        "stack": [frame_to_json(frame) for frame in place.frames],
        "category": place.category.name.lower(),
        "op": place.op or None,
        "module": place.module or None,
        "tensor": place.tensor or None,
    }
