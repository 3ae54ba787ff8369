"""What no technique can change, looked at before any is tried: the context, and parameters that have to stay."""

from __future__ import annotations

from vramfit.planner.frames import Frames
from vramfit.planner.plan import Aim, Figures, Plan
from vramfit.planner.request import NothingFits
from vramfit.techniques import find_technique
from vramfit.units import format_bytes

_LIGHTER = ("parameter-offload", "low-precision-training", "parameter-sharing")
"""Techniques with which parameters take less of the device."""


def check_hope(frames: Frames) -> None:
    """Make sure that the budget has room for what every plan of this request takes.

    Raises:
        NothingFits: it has none; the plan is that without techniques.
    """
    request, plain = frames.request, frames.plain
    context = plain.profile.outside_bytes
    parameters = sum(one.numel() * one.element_size() for one in plain.profile.model.parameters())
    lighter = any(
        request.may(technique) and technique.numerics <= request.numerics
        for technique in map(find_technique, _LIGHTER)
    )
    limit = format_bytes(request.limit)
    if context >= request.limit:
        message = f"nothing fits {limit}: the CUDA context alone takes {format_bytes(context)}"
        hint = "Give a larger budget: the context counts"
    elif not lighter and context + parameters > request.limit:
        beside = f", and the CUDA context {format_bytes(context)}" if context else ""
        message = f"nothing fits {limit}: the parameters alone take {format_bytes(parameters)}{beside}"
        hint = (
            "Allow parameter-offload or lower precision, take a larger card, or shard the model over several"
        )
    else:
        return
    profile = plain.profile
    figures = Figures(
        peak_allocated_bytes=profile.peak_allocated_bytes,
        peak_reserved_bytes=profile.peak_reserved_bytes,
        total_bytes=profile.peak_reserved_bytes + context,
        host_bytes=profile.host_peak_bytes,
        step_seconds=plain.observation.seconds,
        step_flops=plain.observation.flops,
    )
    aim = Aim(
        device=frames.device.name,
        budget_bytes=request.budget_bytes,
        margin_bytes=request.margin_bytes,
        host_budget_bytes=request.host_bytes,
        numerics=request.numerics,
        objective=request.objective,
        sizes=dict(request.sizes),
        target=request.target,
    )
    raise NothingFits(message, hint, Plan(entries=(), aim=aim, before=figures, after=figures))
