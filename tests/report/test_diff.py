"""The text of comparisons, gates and explanations, as agreed in the golden files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from analysis.synthetic import MODEL, TRAIN, Recorder, fitting_run, gpt_training, oom_run
from report.golden_files import check_golden
from vramfit.analysis import (
    Pair,
    State,
    Tolerance,
    TraceDiff,
    baseline_gates,
    budget_gates,
    card_gates,
    diff,
    peaks,
    state_from_trace,
    verdict,
)
from vramfit.report import Check, Explanation, print_diff, render_check, render_diff, render_explanation
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.units import GIB, MIB

ROOT = Path(TRAIN).parent


def changed() -> TraceDiff:
    """One of each: more, less, moved, reshaped, new and gone."""
    before, after = Recorder(), Recorder()
    for recorder, later in ((before, False), (after, True)):
        lines = 5 if later else 0
        recorder.phase("step 0/forward")
        for count, size, tensor, line in (
            (12, 3, "bfloat16[8, 1024, 768]" if not later else "bfloat16[16, 1024, 768]", 40),
            (4 if later else 6, 2, "float32[512, 1024]", 44),
        ):
            for layer in range(count):
                recorder.alloc(
                    tensor,
                    size * (2 if later and line == 40 else 1) * MIB,
                    Category.ACTIVATIONS,
                    op="aten.addmm.default",
                    module=f"GPT.h.{layer}.mlp",
                    stack=(Frame(MODEL, line + lines, f"forward_{line}"), Frame(TRAIN, 33 + lines, "main")),
                )
        name = "ema" if later else "probe"
        recorder.alloc(
            "float32[64, 1024, 1024]",
            256 * MIB,
            Category.OTHER,
            op="aten.clone.default",
            stack=(Frame(TRAIN, 60, name),),
        )
    return diff(
        state_from_trace(before.finish(), name="main.vft"),
        state_from_trace(after.finish(), name="branch.vft"),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_a_comparison_reads_as_agreed(width: int) -> None:
    check_golden(f"diff-{width}.txt", render_diff([changed()], width=width, root=ROOT))


def test_two_devices_and_a_run_that_ran_out() -> None:
    same = state_from_trace(fitting_run().trace, name="a")
    failed = state_from_trace(oom_run().trace, name="b")
    figures = diff(
        State(name="card.json", device=1, reserved=MIB), State(name="b", device=1, reserved=3 * MIB)
    )
    check_golden("diff-devices.txt", render_diff([diff(same, failed), figures], root=ROOT))


def gpt(layers: int) -> MemoryTrace:
    recorder = Recorder()
    gpt_training(recorder, layers=layers, iterations=2)
    return recorder.finish()


def test_gates_read_as_agreed() -> None:
    before = [state_from_trace(gpt(12), name="baseline.json")]
    after = [state_from_trace(gpt(13), name="train.py")]
    diffs = [diff(before[0], after[0])]
    gates = (
        *budget_gates(after, 8 << 30),
        *baseline_gates(after, before, Tolerance.parse("1%")),
    )
    check_golden(
        "check-failed.txt", render_check(Check(target="train.py", gates=gates, diffs=diffs), root=ROOT)
    )
    passed = Check(target="train.py", gates=budget_gates(after, 24 << 30))
    check_golden("check-passed.txt", render_check(passed))
    ran_out = Check(target="train.py", gates=card_gates([state_from_trace(oom_run().trace)]))
    check_golden("check-ran-out.txt", render_check(ran_out))


@pytest.mark.parametrize("name", ["fits", "oom"])
def test_an_explanation_reads_as_agreed(name: str) -> None:
    run = fitting_run() if name == "fits" else oom_run()
    found = Explanation(run=run, verdict=verdict(run), peaks=peaks(run.trace, most=3))
    check_golden(f"explain-{name}.txt", render_explanation(found, root=ROOT))


def test_narrow_terminals_get_no_longer_lines() -> None:
    for line in render_diff([changed()], width=50).splitlines():
        assert len(line) <= 50


def test_plain_characters_where_others_cannot_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as stream:
        print_diff([changed()], Console(file=stream, width=80, color_system=None))
    assert "x12" in path.read_text(encoding="ascii")


@pytest.mark.parametrize("size", [1, 13 * MIB, 1023 * MIB])
@pytest.mark.parametrize("more", [1023 * GIB, 7 * GIB, 5 * MIB])
def test_columns_never_run_together(size: int, more: int) -> None:
    found = changed()
    pair = Pair(before=size, after=size + more)
    text = render_diff([replace(found, allocated=pair, reserved=pair)], width=80)
    row = next(line for line in text.splitlines() if line.startswith("peak allocated"))
    assert re.fullmatch(r"peak allocated( +[+-]?[0-9.]+ [KMGT]?i?B){3} +[+-]?[0-9.,e+]+ %", row)
