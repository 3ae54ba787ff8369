"""What the gates of `vramfit check` found, as text for the terminal and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from vramfit.analysis import Bound, Gate, PeakState, Quantity, TraceDiff
from vramfit.report.diff import DiffLines
from vramfit.report.rendering import json_values, printed_as_page, to_json
from vramfit.report.sections import Sections
from vramfit.report.text import ending_words, relative
from vramfit.trace import OomReport
from vramfit.trace.outcome import UNTOLD, Progress
from vramfit.units import format_bytes

CHECK_SCHEMA = "vramfit.check/1"
"""Name and version: the number grows when a key changes its meaning or goes away, not for new keys."""

QUANTITY_WORDS = {
    Quantity.TOTAL: "use",
    Quantity.RESERVED: "reserved",
    Quantity.ALLOCATED: "allocated",
}
"""What a figure is, after "peak"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What `vramfit check` found.

    Attributes:
        target: the program or file.
        diffs: how the run differs from the baseline, device by device; empty without one.
        progress: how far a program came that was run for it.
        states: what each device held at its peak.
        oom: the request that did not fit, if there was one.
    """

    target: str
    gates: Sequence[Gate]
    diffs: Sequence[TraceDiff] = ()
    progress: Progress = UNTOLD
    states: Sequence[PeakState] = ()
    oom: OomReport | None = None

    @property
    def passed(self) -> bool:
        """Whether every requirement is met."""
        return all(gate.passed for gate in self.gates)


@printed_as_page(Check)
class _CheckReport(Sections):
    def lines(self, check: Check) -> Iterator[Text]:
        """The verdict, each gate, and the difference from the baseline if that is what failed."""
        if check.gates:
            mark = ("✓ passed ", "bold green") if check.passed else ("✗ failed ", "bold red")
            ending = ending_words(check.progress)
            yield from self.wrapped(Text.assemble(mark, (check.target, "bold"), ending))
        devices = {gate.device for gate in check.gates}
        for gate in check.gates:
            yield from self.gate(gate, len(devices) > 1)
        if any(gate.bound is Bound.BASELINE and not gate.passed for gate in check.gates):
            yield Text()
            yield from DiffLines(self.width, self.root).lines(check.diffs)

    def gate(self, gate: Gate, several: bool) -> Iterator[Text]:
        """One requirement."""
        mark = ("  ✓ ", "green") if gate.passed else ("  ✗ ", "red")
        where = f"GPU {gate.device}: " if several else ""
        yield from self.wrapped(Text.assemble(mark, where, gate_words(gate)), indent=4)
        if gate.note and gate.bound not in (Bound.CARD, Bound.USED):
            yield from self.wrapped(Text(f"    {gate.note}", style="yellow"), indent=4)


def gate_words(gate: Gate) -> str:
    """What was measured and what it is held to, without the device: ``peak use 21.00 GiB (budget 20.00 GiB): …``."""
    if gate.bound in (Bound.CARD, Bound.USED):
        return gate.note
    amount = f"peak {QUANTITY_WORDS[gate.quantity]} {format_bytes(gate.actual)}"
    if gate.bound is Bound.BUDGET:
        against = f"budget {format_bytes(gate.limit)}"
    else:
        before = gate.baseline or 0
        more = gate.actual - before
        share = f", {relative(more / before)}" if before and more else ""
        against = f"baseline {format_bytes(before)}{share}, limit {format_bytes(gate.limit)}"
    over = f": {format_bytes(gate.over)} over" if gate.over else ""
    return f"{amount} ({against}){over}"


@json_values.register(Check)
def _json_values(check: Check) -> dict[str, Any]:
    """The same as values that `json` can write; docs/json.md describes them. Sizes are bytes."""
    return {
        "schema": CHECK_SCHEMA,
        "target": check.target,
        "passed": check.passed,
        "end": check.progress.end.value,
        "gates": [
            {
                "bound": gate.bound.value,
                "device": gate.device,
                "quantity": gate.quantity.value,
                "actual_bytes": gate.actual,
                "limit_bytes": gate.limit or None,
                "baseline_bytes": gate.baseline,
                "over_bytes": gate.over,
                "passed": gate.passed,
                "note": gate.note or None,
            }
            for gate in check.gates
        ],
        "diff": to_json(check.diffs) if check.diffs else None,
    }
