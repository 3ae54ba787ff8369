"""The Markdown of a step summary of GitHub Actions: the gates, and where the bytes are where one failed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vramfit.analysis import NAMES, Bound, Change, Gate, PeakState, TraceDiff, short_location
from vramfit.report.check import QUANTITY_WORDS, Check
from vramfit.report.run_words import ending_words
from vramfit.report.text import percent
from vramfit.trace import Frame
from vramfit.units import format_bytes

_ROWS = 10
"""Lines of the program that a table names: a summary is read at a glance, the page tells the rest."""

_PUNCTUATION = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
"""What GitHub's Markdown may take for more than itself within a line."""


def render_summary(check: Check, *, root: Path | None = None) -> str:
    """The Markdown, with an empty line at its end, so that several can follow each other.

    Args:
        check: what was found.
        root: the user's folder; file names below it are shown relative to it.
    """
    mark = "✓" if check.passed else "✗"
    title = f"### {mark} GPU memory: {_escaped(check.target + ending_words(check.progress))}"
    lines = [title, ""]
    lines += _gates(check)
    if not check.passed:
        lines += _holdings(check, root)
        lines += _changes(check, root)
    return "\n".join([*lines, ""])


def render_failure_summary(target: str, reason: str) -> str:
    """The same for a target that could not be checked."""
    return f"### ✗ GPU memory: {_escaped(target)}\n\nNot checked: {_escaped(reason)}\n\n"


def _gates(check: Check) -> Iterator[str]:
    if not check.gates:
        yield "It was measured; no limit was given."
        yield ""
        return
    rows = [_gate(gate, check) for gate in check.gates]
    yield from _table(("", "GPU", "peak", "measured", "limit", "over"), rows, right=(3, 4, 5))
    yield ""
    for note in dict.fromkeys(gate.note for gate in check.gates if gate.note):
        yield f"{_escaped(note[0].upper() + note[1:])}."
        yield ""


def _gate(gate: Gate, check: Check) -> tuple[str, ...]:
    card = next((state.gpu for state in check.states if state.device == gate.device), "")
    gpu = f"{gate.device} ({card})" if card else f"{gate.device}"
    mark = "✓" if gate.passed else "✗"
    if gate.bound is Bound.USED:
        return mark, gpu, "", "not used", "", ""
    if gate.bound is Bound.CARD:
        return (
            mark,
            gpu,
            QUANTITY_WORDS[gate.quantity],
            f"more than {format_bytes(gate.actual)}",
            "the card",
            "",
        )
    if gate.bound is Bound.BUDGET:
        limit = f"{format_bytes(gate.limit)} (budget)"
    else:
        limit = f"{format_bytes(gate.limit)} (baseline {format_bytes(gate.baseline or 0)})"
    over = format_bytes(gate.over) if gate.over else ""
    return mark, gpu, QUANTITY_WORDS[gate.quantity], format_bytes(gate.actual), limit, over


def _holdings(check: Check, root: Path | None) -> Iterator[str]:
    """Where the bytes are on each device that is over a budget or ran out."""
    failed = {gate.device for gate in check.gates if not gate.passed and gate.bound is not Bound.BASELINE}
    for state in check.states:
        if state.device not in failed or not state.detailed:
            continue
        held = sum(state.categories.values())
        when = "when it ran out" if state.ran_out else "at the peak"
        yield f"**GPU {state.device} {when}**: {format_bytes(held)} allocated"
        yield ""
        rows: list[Sequence[str]] = [
            (NAMES[kind], format_bytes(size), percent(size, held))
            for kind, size in state.categories.items()
            if size
        ]
        yield from _table(("", "bytes", "share"), rows, right=(1, 2))
        yield ""
        rows = [
            (place, format_bytes(size), category) for (place, category), size in _by_line(state, root)[:_ROWS]
        ]
        yield from _table(("line", "bytes", "largest part"), rows, right=(1,))
        yield ""


def _by_line(state: PeakState, root: Path | None) -> list[tuple[tuple[str, str], int]]:
    """What each line of the program holds, most first, with what it mostly is."""
    sums: dict[Frame, dict[str, int]] = {}
    for holding in state.holdings:
        if holding.line is not None:
            kinds = sums.setdefault(holding.line, {})
            name = NAMES[holding.category]
            kinds[name] = kinds.get(name, 0) + holding.total_bytes
    found = [
        ((short_location(line, root=root), max(kinds, key=lambda kind: kinds[kind])), sum(kinds.values()))
        for line, kinds in sums.items()
    ]
    return sorted(found, key=lambda one: -one[1])


def _changes(check: Check, root: Path | None) -> Iterator[str]:
    """What changed since the baseline, where that is what failed."""
    failed = {gate.device for gate in check.gates if not gate.passed and gate.bound is Bound.BASELINE}
    for one in check.diffs:
        if one.after.device not in failed or not one.detailed or not one.changes:
            continue
        yield f"**What changed on GPU {one.after.device}**"
        yield ""
        rows = [(place, _signed(size), word) for (place, word), size in _by_change(one, root)[:_ROWS]]
        yield from _table(("line", "difference", ""), rows, right=(1,))
        yield ""


def _by_change(found: TraceDiff, root: Path | None) -> list[tuple[tuple[str, str], int]]:
    words = {Change.NEW: "new", Change.GREW: "more", Change.SHRANK: "less", Change.GONE: "gone"}
    sums: dict[tuple[str, str], int] = {}
    for change in found.changes:
        place = short_location(change.line_after or change.line_before, root=root) or change.module or "?"
        key = place, words[change.change]
        sums[key] = sums.get(key, 0) + change.size.difference
    return sorted(sums.items(), key=lambda one: -abs(one[1]))


def _signed(size: int) -> str:
    return f"+{format_bytes(size)}" if size > 0 else format_bytes(size)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int]) -> Iterator[str]:
    yield _row(heads)
    yield _row(("--:" if column in right else "---" for column in range(len(heads))), escape=False)
    for row in rows:
        yield _row(row)


def _row(cells: Iterable[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(_escaped(cell) if escape else cell for cell in cells)} |"


def _escaped(text: str) -> str:
    """Text in one line that Markdown shows as it is: a backslash before all that it might take for more."""
    return _PUNCTUATION.sub(r"\\\1", " ".join(text.split()))
