"""What `vramfit check` found, for continuous integration: annotations and a step summary of GitHub Actions, JUnit XML.

The form of annotations and its escaping are those of ``@actions/core`` (github.com/actions/toolkit,
packages/core/src/command.ts); docs.github.com describes them as "Workflow commands for GitHub Actions". The XML is what
pytest writes and Jenkins' xUnit plugin reads (jenkinsci/xunit-plugin, junit-10.xsd).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from vramfit.analysis import NAMES, Bound, Change, Gate, PeakState, TraceDiff, short_location
from vramfit.report.check import QUANTITY_WORDS, Check, gate_words
from vramfit.report.rendering import render
from vramfit.report.text import ending_words, percent, signed
from vramfit.trace import Frame
from vramfit.units import format_bytes

_TITLES = {
    Bound.BUDGET: "GPU memory over its budget",
    Bound.BASELINE: "GPU memory above its baseline",
    Bound.CARD: "GPU out of memory",
    Bound.USED: "GPU not used",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnnotationPlace:
    """A line of the program, and what it has to do with a gate."""

    frame: Frame
    reason: str


def sentence_of(check: Check, gate: Gate) -> str:
    """What was measured and what it is held to, with the device where there are several."""
    several = len({one.device for one in check.gates}) > 1
    return f"{check.target}: {f'GPU {gate.device}: ' if several else ''}{gate_words(gate)}"


def place_of(check: Check, gate: Gate) -> AnnotationPlace | None:
    """Where a reader should look first; None where no line is known.

    A run that ran out asked for memory there; more than a baseline comes from the line that grew most, and more than a
    budget from the line that holds most at the peak.
    """
    if gate.bound is Bound.CARD:
        oom = check.oom
        if oom is None or oom.device != gate.device or oom.user_line is None:
            return _largest(check.states, gate.device)
        return AnnotationPlace(
            frame=oom.user_line, reason=f"{format_bytes(oom.requested_bytes)} were asked for here"
        )
    if gate.bound is Bound.BASELINE and (grown := _grown(check.diffs, gate.device)) is not None:
        return grown
    return _largest(check.states, gate.device)


def _grown(diffs: Sequence[TraceDiff], device: int) -> AnnotationPlace | None:
    sums: dict[Frame, int] = {}
    for one in diffs:
        if one.after.device != device:
            continue
        for change in one.changes:
            if change.change in (Change.NEW, Change.GREW) and change.line_after is not None:
                sums[change.line_after] = sums.get(change.line_after, 0) + change.size.difference
    return _most(sums, "what this line makes grew most, by {}")


def _largest(states: Sequence[PeakState], device: int) -> AnnotationPlace | None:
    sums: dict[Frame, int] = {}
    for state in states:
        if state.device == device:
            for holding in state.holdings:
                if holding.line is not None:
                    sums[holding.line] = sums.get(holding.line, 0) + holding.total_bytes
    return _most(sums, "what this line makes holds most at the peak, {}")


def _most(sums: dict[Frame, int], reason: str) -> AnnotationPlace | None:
    """The line with the most bytes, with a reason that names them; None where there is no line."""
    if not sums:
        return None
    line = max(sums, key=lambda frame: sums[frame])
    return AnnotationPlace(frame=line, reason=reason.format(format_bytes(sums[line])))


class Level(Enum):
    """How GitHub shows an annotation."""

    ERROR = "error"
    NOTICE = "notice"


@dataclass(frozen=True, kw_only=True, slots=True)
class Annotation:
    """One message.

    Attributes:
        message: the rest; it may have several lines.
        file: a file of the repository, relative to its root; empty where none is known.
        line: of the file, from 1; 0 for the file as a whole.
    """

    level: Level
    title: str
    message: str
    file: str = ""
    line: int = 0

    def command(self) -> str:
        """The line that the runner reads, without its end."""
        given = {
            "title": self.title,
            "file": self.file,
            "line": str(self.line) if self.file and self.line else "",
        }
        properties = ",".join(f"{name}={_property(value)}" for name, value in given.items() if value)
        return f"::{self.level.value} {properties}::{_data(self.message)}"


def annotations_of(check: Check, *, repository: Path) -> Iterator[Annotation]:
    """An error for each gate that failed, and a notice where a baseline could be lowered.

    Args:
        repository: its root; files outside of it are named in the message instead.
    """
    for gate in check.gates:
        if not gate.passed:
            place = place_of(check, gate)
            message = sentence_of(check, gate)
            file, line = ("", 0) if place is None else _within(place.frame, repository)
            if place is not None:
                where = "" if file else f" ({short_location(place.frame)})"
                message = f"{message}\n{place.reason[0].upper()}{place.reason[1:]}{where}."
            yield Annotation(
                level=Level.ERROR, title=_TITLES[gate.bound], message=message, file=file, line=line
            )
        elif gate.bound is Bound.BASELINE and gate.note:
            yield Annotation(
                level=Level.NOTICE,
                title="GPU memory below its baseline",
                message=f"{sentence_of(check, gate)}\n{gate.note[0].upper()}{gate.note[1:]}.",
            )


def failure_annotation(target: str, reason: str) -> Annotation:
    """An error for a target that could not be checked."""
    return Annotation(level=Level.ERROR, title="GPU memory not checked", message=f"{target}: {reason}")


def _within(frame: Frame, repository: Path) -> tuple[str, int]:
    """The file as GitHub wants it, and the line; nothing for a file that is not in the repository."""
    for name, root in (
        (os.path.abspath(frame.filename), os.path.abspath(repository)),
        (os.path.realpath(frame.filename), os.path.realpath(repository)),
    ):
        if name.startswith(root.rstrip(os.sep) + os.sep) and Path(name).is_file():
            return Path(os.path.relpath(name, root)).as_posix(), frame.line
    return "", 0


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_ROWS = 10
"""Lines of the program that a table lists: a summary is read at a glance, the page has the rest."""

_PUNCTUATION = re.compile(r"([\\`*_{}\[\]<>#|~&$])")
"""What GitHub's Markdown may take for more than itself within a line."""


