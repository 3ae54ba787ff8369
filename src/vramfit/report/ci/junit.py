"""JUnit XML, which most systems of continuous integration read: one test case for the run and one for each gate.

The form is what pytest writes and Jenkins' xUnit plugin reads (jenkinsci/xunit-plugin, junit-10.xsd).
"""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from vramfit.analysis import Bound, Gate
from vramfit.report.check import QUANTITY_WORDS, Check, gate_words
from vramfit.report.rendering import render

_CLASS = "vramfit.check"

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 has no way to write (its production "Char"): control characters, and halves of pairs."""


def render_junit(check: Check, *, seconds: float = 0.0) -> str:
    """The XML of what the gates found.

    Args:
        check: what was found.
        seconds: that the run took; 0 where a file was checked.
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
    """The XML of a target that could not be checked: an error, which is no failed gate."""
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
