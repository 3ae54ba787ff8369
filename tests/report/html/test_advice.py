"""The advice on the page has words for whatever the analyses can say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from analysis.synthetic import fitting_run
from vramfit.analysis import LeakVerdict, leaks
from vramfit.report.html.advice import Advice, leaks_html


@pytest.mark.parametrize("verdict", LeakVerdict)
def test_every_verdict_on_leaks_has_words(verdict: LeakVerdict) -> None:
    found = replace(leaks(fitting_run().trace), verdict=verdict)
    text = str(leaks_html(Advice(causes=None, tuning=None, leaks=found), root=None))
    assert text.startswith("<p")
    others = {other for other in LeakVerdict if other is not verdict}
    for other in others:
        again = replace(found, verdict=other)
        assert str(leaks_html(Advice(causes=None, tuning=None, leaks=again), root=None)) != text
