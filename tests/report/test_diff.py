"""The text of comparisons, gates and explanations, as agreed in the golden files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from analysis.synthetic import MODEL, TRAIN, Recorder, fitting_run, gpt_training, oom_run
from report.golden_files import check_golden
from vramfit.analysis import (
    Pair,
    PeakState,
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
from vramfit.analysis._states import Holding, states_from_report
from vramfit.report import Check, Explanation, print_report, render, to_json
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
    check_golden(f"diff-{width}.txt", render([changed()], width=width, root=ROOT))


def test_two_devices_and_a_run_that_ran_out() -> None:
    same = state_from_trace(fitting_run().trace, name="a")
    failed = state_from_trace(oom_run().trace, name="b")
    figures = diff(
        PeakState(name="card.json", device=1, reserved=MIB), PeakState(name="b", device=1, reserved=3 * MIB)
    )
    check_golden("diff-devices.txt", render([diff(same, failed), figures], root=ROOT))


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
    check_golden("check-failed.txt", render(Check(target="train.py", gates=gates, diffs=diffs), root=ROOT))
    passed = Check(target="train.py", gates=budget_gates(after, 24 << 30))
    check_golden("check-passed.txt", render(passed))
    ran_out = Check(target="train.py", gates=card_gates([state_from_trace(oom_run().trace)]))
    check_golden("check-ran-out.txt", render(ran_out))


@pytest.mark.parametrize("name", ["fits", "oom"])
def test_an_explanation_reads_as_agreed(name: str) -> None:
    run = fitting_run() if name == "fits" else oom_run()
    found = Explanation(run=run, verdict=verdict(run), peaks=peaks(run.trace, most=3))
    check_golden(f"explain-{name}.txt", render(found, root=ROOT))


def test_narrow_terminals_get_no_longer_lines() -> None:
    for line in render([changed()], width=50).splitlines():
        assert len(line) <= 50


def test_plain_characters_where_others_cannot_be_shown(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    with path.open("w", encoding="ascii") as stream:
        print_report([changed()], console=Console(file=stream, width=80, color_system=None))
    assert "12 x 3.00>6.00 MiB" in path.read_text(encoding="ascii")


@pytest.mark.parametrize("size", [1, 13 * MIB, 1023 * MIB])
@pytest.mark.parametrize("more", [1023 * GIB, 7 * GIB, 5 * MIB])
def test_columns_never_run_together(size: int, more: int) -> None:
    found = changed()
    pair = Pair(before=size, after=size + more)
    text = render([replace(found, allocated=pair, reserved=pair)], width=80)
    row = next(line for line in text.splitlines() if line.startswith("peak allocated"))
    assert re.fullmatch(r"peak allocated( +[+-]?[0-9.]+ [KMGT]?i?B){3} +[+-]?[0-9.,e+]+ %", row)


def holding(count: int, size: int, block: int = 0) -> Holding:
    return Holding(
        category=Category.ACTIVATIONS,
        op="aten.mm.default",
        module="",
        tensor="float32[8]",
        line=None,
        stack=(),
        count=count,
        total_bytes=size,
        block_bytes=block,
    )


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ((1, MIB, MIB), (1, 2 * MIB, 2 * MIB), "more float32[8]"),
        ((2, 2 * MIB, MIB), (3, 3 * MIB, MIB), "more 2→3 × 1.00 MiB  float32[8]"),
        ((2, 2 * MIB, MIB), (2, 4 * GIB, 2 * GIB), "more 2 × 1.00 MiB→2.00 GiB  float32[8]"),
        ((2, 2 * MIB, MIB), (1, 5 * MIB, 5 * MIB), "more 2→1 × 1.00→5.00 MiB  float32[8]"),
        ((2, 3 * MIB), (2, 5 * MIB), "more ×2  float32[8]"),
        (None, (12, 12 * MIB, MIB), "new  12 × 1.00 MiB  float32[8]"),
        ((3, 4 * MIB), None, "gone ×3  float32[8]"),
    ],
)
def test_several_are_told_beside_their_sum(
    before: tuple[int, ...] | None, after: tuple[int, ...] | None, said: str
) -> None:
    known = holding(1, MIB, MIB), holding(1, 64, 64)
    sides = [
        PeakState(name=name, device=0, holdings=(replace(known[0], op="aten.add.Tensor"), *of))
        for name, of in (
            ("a", [holding(*before)] if before else []),
            ("b", [holding(*after)] if after else []),
        )
    ]
    text = render([diff(*sides)], width=80)
    assert re.search(rf"{re.escape(said)} +mm$", text, re.MULTILINE), text
    row = to_json([diff(*sides)])["devices"][0]["changes"][0]
    for found, side in ((row["block_bytes_before"], before), (row["block_bytes_after"], after)):
        assert found == (side[2] if side is not None and len(side) == 3 else None)


def test_a_trace_and_its_report_tell_what_one_of_several_takes() -> None:
    trace = fitting_run().trace
    run = fitting_run()
    (report,) = states_from_report(json.loads(json.dumps(to_json(run, verdict(run)))), "a")
    for state in (state_from_trace(trace), report):
        for one in state.holdings:
            assert one.block_bytes in (0, one.total_bytes // one.count)
        assert any(one.block_bytes and one.count > 1 for one in state.holdings)
