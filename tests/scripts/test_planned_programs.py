"""``vramfit plan SCRIPT`` and ``vramfit run --plan``: the program keeps to the byte what its plan promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.scripts.test_attached_programs import CHECKPOINTED, write_plan
from typer.testing import CliRunner

from vramfit.cli import app
from vramfit.errors import UsageError, VramfitError
from vramfit.planner.plans import Plan

PLAN = ["plan", "--gpu", "8GiB", "--budget", "700MiB", "--margin", "0", "--allow", "activation-checkpointing"]


def test_a_plan_for_a_script_is_kept_to_the_byte_and_was_compared_on_the_cpu(
    written: Callable[[str], str],
) -> None:
    script = written("LOOP")
    found = CliRunner().invoke(app, [*PLAN, "-o", "plan.toml", script, "--batch-size", "128"])
    assert found.exit_code == 0, found.output
    plan = Plan.load("plan.toml")
    assert plan.aim.program == (script, "--batch-size", "128")
    assert (plan.aim.model, plan.aim.model_parameters) == ("Net", 3_681_792)
    assert [choice.name for choice in plan.choices] == ["activation-checkpointing"]
    assert plan.compared.startswith("the program itself on the CPU")
    assert "are those of the plain program, bit for bit" in plan.notes[0]
    run = CliRunner().invoke(
        app,
        ["run", "--gpu", "8GiB", "--plan", "plan.toml", "--json", "run.json", script, "--batch-size", "128"],
    )
    assert run.exit_code == 0, run.output
    report = json.loads(Path("run.json").read_text())
    assert report["plan"]["attached"] is True
    assert report["peak"]["reserved_bytes"] == plan.after.peak_reserved_bytes
    assert report["peak"]["allocated_bytes"] == plan.after.peak_allocated_bytes
    assert plan.after.total_bytes <= 700 << 20 < plan.before.total_bytes
    assert report["plan"]["made_for"] == ""
    other = CliRunner().invoke(app, ["run", "--gpu", "8GiB", "--plan", "plan.toml", script, "--steps", "1"])
    words = " ".join(other.output.split())
    assert f"It was made for another command line: {script} --batch-size 128" in words
    gate = ["check", "--budget", f"{plan.after.total_bytes}B", "--gpu", "8GiB", script, "--steps", "3"]
    arguments = ["--", "--batch-size", "128"]
    assert CliRunner().invoke(app, [*gate, "--plan", "plan.toml", *arguments]).exit_code == 0
    assert CliRunner().invoke(app, [*gate, *arguments]).exit_code == 3
    checked = CliRunner().invoke(app, ["verify", "plan.toml", "--json", "verified.json", "--steps", "3"])
    assert checked.exit_code == 0, checked.output
    verified = json.loads(Path("verified.json").read_text())
    assert verified["gradients"]["equal"] == verified["gradients"]["parameters"] == 39
    assert verified["losses"]["plain"] == verified["losses"]["planned"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("UNTRAINED", "ends before it trains a model"),
        (
            "FUNCTIONAL",
            "nothing can be attached to this program: the optimizer's parameters are of no module",
        ),
        ("LBFGS", "nothing can be attached to this program: LBFGS runs the model several times"),
    ],
)
def test_programs_to_which_nothing_can_be_attached_are_refused(
    written: Callable[[str], str], name: str, words: str
) -> None:
    found = CliRunner().invoke(app, ["plan", "--gpu", "8GiB", written(name)])
    assert isinstance(found.exception, UsageError)
    assert words in found.exception.message


def test_a_program_that_fails_says_why(written: Callable[[str], str]) -> None:
    script = written("LOOP")
    Path(script).write_text("raise RuntimeError('no data here')\n")
    found = CliRunner().invoke(app, ["plan", "--gpu", "8GiB", script])
    assert isinstance(found.exception, VramfitError)
    assert "no data here" in found.exception.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "8GiB"], "there is no program and no workload"),
        (["loop.py", "--gpu", "8GiB"], "--gpu stands behind the program"),
        (["--gpu", "8GiB", "--size", "batch_size=2", "loop.py"], "--size is for a workload"),
        (
            ["--gpu", "8GiB", "--objective", "batch_size", "loop.py"],
            "--objective batch_size is for a workload",
        ),
        (["--gpu", "8GiB", "nope.py"], "there is no script nope.py"),
    ],
)
def test_bad_command_lines_are_refused(
    written: Callable[[str], str], arguments: list[str], words: str
) -> None:
    written("LOOP")
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert isinstance(found.exception, UsageError)
    assert words in found.exception.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "loop.py"], "loop.py is a program, not a plan"),
        (
            ["stress", "--gpu", "8GiB", "loop.py"],
            "for the program itself there are vramfit plan, fit and check",
        ),
        (["check", "--budget", "8GiB", "--plan", "nope.toml", "loop.py"], "there is no plan nope.toml"),
    ],
)
def test_a_program_in_the_place_of_something_else_says_what_is_meant(
    written: Callable[[str], str], arguments: list[str], words: str
) -> None:
    written("LOOP")
    found = CliRunner().invoke(app, arguments)
    assert isinstance(found.exception, UsageError)
    assert words in str(found.exception)


def test_the_largest_batch_of_a_program_is_found_by_its_loader_or_its_option(
    written: Callable[[str], str],
) -> None:
    script = written("LOOP")
    fit = ["fit", script, "--gpu", "8GiB", "--budget", "700MiB", "--json", "fit.json"]
    assert CliRunner().invoke(app, [*fit, "--largest", "batch_size"]).exit_code == 0
    by_option = json.loads(Path("fit.json").read_text())
    source = Path(script).read_text()
    Path(script).write_text(
        source.replace('parser.add_argument("--batch-size", type=int, default=64)', "").replace(
            "batch_size=options.batch_size", "batch_size=64"
        )
    )
    assert CliRunner().invoke(app, fit).exit_code == 0
    by_loader = json.loads(Path("fit.json").read_text())
    assert by_option["value"] == by_loader["value"] > 64
    assert by_option["total_bytes"] == by_loader["total_bytes"] <= 700 << 20


def test_where_nothing_fits_the_program_is_named(written: Callable[[str], str]) -> None:
    script = written("LOOP")
    found = CliRunner().invoke(app, ["plan", "--gpu", "8GiB", "--budget", "310MiB", "--margin", "0", script])
    assert isinstance(found.exception, UsageError)
    assert found.exception.exit_code == 3
    assert f"✗ does not fit generic 8.00 GiB GPU {script}: at best" in found.output
    assert "Nothing has to be changed" not in found.output


def test_a_run_with_another_command_line_than_the_plans_says_so(written: Callable[[str], str]) -> None:
    script = written("LOOP")
    plan = write_plan(CHECKPOINTED, program=(script, "--batch-size", "128"))
    run = ["run", "--gpu", "8GiB", "--plan", str(plan), "--json", "run.json", script, "--batch-size", "4"]
    found = CliRunner().invoke(app, run)
    assert found.exit_code == 0, found.output
    assert "made for another command line" in " ".join(found.output.split())
    assert json.loads(Path("run.json").read_text())["plan"]["made_for"] == f"{script} --batch-size 128"


def test_a_step_whose_time_is_not_known_is_left_blank(written: Callable[[str], str]) -> None:
    fit = ["fit", written("LOOP"), "--gpu", "8GiB", "--budget", "520MiB", "--", "--steps", "1"]
    found = CliRunner().invoke(app, fit)
    assert found.exit_code == 0, found.output
    assert "0 µs" not in found.output
