"""`vramfit together`: what it prints, its JSON, its exit codes, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.synthetic import quick_run
from cli.conftest import FakeRunner, Invocation
from vramfit.analysis import share_card
from vramfit.gpus import find_gpu
from vramfit.report import TOGETHER_SCHEMA, render, to_json
from vramfit.units import MIB

Command = Callable[..., Invocation]
CONF = "expandable_segments:True"


@pytest.fixture(autouse=True)
def runner(monkeypatch: pytest.MonkeyPatch) -> FakeRunner:
    """The child interpreter replaced."""
    fake = FakeRunner(quick_run())
    monkeypatch.setattr("vramfit.virtual.virtual_run.run_in_child", fake.run_in_child)
    return fake


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "gpt.vft"
    quick_run().trace.save(path)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The card of the traces with memory for less than two of them."""
    run = quick_run()
    one = share_card([run, run], ["a", "b"], find_gpu("RTX 4090")).processes[0]
    path = tmp_path / "small.toml"
    path.write_text(f'name = "RTX 4090"\nbase = "RTX 4090"\ntotal_bytes = {2 * one.total - 10 * MIB}\n')
    return path


def test_traces_that_fit(vramfit: Command, trace: Path) -> None:
    found = vramfit("together", trace, trace, "--gpu", "RTX 4090")
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("✓ 2 programs fit RTX 4090 side by side: ")
    for told in (
        "gpt.vft (1)",
        "per_process_memory_fraction:",
        "When live memory meets",
        "Time slicing (the default): a context for each process",
        "MPS: from",
    ):
        assert told in found.out


def test_scripts_run_with_their_arguments_and_options(
    vramfit: Command, runner: FakeRunner, tmp_path: Path
) -> None:
    one, two = tmp_path / "one.py", tmp_path / "my two.py"
    one.write_text("")
    two.write_text("")
    found = vramfit(
        "together", f"{one} --epochs 1", two, "--gpu", "RTX 4090", "--steps", "3", "--alloc-conf", CONF
    )
    assert found.code == 0
    assert [command for command, _ in runner.calls] == [[str(one), "--epochs", "1"], [str(two)]]
    assert {options["alloc_conf"] for _, options in runner.calls} == {CONF}
    assert {options["limits"].steps for _, options in runner.calls} == {3}
    assert found.err.splitlines() == [
        "vramfit: program 1 of 2: one.py --epochs 1",
        "vramfit: program 2 of 2: my two.py",
    ]


def test_json_on_standard_output_is_all_there_is(vramfit: Command, trace: Path) -> None:
    found = vramfit("together", trace, trace, trace, "--gpu", "RTX 4090", "--json", "-")
    document = json.loads(found.out)
    assert document["schema"] == TOGETHER_SCHEMA == "vramfit.together/1"
    run = quick_run()
    names = [f"gpt.vft ({at})" for at in (1, 2, 3)]
    expected = json.loads(json.dumps(to_json(share_card([run] * 3, names, find_gpu("RTX 4090")))))
    for one in (document, expected):
        for process in one["processes"]:
            process.pop("seconds")  # a trace has its own clock alone
        one.pop("time_slicing")
        one.pop("mps")
    assert document == expected


def test_the_json_document_has_the_keys_that_its_page_lists(trace: Path) -> None:
    run = quick_run()
    document = to_json(share_card([run, run], ["a", "b"], find_gpu("RTX 4090")))
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    part = page.split("## `vramfit together --json`")[1].split("\n## ")[0]
    assert document["steps"] is not None
    for key in [
        *document,
        *document["processes"][0],
        *document["steps"],
        *document["worst_live"],
        *document["mps"],
    ]:
        assert f"`{key}`" in part or f"`{key}[]`" in part, key


def test_what_does_not_fit_ends_with_3(vramfit: Command, trace: Path, small: Path) -> None:
    found = vramfit("together", trace, trace, "--gpu", small)
    assert found.code == 3
    assert found.out.startswith("✗ 2 programs do not fit RTX 4090 side by side as they are: ")
    assert "10.00 MiB too much" in found.out.replace("\n  ", " ")


def test_sets_of_three_are_told(trace: Path) -> None:
    run = quick_run()
    card = find_gpu("RTX 4090")
    one = share_card([run] * 2, ["a", "b"], card).processes[0]
    found = share_card([run] * 3, ["a", "b", "c"], replace(card, total_bytes=5 * one.total // 2))
    assert found.fitting == ((0, 1), (0, 2), (1, 2))
    assert "fit as they are: a and b, " in render(found)


def test_a_script_that_fails_ends_with_1(
    vramfit: Command, runner: FakeRunner, trace: Path, tmp_path: Path
) -> None:
    script = tmp_path / "bad.py"
    script.write_text("")
    runner.result = replace(quick_run(), exit_code=7, error="ValueError: no data")
    found = vramfit("together", trace, script, "--gpu", "RTX 4090")
    assert (found.code, found.out) == (1, "")
    assert found.err.splitlines()[1:] == [
        "error: bad.py failed: ValueError: no data",
        f'next:  Try it alone: vramfit run --gpu "RTX 4090" {script}',
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("TRACE", "TRACE"), 2, "error: no card is given"),
        (("TRACE", "--gpu", "RTX 4090"), 2, "error: programs are told side by side from two on"),
        (("TRACE", "train.pi", "--gpu", "RTX 4090"), 2, "error: there is no script train.pi"),
        (("TRACE", "'open", "--gpu", "RTX 4090"), 2, 'error: "\'open" cannot be read: No closing quotation'),
        (("TRACE", "", "--gpu", "RTX 4090"), 2, "error: no script is given"),
        (("TRACE", "TRACE", "--gpu", "RTX 3090"), 2, "error: gpt.vft (1) is of another card"),
        (("TRACE", "TRACE", "--gpu", "RTX 4900"), 2, "error: no GPU is called 'RTX 4900'"),
        (("TRACE", "TRACE", "--gpu", "RTX 4090", "--steps", "-1"), 2, "error: "),
    ],
)
def test_bad_input_is_one_line(
    vramfit: Command, trace: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    found = vramfit("together", *(trace if one == "TRACE" else one for one in arguments))
    assert (found.code, found.out) == (code, "")
    assert found.err.startswith(said)
    assert len(found.err.splitlines()) <= 2


def test_a_script_with_a_syntax_error_is_not_started(
    vramfit: Command, runner: FakeRunner, trace: Path, tmp_path: Path
) -> None:
    script = tmp_path / "bad.py"
    script.write_text("def")
    found = vramfit("together", trace, script, "--gpu", "RTX 4090")
    assert found.code == 1
    assert runner.calls == []
    assert "bad.py line 1" in found.err
