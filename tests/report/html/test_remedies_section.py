"""What was tried stands on the page of a run."""

from __future__ import annotations

from vramfit.report import render
from vramfit.report.html.remedies_section import remedies_html
from vramfit.trace.tried_remedies import TriedRemedies, TriedRemedy

GIB = 1 << 30
PLAIN = TriedRemedy(
    name="the program as it is", total_bytes=8 * GIB, fits=False, step_seconds=1.0, plain_step_seconds=1.0
)
AUTOCAST = TriedRemedy(
    name="autocast in bf16",
    how=('Trainer(precision="bf16-mixed")',),
    changes="8 bits of precision",
    total_bytes=4 * GIB,
    fits=True,
    step_seconds=0.5,
    plain_step_seconds=1.0,
)


def test_rows_conclusion_and_ways_are_there_and_escaped() -> None:
    page = str(remedies_html(TriedRemedies(rows=(PLAIN, AUTOCAST), cheapest=1)))
    assert "Cheapest that fits: autocast in bf16, its step takes 0.50 times as long" in page
    assert "4.00 GiB" in page and "8 bits of precision" in page
    assert "<code>Trainer(precision=&quot;bf16-mixed&quot;)</code>" in page


def test_nothing_is_there_where_nothing_was_tried() -> None:
    assert str(remedies_html(None)) == ""
    assert "No remedy was tried: it was interrupted." in str(
        remedies_html(TriedRemedies(why_not="it was interrupted"))
    )


def test_a_table_in_the_terminal_says_what_there_was_no_time_for() -> None:
    text = render(TriedRemedies(rows=(PLAIN,), cut=True, seconds=60.0))
    assert "None of these makes it fit so far." in text
    assert "There was no time for more after 60.00 s: --remedies SECONDS gives it." in " ".join(text.split())
    fits = render(TriedRemedies(rows=(AUTOCAST,)))
    assert "It fits as it is; what makes most room: autocast in bf16." in fits
