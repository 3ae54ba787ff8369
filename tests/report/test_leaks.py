"""The report of leaks: golden text, and narrow terminals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.analysis.synthetic import MODEL, TORCH_LINEAR, TRAIN, TRAINER, Recorder

from vramfit.analysis import LeakReport, LeakVerdict, Release, leaks
from vramfit.holders.chains import Link, OwnerChain, Root, Through
from vramfit.report import render
from vramfit.trace import Category, Frame

LOSS = (TORCH_LINEAR, Frame(MODEL, 40, "forward"), TRAINER, Frame(TRAIN, 33, "main"))
CACHE = (Frame(TRAIN, 12, "mask"),)
NODES = (Frame(TRAIN, 20, "serve"),)
CHAIN = OwnerChain(
    root=Root.GLOBAL,
    text="train.history[2] -> grad_fn MseLossBackward0 -> … -> AddmmBackward0 saved mat1",
    links=(Link(kind="list", edge="[2]"), Link(kind="torch.Tensor", edge="-> grad_fn MseLossBackward0")),
    through=frozenset({Through.AUTOGRAD}),
)


def found(steps: int = 30) -> LeakReport:
    """A leak beside a cache that filled and cycles that are collected."""
    recorder = Recorder()
    cycles: list[int] = []
    for step in range(steps):
        recorder.phase(f"step {step}/forward")
        recorder.alloc(
            "float32[4, 1024, 768]",
            3 << 20,
            Category.ACTIVATIONS,
            op="aten.addmm.default",
            module="GPT.h.3",
            stack=LOSS,
        )
        if step < 18:
            recorder.alloc("bool[64, 64]", 4096, Category.OTHER, op="aten.tril.default", stack=CACHE)
        cycles.append(
            recorder.alloc("float32[1000]", 4000, Category.OTHER, op="aten.ones.default", stack=NODES)
        )
        if step % 6 == 5:
            for address in cycles:
                recorder.free(address)
            cycles.clear()
    return leaks(recorder.finish())


GOLDEN = """\
! memory grows by 3.00 MiB per step
  29 levels, found by phases, the first 9 left out as warm-up; p = 4.1e-19, 3
  stacks tested at 0.01
  ▁▁▂▂▂▂▃▃▃▃▄▄▄▄▅▅▅▅▆▆▆▆▇▇▇▇▇██ 0 B to 84.09 MiB

What grows    per step      in all
    3.00 MiB   57.00 MiB  nets/gpt.py:40
      float32[4,1024,768] addmm activations in GPT.h.*; since step 0, 20 blocks,
      p = 4.1e-19 (1.2e-18 of all)
      held by train.history[2] -> grad_fn MseLossBackward0 -> … ->
        AddmmBackward0 saved mat1  (autograd graph)

Grew and stopped  no leak: caches that filled
   36.00 KiB  project/train.py:12, until 17

Freed at one blow  no leak: reference cycles until they are collected, lists
  emptied
   20.00 KiB  project/train.py:20, 4 times, up to 5 steps at once
"""


def test_the_report_names_rate_place_and_owner() -> None:
    report = found()
    report = replace(report, growing=(replace(report.growing[0], owners=(CHAIN,)),))
    assert report.verdict is LeakVerdict.GROWING
    assert render(report) == GOLDEN


@pytest.mark.parametrize("width", [20, 40, 60, 80, 110, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    report = found()
    report = replace(report, growing=(replace(report.growing[0], owners=(CHAIN,)),))
    lines = render(report, width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_dead_cycles_are_told() -> None:
    report = found()
    cycle = OwnerChain(
        root=Root.DEAD_CYCLE,
        text="dead reference cycle of Node: Node.batch",
        links=CHAIN.links,
        cycle=("Node",),
    )
    growing = replace(report.growing[0], owners=(cycle,), release=Release.COLLECTOR)
    text = render(replace(report, growing=(growing,)), width=110)
    assert "dead: nothing reaches it, only the garbage collector frees it" in text
    assert "      dead reference cycle of Node: Node.batch" in text


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (LeakVerdict.STEADY, "✓ no memory grows from step to step beyond chance in 29 steps"),
        (LeakVerdict.SUSPECTED, "? memory grows by 3.00 MiB per step. The steps are guessed"),
        (LeakVerdict.NO_STEPS, "? nothing repeats in this trace"),
        (LeakVerdict.TOO_FEW_STEPS, "? too few steps: 29 seen, 8 needed"),
    ],
)
def test_every_verdict_has_its_words(verdict: LeakVerdict, words: str) -> None:
    assert render(replace(found(), verdict=verdict), width=140).startswith(words)


def test_a_leak_that_no_line_stands_out_of_says_so() -> None:
    assert "spread over many lines" in render(replace(found(), growing=()), width=140)


def test_many_growing_stacks_are_summed_up() -> None:
    report = found()
    text = render(replace(report, growing=report.growing * 20))
    assert "8 stacks more: 24.00 MiB in all" in text


def test_an_empty_trace_has_a_report() -> None:
    assert render(leaks(Recorder().finish())).startswith("? too few steps: 0 seen")


@pytest.mark.parametrize(
    ("levels", "hint"),
    [
        ((9, 9, 9, 12, 12, 15, 15), True),
        ((9, 9, 9, 12, 12, 12, 12), False),
        ((9, 9, 9, 12, 11, 15, 15), False),
    ],
)
def test_rises_that_prove_nothing_yet_are_told(levels: tuple[int, ...], hint: bool) -> None:
    steady = replace(found(), verdict=LeakVerdict.STEADY, warmup=2, levels=levels)
    assert ("rose in 2 of them and never fell" in render(steady)) == hint
