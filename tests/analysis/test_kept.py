"""What is kept once an epoch and by passes of evaluations: planted traces with figures that a reader can add up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from analysis.synthetic import TRAIN, Recorder, outcome, virtual_run
from vramfit.analysis import (
    KeptEach,
    KeptMemory,
    LeakVerdict,
    StepSource,
    Verdict,
    leaks,
    steps,
    verdict,
)
from vramfit.report import render, to_json
from vramfit.trace import TEARDOWN, Category, Frame
from vramfit.units import GIB, MIB

OUTPUT = (Frame(TRAIN, 14, "evaluate"),)
RETURNS = (Frame(TRAIN, 20, "evaluate"),)
Evaluate = Callable[[Recorder, int], list[int]]


def one_pass(recorder: Recorder, size: int, category: Category = Category.ACTIVATIONS) -> int:
    """A forward pass whose output of some size is left."""
    recorder.mark_phase("Net")
    recorder.free(recorder.alloc("", 8 * MIB, Category.TEMPORARIES, module="Net.0"))
    return recorder.alloc("float32[1]", size, category, op="aten.addmm.default", module="Net.1", stack=OUTPUT)


def training(evaluate: Evaluate, *, epochs: int = 2, each: int = 2) -> Recorder:
    """Epochs of some steps with an evaluation after each; what that returns is let go of before training goes on."""
    recorder, step = Recorder(total_bytes=GIB, context_bytes=0), 1
    for epoch in range(epochs):
        for _ in range(each):
            recorder.phase(f"step {step}/forward")
            graph = one_pass(recorder, 4 * MIB)
            recorder.phase(f"step {step}/backward")
            recorder.mark_phase()
            recorder.free(graph)
            recorder.phase(f"step {step}/optimizer")
            recorder.mark_phase()
            step += 1
        recorder.phase(f"step {step}/forward")
        for address in evaluate(recorder, epoch):
            recorder.free(address)
    recorder.phase(TEARDOWN)
    recorder.mark_phase()
    return recorder


def judged(recorder: Recorder) -> Verdict:
    trace = recorder.finish()
    return verdict(virtual_run(trace, devices=(outcome(trace, total=GIB, context=0),)))


def told(found: Verdict, recorder: Recorder) -> str:
    trace = recorder.finish()
    run = virtual_run(trace, devices=(outcome(trace, total=GIB, context=0),))
    return " ".join(render(run, found).split())


def sums_losses(recorder: Recorder, _: int) -> list[int]:
    held = [one_pass(recorder, 3 * MIB, Category.TEMPORARIES) for _ in range(10)]
    return [*held, recorder.alloc("", 512, Category.OTHER, stack=RETURNS)]


def test_passes_that_keep_their_graphs_until_an_evaluation_returns() -> None:
    recorder = training(sums_losses)
    found = judged(recorder)
    (kept,) = found.kept
    assert (kept.each, kept.times, kept.bytes_each, kept.total_bytes) == (
        KeptEach.PASS,
        10,
        3 * MIB,
        30 * MIB,
    )
    assert (kept.stays, kept.until, kept.graph, kept.holder) == (False, RETURNS[0], True, None)
    assert kept.place is not None and kept.place.line == OUTPUT[0]
    text = told(found, recorder)
    assert "10 passes of Net in a row keep 3.00 MiB each" in text
    assert "until project/train.py:20, 30.00 MiB in all. No backward pass follows" in text


def fills_a_list(recorder: Recorder, _: int) -> list[int]:
    for _pass in range(10):
        one_pass(recorder, 3 * MIB)
    return []


def test_a_list_that_nobody_empties_says_in_which_evaluation_memory_runs_out() -> None:
    recorder = training(fills_a_list, epochs=3)
    found = judged(recorder)
    (kept,) = found.kept
    assert (kept.each, kept.times, kept.evaluations) == (KeptEach.PASS, 30, 3)
    assert (kept.bytes_each, kept.stays, kept.until, kept.graph) == (3 * MIB, True, None, False)
    # 90 MiB after three of them and 8 MiB within a pass; segments are of 20 MiB
    left = found.device.headroom
    assert kept.evaluation_at_end(left) == 3 + left // (30 * MIB) + 1
    assert "Each pass of Net outside training keeps 3.00 MiB" in told(found, recorder)
    entry = to_json(virtual_run(recorder.finish()), found)["kept"][0]
    assert (entry["each"], entry["bytes_each"], entry["holder"]) == ("pass", 3 * MIB, None)
    assert entry["line"] == {"file": TRAIN, "line": 14, "function": "evaluate"}


def frees_each(recorder: Recorder, _: int) -> list[int]:
    for _pass in range(10):
        recorder.free(one_pass(recorder, 3 * MIB))
    return []


def grows_a_cache(recorder: Recorder, _: int) -> list[int]:
    cache = one_pass(recorder, 3 * MIB)
    for token in range(2, 11):
        longer = one_pass(recorder, 3 * token * MIB)
        recorder.free(cache)
        cache = longer
    return [cache]


def keeps_the_last(recorder: Recorder, epoch: int) -> list[int]:
    frees_each(recorder, epoch)
    return [one_pass(recorder, 3 * MIB)]


def few_passes(recorder: Recorder, _: int) -> list[int]:
    return [one_pass(recorder, 3 * MIB) for _ in range(4)]


@pytest.mark.parametrize("evaluate", [frees_each, grows_a_cache, keeps_the_last, few_passes])
def test_evaluations_that_keep_nothing_of_each_pass(evaluate: Evaluate) -> None:
    assert judged(training(evaluate)).kept == ()


def test_what_a_backward_pass_frees_was_needed() -> None:
    """A recurrent cell that is called for each token, or the steps of an episode: one backward pass uses them all."""
    recorder = Recorder(total_bytes=GIB, context_bytes=0)
    for step in (1, 2, 3):
        recorder.phase(f"step {step}/forward")
        graphs = [one_pass(recorder, 3 * MIB) for _ in range(12)]
        recorder.phase(f"step {step}/backward")
        recorder.mark_phase()
        for address in graphs:
            recorder.free(address)
        recorder.phase(f"step {step}/optimizer")
        recorder.mark_phase()
    assert judged(recorder).kept == ()


def once_an_epoch(recorder: Recorder, epoch: int) -> list[int]:
    recorder.alloc("", 5 * MIB, Category.OTHER, stack=OUTPUT)
    return []


def test_what_is_left_once_an_epoch_is_a_leak_after_three_epochs() -> None:
    found = judged(training(once_an_epoch, epochs=6, each=3))
    (kept,) = found.kept
    assert (kept.each, kept.every, kept.bytes_each) == (KeptEach.EPOCH, 3, 5 * MIB)
    assert found.grows_by == 5 * MIB // 3
    assert found.runs_out_at is not None
    assert leaks(training(once_an_epoch, epochs=6, each=3).finish()).verdict is LeakVerdict.GROWING
    assert judged(training(once_an_epoch, epochs=3, each=3)).kept == ()


def misses(*epochs: int) -> Evaluate:
    """A cache with a miss in some epochs."""

    def evaluate(recorder: Recorder, epoch: int) -> list[int]:
        return once_an_epoch(recorder, epoch) if epoch in epochs else []

    return evaluate


@pytest.mark.parametrize("epochs", [(0, 1, 2), (0, 1, 3, 8), (1, 5)])
def test_a_cache_that_fills_up_over_epochs_is_no_leak(epochs: tuple[int, ...]) -> None:
    found = judged(training(misses(*epochs), epochs=10, each=3))
    assert found.kept == ()


def test_passes_are_the_steps_of_inference_and_setup_is_none() -> None:
    recorder = Recorder()
    recorder.phase("setup")
    for _ in range(80):
        recorder.alloc("", MIB, Category.PARAMETERS, stack=(Frame(TRAIN, 3, "main"),))
    recorder.phase("step 1/forward")
    for _ in range(12):
        recorder.free(one_pass(recorder, MIB))
    trace = recorder.finish()
    found = steps(trace)
    assert (found.source, len(found), found.unit) == (StepSource.PASSES, 12, "pass of Net")
    assert leaks(trace).verdict is LeakVerdict.STEADY


def test_a_program_that_only_loads_a_model_has_no_steps() -> None:
    recorder = Recorder()
    recorder.phase("setup")
    for _ in range(80):
        recorder.alloc("", MIB, Category.PARAMETERS, stack=(Frame(TRAIN, 3, "main"),))
    assert leaks(recorder.finish()).verdict is LeakVerdict.NO_STEPS


def test_a_kept_memory_without_a_rate_has_no_end() -> None:
    empty = KeptMemory(
        each=KeptEach.PASS, unit="pass of Net", every=0, times=8, bytes_each=0, place=None, evaluations=2
    )
    assert empty.evaluation_at_end(GIB) is None
