"""The advice on the page has words for whatever the analyses can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from analysis import fragmentation_cases as cases
from analysis.synthetic import fitting_run, no_room_run
from vramfit.analysis import LeakVerdict, causes, leaks
from vramfit.report.fragmentation import answer_text, remedy_text, verdict_text
from vramfit.report.html.advice import Advice, fragmentation_advice, leaks_html
from vramfit.trace import MemoryTrace


@pytest.mark.parametrize("verdict", LeakVerdict)
def test_every_verdict_on_leaks_has_words(verdict: LeakVerdict) -> None:
    found = replace(leaks(fitting_run().trace), verdict=verdict)
    text = str(leaks_html(Advice(causes=None, tuning=None, leaks=found), root=None))
    assert text.startswith("<p")
    others = {other for other in LeakVerdict if other is not verdict}
    for other in others:
        again = replace(found, verdict=other)
        assert str(leaks_html(Advice(causes=None, tuning=None, leaks=again), root=None)) != text


def test_remedies_are_told_as_in_the_terminal() -> None:
    found = causes(cases.many_sizes())
    remedies = [remedy for cause in found.causes for remedy in cause.remedies]
    assert {remedy.helps for remedy in remedies} == {True, False, None}
    text = str(fragmentation_advice(Advice(causes=found, tuning=None, leaks=None), root=None))
    for remedy in remedies:
        quiet = ' class="quiet"' if remedy.helps is False else ""
        printed = f"<div{quiet}>{remedy_text(remedy)}</div>" in text
        assert printed is (remedy.helps is not None)
    assert "no help, peak reserved" in text
    assert "what helps" not in text


@pytest.mark.parametrize(
    "make", [cases.oom_of_alternating_blocks, cases.oom_of_rounding, lambda: no_room_run().trace]
)
def test_what_would_have_served_a_request_is_told_as_in_the_terminal(make: Callable[[], MemoryTrace]) -> None:
    found = causes(make())
    assert found.oom is not None
    text = str(fragmentation_advice(Advice(causes=found, tuning=None, leaks=None), root=None))
    assert verdict_text(found.oom) in text
    for answer in found.oom.answers:
        assert answer_text(answer) in text
