import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from analysis import fragmentation_cases as cases
from vramfit.analysis import CauseKind, Remedy, RemedyKind, causes
from vramfit.cli import app
from vramfit.report import render, to_json
from vramfit.report.fragmentation import remedy_text
from vramfit.trace import MemoryTrace
from vramfit.units import MIB

RECORDINGS = Path(__file__).parents[1] / "data" / "traces"


def test_a_case_is_told_with_its_story() -> None:
    found = causes(cases.checkpoint_in_a_step())
    text = render(found, width=100, root=Path("/home/ada"))
    assert text.startswith(
        "Reserved but not asked for: 40.00 MiB of 1.29 GiB (3.0 %) at step 2/forward, empty, train.py:1"
    )
    assert max(map(len, text.splitlines())) <= 100
    assert "   40.00 MiB  longer-lived blocks lie in holes of earlier ones\n" in text
    text = " ".join(text.split())
    assert "→ expandable_segments:True: let segments grow by pages" in text
    assert "(replayed: peak reserved 1.25 GiB instead of 1.29 GiB)" in text
    assert "20 × 12.00 MiB copy of weight, optimizer state, train.py:30, made in step 1/checkpoint" in text
    assert "taken for activation of step 0/forward (train.py:1)" in text
    assert (
        "held by copy of weight of step 1/checkpoint (train.py:30), put in a hole that another left" in text
    )
    assert "which stays to the end" in text


def test_a_remedy_is_told_once() -> None:
    text = render(causes(cases.many_sizes()), width=100)
    assert text.count("let segments grow by pages") == 1
    assert "as above: expandable_segments:True" in text
    assert "no help, peak reserved" not in text.split("→")[1]


def test_what_was_not_tried_is_no_remedy() -> None:
    found = causes(cases.many_sizes())
    untried = [one for cause in found.causes for one in cause.remedies if not one.tested]
    text = " ".join(render(found, width=100).split())
    assert untried
    assert not [one for one in untried if one.text in text]
    listed = [one["text"] for cause in to_json(found)["causes"] for one in cause["remedies"]]
    assert {one.text for one in untried} <= set(listed)


def test_what_the_recording_computes_is_one() -> None:
    text = " ".join(render(causes(cases.oom_of_live_memory()), width=100).split())
    assert "→ ask for at most" in text
    assert "hold less at this moment" not in text


@pytest.mark.parametrize(
    "make", [cases.checkpoint_in_a_step, cases.oom_of_alternating_blocks, cases.many_sizes]
)
def test_no_sentence_is_cut(make: Callable[[], MemoryTrace]) -> None:
    found = causes(make(), proven=False)
    wide = render(found, width=140).split()
    assert render(found, width=60).split() == wide
    assert "…" not in "".join(wide)


@pytest.mark.parametrize(
    ("peak", "ooms", "before", "helps", "told"),
    [
        (5, 0, 0, True, "peak reserved 5.00 MiB instead of 7.00 MiB"),
        (8, 0, 0, False, "no help, peak reserved 8.00 MiB"),
        (5, 1, 1, True, "peak reserved 5.00 MiB instead of 7.00 MiB, and 1 request fails"),
        (7, 2, 2, False, "no help, peak reserved 7.00 MiB, and 2 requests fail"),
        (
            5,
            2,
            1,
            False,
            "no help, peak reserved 5.00 MiB instead of 7.00 MiB, and 2 requests fail instead of 1",
        ),
        (8, 0, 1, True, "peak reserved 8.00 MiB, and the request that failed is served"),
        (8, 1, 3, True, "peak reserved 8.00 MiB, and 1 request fails instead of 3"),
    ],
)
def test_requests_that_fail_weigh_more_than_the_peak(
    peak: int, ooms: int, before: int, helps: bool, told: str
) -> None:
    remedy = Remedy(
        kind=RemedyKind.NO_MAX_SPLIT,
        text="leave it out",
        alloc_conf="",
        peak_reserved=peak * MIB,
        baseline=7 * MIB,
        ooms=ooms,
        baseline_ooms=before,
    )
    assert remedy.helps is helps
    assert remedy_text(remedy) == f"the default settings: leave it out (replayed: {told})"


def test_a_setting_that_serves_what_failed_is_tried_with_it() -> None:
    cause = causes(cases.oom_of_holes()).cause(CauseKind.LONG_LIVED_IN_HOLE)
    assert cause is not None
    assert (cause.remedies[0].baseline_ooms, cause.remedies[0].ooms) == (1, 0)


def test_an_out_of_memory_is_answered() -> None:
    text = render(causes(cases.oom_of_alternating_blocks()), width=100)
    assert "Would the request of 100.00 MiB have fitted?" in text
    assert "  with expandable segments  misses by 80.00 MiB\n" in text
    assert "  defragmented              fits, 120.00 MiB to spare\n" in text
    assert "Only if the free memory lay together, which no setting tried brings about" in text
    served = render(causes(cases.oom_of_holes()), width=100)
    assert "→ Yes, with expandable segments (expandable_segments:True)." in served


def test_values_for_other_programs() -> None:
    value = to_json(causes(cases.oom_of_live_memory()))
    assert json.loads(json.dumps(value)) == value
    assert value["causes"][0]["kind"] == "live_memory"
    assert value["oom"]["verdict"] == "not_at_all"
    assert {answer["what"] for answer in value["oom"]["answers"]} == {
        "as_recorded",
        "empty_cache",
        "expandable_segments",
        "defragmented",
    }
    spare = sum(cause["bytes"] for cause in value["causes"][1:])
    assert spare == value["reserved_bytes"] - value["requested_bytes"]


def test_explain_tells_it_when_asked(tmp_path: Path) -> None:
    file = RECORDINGS / "select-n-b.json.gz"
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["explain", str(file), "--fragmentation", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "free memory of another stream" in result.output
    value = json.loads(out.read_text())
    assert value["fragmentation_causes"]["causes"][0]["kind"] == "other_stream"