def render_summary(check: Check, *, root: Path | None = None) -> str:
    """The Markdown, with an empty line at its end, so that several can follow each other."""
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
        rows = [(place, signed(size), word) for (place, word), size in _by_change(one, root)[:_ROWS]]
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


_CLASS = "vramfit.check"

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write (its production "Char"): control characters, and halves of pairs."""


def render_junit(check: Check, *, seconds: float = 0.0) -> str:
    """The XML of what the gates found.

    Args:
        seconds: duration of the run; 0 where a file was checked.
    """
    suite = Element("testsuite", {"name": "vramfit check"})
    _case(suite, f"{check.target}: runs", seconds)
    told = render(check)
    for gate in check.gates:
        case = _case(suite, f"{check.target}: {_name(gate)}", 0.0)
        _figures(case, gate)
        if not gate.passed:
            failure = SubElement(
                case, "failure", {"type": gate.bound.value, "message": _clean(gate_words(gate))}
            )
            failure.text = _clean(told)
    return _document(suite, seconds)


def render_junit_failure(target: str, reason: str) -> str:
    """The XML of a target that could not be checked: an error rather than a failed gate."""
    suite = Element("testsuite", {"name": "vramfit check"})
    case = _case(suite, f"{target}: runs", 0.0)
    SubElement(case, "error", {"type": "not checked", "message": _clean(reason)})
    return _document(suite, 0.0)


def _name(gate: Gate) -> str:
    """A name that stays the same from run to run, so that its history can be followed."""
    if gate.bound is Bound.USED:
        return "uses the card"
    if gate.bound is Bound.CARD:
        return f"fits GPU {gate.device}"
    return f"peak {QUANTITY_WORDS[gate.quantity]} of GPU {gate.device} within its {gate.bound.value}"


def _case(suite: Element, name: str, seconds: float) -> Element:
    return SubElement(
        suite, "testcase", {"classname": _CLASS, "name": _clean(name), "time": f"{seconds:.3f}"}
    )


def _figures(case: Element, gate: Gate) -> None:
    """The exact bytes, as pytest writes properties of a test."""
    if gate.bound in (Bound.USED, Bound.CARD):
        return
    properties = SubElement(case, "properties")
    for name, value in (
        ("actual_bytes", gate.actual),
        ("limit_bytes", gate.limit),
        ("baseline_bytes", gate.baseline),
    ):
        if value is not None:
            SubElement(properties, "property", {"name": name, "value": str(value)})


def _document(suite: Element, seconds: float) -> str:
    counts = {
        "tests": str(len(suite.findall("testcase"))),
        "failures": str(len(suite.findall("testcase/failure"))),
        "errors": str(len(suite.findall("testcase/error"))),
        "skipped": "0",
        "time": f"{seconds:.3f}",
    }
    suite.attrib.update(counts)
    suites = Element("testsuites", {"name": "vramfit check", **counts})
    suites.append(suite)
    ElementTree.indent(suites)
    text = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)
