"""Remedies are run as they are told: who follows them gets the peak that was told, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from vramfit.cli import app
from vramfit.cli.run_remedies import RemedyTries, remedies_choice
from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.planner.remedies.alteration import NOTHING
from vramfit.planner.remedies.program_remedy import ProgramRemedy
from vramfit.planner.remedies.remedy_runs import RemedyRuns
from vramfit.trace.outcome import Progress
from vramfit.trace.tried_remedies import TriedRemedy


def report_of(*arguments: str) -> dict[str, object]:
    CliRunner().invoke(app, ["run", "--gpu", "700MiB", "--json", "run.json", *arguments])
    found: dict[str, object] = json.loads(Path("run.json").read_text())
    return found


def test_who_follows_a_remedy_gets_the_peak_that_was_told(written: Callable[[str], str]) -> None:
    script, arguments = written("LOOP"), ("--batch-size", "128", "--steps", "2")
    # Without an optimizer in 8 bits, which is compiled for a long time.
    Path(script).write_text(Path(script).read_text().replace("AdamW", "SGD"))
    tried = report_of("--remedies", "100", script, *arguments)["remedies"]
    assert isinstance(tried, dict)
    rows = {row["name"]: row for row in tried["rows"]}
    assert rows["the program as it is"]["fits"] is False
    source = Path(script).read_text().splitlines()
    for name in ("autocast in bf16", "checkpointing of the blocks"):
        [told] = rows[name]["how"]
        Path("edited.py").write_text("\n".join(_followed(source, told)))
        peak = report_of("--remedies", "none", "--no-need", "edited.py", *arguments)["peak"]
        if rows[name]["fits"]:
            assert isinstance(peak, dict)
            assert peak["allocated_bytes"] == rows[name]["peak_allocated_bytes"]
            assert peak["reserved_bytes"] == rows[name]["peak_reserved_bytes"]
    [told] = rows["batch 64"]["how"]
    assert told == "--batch-size 64"
    peak = report_of("--remedies", "none", script, "--batch-size", "64", "--steps", "2")["peak"]
    assert isinstance(peak, dict)
    assert peak["reserved_bytes"] == rows["batch 64"]["peak_reserved_bytes"]
    cheapest = tried["rows"][tried["cheapest"]]
    assert cheapest["fits"] and cheapest["total_bytes"] <= 700 << 20


def test_a_program_that_trains_nothing_gets_remedies_that_are_as_told(written: Callable[[str], str]) -> None:
    script = written("INFERRING")
    report = report_of("--remedies", "60", script)
    tried, seen = report["remedies"], report["trains"]
    assert isinstance(tried, dict) and isinstance(seen, dict)
    assert tried["whole"] is True
    [used] = seen["used"]
    assert (used["kind"], used["called_as"], used["with_gradients"], used["dtype"]) == (
        "Net",
        "net",
        True,
        "float32",
    )
    rows = {row["name"]: row for row in tried["rows"]}
    assert rows["the program as it is"]["fits"] is False
    source = Path(script).read_text().splitlines()
    for name in ("no gradients", "weights in bf16", "autocast in bf16"):
        [told] = rows[name]["how"]
        Path("edited.py").write_text("\n".join(_followed(source, told)))
        run = CliRunner().invoke(
            app, ["run", "--gpu", "8GiB", "--remedies", "none", "--json", "run.json", "edited.py"]
        )
        assert run.exit_code == 0, run.output
        peak = json.loads(Path("run.json").read_text())["peak"]
        assert peak["allocated_bytes"] == rows[name]["peak_allocated_bytes"]
        if not rows[name]["fits"]:  # within the card, the allocator returns what it has cached
            assert peak["reserved_bytes"] == rows[name]["peak_reserved_bytes"]
    assert rows["no gradients"]["how"] == ["put inferring.py:27 into  with torch.no_grad():"]
    assert rows["weights in bf16"]["how"] == ["in inferring.py:24 write Net().eval().bfloat16().to(...)"]
    assert (
        rows["no gradients"]["peak_allocated_bytes"]
        < rows["the program as it is"]["peak_allocated_bytes"] // 2
    )
    assert tried["rows"][tried["cheapest"]]["name"] == "weights in bf16"


def _followed(source: list[str], told: str) -> list[str]:
    """A program with an edit as the report words it."""
    if told.startswith("in "):
        place, _, new = told.removeprefix("in ").partition(" write ")
        at = int(place.rpartition(":")[2]) - 1
        name, _, rest = source[at].partition(" = ")
        method = new.rpartition("(...)")[0]
        return [*source[:at], f"{name} = {method}({rest.rpartition('(')[2]}", *source[at + 1 :]]
    if told.startswith("put "):
        place, _, header = told.removeprefix("put ").partition(" into  ")
        first, _, last = place.rpartition(":")[2].partition("-")
        begin, end = int(first) - 1, int(last or first)
        indent = source[begin][: len(source[begin]) - len(source[begin].lstrip())]
        inside = [f"    {line}" for line in source[begin:end]]
        return [*source[:begin], f"{indent}{header}", *inside, *source[end:]]
    place, _, new = told.removeprefix("before ").partition(" insert  ")
    at = int(place.rpartition(":")[2]) - 1
    return [*source[:at], *new.split("; "), *source[at:]]


def test_a_program_that_fits_is_left_alone_unless_asked(written: Callable[[str], str]) -> None:
    script = written("LOOP")
    assert report_of("--gpu", "8GiB", script)["remedies"] is None


def test_a_program_without_a_model_says_why_nothing_was_tried(written: Callable[[str], str]) -> None:
    script = written("UNTRAINED")
    Path(script).write_text("import torch\ntorch.zeros(8, device='cuda')\n")
    found = CliRunner().invoke(app, ["run", "--gpu", "8GiB", "--remedies", "20", script])
    assert "No remedy was tried: the program runs no model on the card." in " ".join(found.output.split())


def test_the_environment_chooses_where_the_command_line_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert remedies_choice(None) == 0  # of all tests
    monkeypatch.setenv("VRAMFIT_REMEDIES", "auto")
    assert remedies_choice(None) is None
    monkeypatch.setenv("VRAMFIT_REMEDIES", "soon")
    with pytest.raises(UsageError, match="VRAMFIT_REMEDIES soon is no choice"):
        remedies_choice(None)
    assert remedies_choice("20s") == 20


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf"])
def test_a_choice_of_remedies_that_is_none_is_refused(written: Callable[[str], str], text: str) -> None:
    found = CliRunner().invoke(app, ["run", "--gpu", "8GiB", "--remedies", text, written("LOOP")])
    assert isinstance(found.exception, UsageError)
    assert found.exception.message == f"--remedies {text} is no choice"


@pytest.mark.parametrize(
    ("choice", "fits", "seconds"),
    [(None, False, 300.0), (None, True, 0.0), (None, None, 0.0), (0.0, False, 0.0), (20.0, True, 20.0)],
)
def test_a_run_that_does_not_fit_is_followed_by_remedies_for_as_long_as_it_took(
    choice: float | None, fits: bool | None, seconds: float
) -> None:
    run: Any = SimpleNamespace(progress=Progress(), seconds_wall=300.0)
    verdict: Any = SimpleNamespace(fits=fits)
    tries = RemedyTries(choice, ["train.py"], RunOptions(gpu=find_gpu("RTX 3090")))
    assert tries.seconds(run, verdict) == seconds
    assert RemedyTries(choice, ["train.py"], RunOptions()).seconds(run, verdict) == 0  # a recorded run


def test_a_row_whose_step_time_is_not_known_is_not_the_cheapest() -> None:
    row = {"how": (), "changes": "", "peak_allocated_bytes": 1, "peak_reserved_bytes": 1, "fits": True}
    runs = RemedyRuns.__new__(RemedyRuns)
    runs._rows = [
        TriedRemedy(name=name, total_bytes=1, step_seconds=seconds, plain_step_seconds=1.0, **row)
        for name, seconds in (("plain", 1.0), ("unknown", 0.0), ("known", 2.0))
    ]
    plain = ProgramRemedy(name="any", alteration=NOTHING, how=())
    runs._by_row = dict.fromkeys(("plain", "unknown", "known"), plain)
    assert runs._cheapest() == 2
