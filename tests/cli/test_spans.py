"""Spans of time on the command line: what is none is refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cli.conftest import Invocation


@pytest.mark.parametrize("given", ["inf", "1e30", "1e99999"])
@pytest.mark.parametrize(
    "line",
    [
        "doctor --timeout",
        "calibrate --gpu H200 --minutes",
        "plan w.py:w --gpu H200 --time-limit",
        "plan w.py:w --gpu H200 --search-seconds",
        "verify plan.toml --seconds",
    ],
)
def test_a_span_without_bounds_is_refused(vramfit: Callable[..., Invocation], line: str, given: str) -> None:
    found = vramfit(*line.split(), given)
    assert found.code == 2
    assert "is not a span of time" in " ".join(found.err.split())
    assert "Traceback" not in found.err
