"""What `vramfit verify` found: in the terminal and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from vramfit.planner.verification import GradientCheck, Measured, Simulated, Verification, plain_values
from vramfit.report.folding import broken, table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.report.text import seconds
from vramfit.units import counted, format_bytes

VERIFY_SCHEMA = "vramfit.verify/1"


@printed_as_lines(Verification)
def _lines(found: Verification, width: int) -> Iterator[Text]:
    """What was held against what, and whether it holds."""
    if found.simulated is not None:
        yield from _memory(found.simulated, width)
        yield Text()
    if found.measured is not None:
        yield from _measured(found.measured, width)
        yield Text()
    for sentence in _values(found):
        yield from broken(sentence, width)
    for note in found.notes:
        yield from broken(Text(f"  {note}", style="dim"), width)


def _memory(found: Simulated, width: int) -> Iterator[Text]:
    after, limit = found.after.total_bytes, found.limit_bytes
    change = after - found.planned.total_bytes
    more = "more" if change > 0 else "less"
    planned = f"{format_bytes(abs(change))} {more} than planned" if change else "as planned"
    yield from broken(
        Text.assemble(
            _mark(found.passes),
            ("memory ", "bold"),
            f"{format_bytes(after)} of {format_bytes(limit)}, {planned}",
        ),
        width,
    )
    rows = [
        [
            Text(name),
            Text(format_bytes(one.total_bytes)),
            Text(format_bytes(one.peak_reserved_bytes)),
            Text(format_bytes(one.peak_allocated_bytes)),
            Text(seconds(one.step_seconds) if one.step_seconds else ""),
        ]
        for name, one in (("  before", found.before), ("  after", found.after))
    ]
    yield from table(("", "total", "reserved", "allocated", "step (est.)"), rows, width)


def _measured(found: Measured, width: int) -> Iterator[Text]:
    """Measured on the card, and how far the plan was off."""
    after, limit = found.after.figures, found.limit_bytes
    if after.step_seconds:
        change = f"{found.peak_error:+.1%} of the planned reserved bytes"
        told = f"{format_bytes(after.total_bytes)} of {format_bytes(limit)}, {change}"
        if found.planned.step_seconds:
            told += f"; step {seconds(after.step_seconds)}, {seconds(found.planned.step_seconds)} planned"
    else:
        told = f"does not fit the card: {found.after.oom}"
    yield from broken(
        Text.assemble(_mark(found.passes), ("measured ", "bold"), f"on {found.card}: {told}"), width
    )
    rows = [
        [
            Text(name),
            Text(format_bytes(one.figures.total_bytes) if one.ended else ""),
            Text(format_bytes(one.figures.peak_reserved_bytes) if one.ended else ""),
            Text(format_bytes(one.figures.peak_allocated_bytes) if one.ended else ""),
            Text(seconds(one.figures.step_seconds) if one.ended else "out of memory"),
        ]
        for name, one in (("  before", found.before), ("  after", found.after))
    ]
    yield from table(("", "total", "reserved", "allocated", "step"), rows, width)
    if found.left_bytes:
        yield from broken(
            Text(
                f"  {format_bytes(found.left_bytes)} of tensors outlived their run: the workload holds them outside "
                "its model",
                style="dim",
            ),
            width,
        )


def _states(one: GradientCheck) -> str:
    """What the step writes beside gradients."""
    count = counted(one.states, "value")
    if not one.state:
        return f"{count} that the step writes beside them as promised"
    by = "altogether" if math.isinf(one.state_error) else f"by {one.state_error:.2g} of its norm"
    return f"of {count} that the step writes beside them {one.state} differs {by}"


def _values(found: Verification) -> Iterator[Text]:
    sizes = ", ".join(f"{name} {value:,}" for name, value in found.sizes.items())
    if found.skipped:
        yield Text(f"values were not compared: {found.skipped}", style="dim")
    if found.gradients is not None:
        one = found.gradients
        told = f"{one.equal} of {one.parameters} equal bit for bit"
        if one.worst_name:
            told += f"; {_compared(one)}"
        if one.allowed:
            told += f", {one.allowed:g} promised"
        if one.states:
            told += f"; {_states(one)}"
        yield Text.assemble(
            _mark(one.passes),
            ("gradients ", "bold"),
            f"({found.numerics.value}) on the CPU at {sizes}: {told}",
        )
    if found.losses is not None and found.losses.plain:
        one_curve = found.losses
        yield Text.assemble(
            _mark(one_curve.passes),
            ("losses ", "bold"),
            f"of {len(one_curve.plain)} steps: from {one_curve.plain[0]:.4g} to {one_curve.plain[-1]:.4g} plain, "
            f"to {one_curve.planned[-1]:.4g} with the plan",
        )
    if found.outputs is not None:
        told = f"{found.outputs.equal} of {found.outputs.outputs} equal bit for bit"
        if found.outputs.equal < found.outputs.outputs:
            told += f"; the most that one differs: {found.outputs.worst:.2g} of its norm"
            told += f", {found.outputs.largest:.2g} of its largest value"
            told += f" ({found.outputs.worst_name})" if found.outputs.worst_name else ""
        if found.outputs.allowed:
            told += f", {found.outputs.allowed:g} promised"
        yield Text.assemble(
            _mark(found.outputs.passes),
            ("outputs ", "bold"),
            f"({found.numerics.value}) on the CPU at {sizes}: {told}",
        )


def _compared(one: GradientCheck) -> str:
    """The largest difference, and what it was measured against."""
    if one.tiny:
        return (
            f"the most that one differs: by {one.difference:.2g} ({one.worst_name}, a gradient of {one.norm:.2g} that "
            f"is rounding beside the largest of {one.largest_norm:.2g}: {one.worst:.2g} of that scale)"
        )
    return (
        f"the most that one differs: {one.worst:.2g} of its norm ({one.worst_name}, {one.difference:.2g} of "
        f"{one.norm:.2g})"
    )


def _mark(passes: bool) -> tuple[str, str]:
    return ("✓ ", "bold green") if passes else ("✗ ", "bold red")


@json_values.register(Verification)
def _json_values(found: Verification) -> dict[str, Any]:
    """The same as plain values; docs/json.md describes them."""
    return {"schema": VERIFY_SCHEMA, **plain_values(found)}
