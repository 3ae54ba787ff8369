"""Growth across steps: planted traces with figures that a reader can add up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.synthetic import TORCH_LINEAR, TRAIN, Recorder, gpt_training
from vramfit.analysis import LeakReport, LeakVerdict, StepSource, leaks
from vramfit.trace import Category, EventKind, Frame, MemoryTrace, TraceBuilder

LEAK = (TORCH_LINEAR, Frame(TRAIN, 50, "train"))
OTHER = (TORCH_LINEAR, Frame(TRAIN, 60, "train"))
Body = Callable[[Recorder, int], None]


def program(body: Body, steps: int = 12, *, phases: bool = True) -> MemoryTrace:
    """A loop whose every step allocates an activation, runs ``body`` and frees the activation."""
    recorder = Recorder()
    for step in range(steps):
        if phases:
            recorder.phase(f"step {step}/forward")
        activation = recorder.alloc(
            "float32[100]", 400, Category.ACTIVATIONS, stack=(Frame(TRAIN, 40, "train"),)
        )
        body(recorder, step)
        recorder.free(activation)
    return recorder.finish()


def keep(recorder: Recorder, size: int, stack: tuple[Frame, ...] = LEAK) -> int:
    return recorder.alloc(
        f"uint8[{size}]", size, Category.OTHER, op="aten.clone.default", module="Net.h.3", stack=stack
    )


def report_of(body: Body, steps: int = 12) -> LeakReport:
    return leaks(program(body, steps))


@settings(max_examples=25, deadline=None)
@given(size=st.integers(1, 10**7), steps=st.integers(8, 20), blocks=st.integers(1, 3))
def test_a_planted_growth_is_estimated_exactly(size: int, steps: int, blocks: int) -> None:
    def body(recorder: Recorder, step: int) -> None:
        for _ in range(blocks):
            keep(recorder, size)

    found = report_of(body, steps)
    assert found.verdict is LeakVerdict.GROWING
    assert found.leaks
    (growing,) = found.growing
    assert growing.requested_per_step == size * blocks
    assert growing.bytes_per_step == found.bytes_per_step == -(-size // 512) * 512 * blocks
    assert growing.place.line == Frame(TRAIN, 50, "train")
    assert (growing.place.op, growing.place.module) == ("aten.clone.default", "Net.h.*")
    assert growing.place.tensor == f"uint8[{size}]"
    assert growing.first_step == 0
    assert growing.adjusted_p <= 1 / 720


def test_long_traces_are_thinned_out_and_the_estimate_stays_exact() -> None:
    found = report_of(lambda recorder, step: void(keep(recorder, 1000)), 500)
    assert len(found.levels) == 119
    assert (found.bytes_per_step, found.growing[0].requested_per_step) == (1024.0, 1000.0)


def test_a_training_run_without_a_leak_is_steady() -> None:
    recorder = Recorder()
    gpt_training(recorder, layers=2, iterations=12)
    found = leaks(recorder.finish())
    assert found.verdict is LeakVerdict.STEADY
    assert (found.tested, found.growing, found.bytes_per_step) == (0, (), 0.0)
    assert found.steps.source is StepSource.PHASES


def test_seven_steps_are_too_few_and_what_grew_is_listed() -> None:
    found = report_of(lambda recorder, step: void(keep(recorder, 1000)), 7)
    assert found.verdict is LeakVerdict.TOO_FEW_STEPS
    assert not found.leaks
    assert found.least_steps == 8
    assert [one.bytes_per_step for one in found.growing] == [1024.0]
    assert report_of(lambda recorder, step: void(keep(recorder, 1000)), 8).leaks


def void(_: object) -> None:
    """A lambda's value is not wanted."""


def test_a_leak_that_begins_late_tells_when() -> None:
    found = report_of(lambda recorder, step: void(keep(recorder, 512) if step >= 14 else None), 40)
    assert [one.first_step for one in found.growing] == [14]


def test_a_leak_every_fifth_step_is_found_with_its_mean() -> None:
    found = report_of(lambda recorder, step: void(keep(recorder, 5120) if step % 5 == 4 else None), 100)
    (growing,) = found.growing
    assert growing.bytes_per_step == pytest.approx(1024, rel=0.1)


def test_a_cache_rebuilt_larger_each_step_is_found() -> None:
    held: list[int] = []

    def body(recorder: Recorder, step: int) -> None:
        held.append(keep(recorder, 4096 * (step + 1)))
        if step:
            recorder.free(held[-2])

    (growing,) = report_of(body).growing
    assert growing.bytes_per_step == 4096
    assert growing.blocks == 1


def fills(recorder: Recorder, step: int) -> None:
    if step < 15:
        keep(recorder, 2048)


def test_a_cache_that_fills_is_settled() -> None:
    found = report_of(fills, 24)
    assert found.verdict is LeakVerdict.STEADY
    assert [(one.grown_bytes, one.last_step) for one in found.settled] == [(8 * 2048, 14)]


def first_step_only(recorder: Recorder, step: int) -> None:
    if step < 2:
        for line in range(40):
            keep(recorder, 4096, (Frame(TRAIN, 100 + line, "init"),))


class Buffer:
    """A buffer that is replaced whenever a larger batch comes, in powers of two."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.address = self.size = 0

    def __call__(self, recorder: Recorder, step: int) -> None:
        wanted = 1 << (self.random.randrange(1, 1 << 16) - 1).bit_length()
        if wanted > self.size:
            if self.size:
                recorder.free(self.address)
            self.address, self.size = keep(recorder, wanted), wanted


class Batches:
    """Lengths that vary; the last batch is held until the next one is there."""

    def __init__(self) -> None:
        self.random = random.Random(5)
        self.last: int | None = None

    def __call__(self, recorder: Recorder, step: int) -> None:
        new = keep(recorder, self.random.randrange(1, 1 << 16))
        if self.last is not None:
            recorder.free(self.last)
        self.last = new


class Sawtooth:
    """A list that is emptied every so many steps, or cycles that the collector frees."""

    def __init__(self, period: int) -> None:
        self.period, self.held = period, list[int]()

    def __call__(self, recorder: Recorder, step: int) -> None:
        self.held.append(keep(recorder, 10_000))
        if len(self.held) == self.period:
            for address in self.held:
                recorder.free(address)
            self.held.clear()


class Both:
    def __init__(self, *bodies: Body) -> None:
        self.bodies = bodies

    def __call__(self, recorder: Recorder, step: int) -> None:
        for body in self.bodies:
            body(recorder, step)


@pytest.mark.parametrize("steps", [8, 9, 12, 25, 60, 200])
@pytest.mark.parametrize(
    "make", [lambda: first_step_only, Buffer, Batches, lambda: Sawtooth(5), lambda: Sawtooth(4)]
)
def test_innocent_series_are_no_leak(make: Callable[[], Body], steps: int) -> None:
    found = report_of(make(), steps)
    assert found.verdict is LeakVerdict.STEADY
    assert found.growing == ()


def test_blocks_freed_at_one_blow_are_told() -> None:
    found = report_of(Sawtooth(5), 30)
    (one,) = found.sawteeth
    assert (one.times, one.steps, one.place.line) == (5, 4, Frame(TRAIN, 50, "train"))
    assert one.most_bytes == 4 * 10_240


def test_a_leak_is_found_beside_a_sawtooth_and_batches() -> None:
    def body(recorder: Recorder, step: int) -> None:
        keep(recorder, 3000, OTHER)

    found = report_of(Both(Sawtooth(5), Batches(), body), 30)
    assert [one.place.line for one in found.growing] == [Frame(TRAIN, 60, "train")]
    assert found.growing[0].bytes_per_step == 3072


def test_many_lines_of_one_leak_are_told_in_few_steps() -> None:
    """A kept graph: more stacks grow than six levels could prove one by one."""

    def body(recorder: Recorder, step: int) -> None:
        for line in range(60):
            keep(recorder, 1024, (Frame(TRAIN, 100 + line, "forward"),))

    found = report_of(body, 8)
    assert found.verdict is LeakVerdict.GROWING
    assert len(found.growing) == 60
    assert found.growing[0].adjusted_p > found.alpha


def test_freeing_everything_at_the_end_hides_nothing() -> None:
    recorder = Recorder()
    held = []
    for step in range(10):
        recorder.phase(f"step {step}/forward")
        held.append(keep(recorder, 700))
    for address in held:
        recorder.free(address)
    assert leaks(recorder.finish()).leaks


def test_blocks_without_a_stack_are_told_apart_by_size() -> None:
    found = report_of(
        lambda recorder, step: void((keep(recorder, 700, ()), recorder.free(keep(recorder, 9000, ()))))
    )
    (growing,) = found.growing
    assert (growing.place.stack, growing.place.line, growing.bytes_per_step) == (-1, None, 1024.0)


# -- steps -----------------------------------------------------------------------------------------------------------


def marked() -> Iterator[tuple[TraceBuilder, int]]:
    builder = TraceBuilder()
    for step in range(10):
        builder.append(
            EventKind.ALLOC,
            device=0,
            address=(step + 1) << 20,
            size=600,
            block=1024,
            stack=builder.stack(LEAK),
        )
        yield builder, step


def test_marks_tell_the_steps_where_no_phase_does() -> None:
    for builder, step in marked():
        builder.append(EventKind.MARKER, device=0, op=builder.op(f"epoch {step}"))
    found = leaks(builder.finish())
    assert (found.verdict, found.steps.source) == (LeakVerdict.GROWING, StepSource.MARKS)
    assert found.steps.unit == "mark “epoch #”"
    assert found.bytes_per_step == 1024


def test_a_line_that_repeats_tells_the_steps_but_only_raises_suspicion() -> None:
    def body(recorder: Recorder, step: int) -> None:
        keep(recorder, 5000)
        for _ in range(5):
            recorder.free(keep(recorder, 5000, OTHER))

    found = leaks(program(body, 12, phases=False))
    assert (found.verdict, found.steps.source) == (LeakVerdict.SUSPECTED, StepSource.REPEATS)
    assert not found.leaks
    assert found.steps.unit.startswith("repeat of project/train.py:")
    assert [one.bytes_per_step for one in found.growing] == [5120]


def test_what_was_met_at_the_beginning_is_no_repetition() -> None:
    """A recorder writes the blocks that it finds as allocated where it begins, by no operator."""
    trace = program(lambda recorder, _: keep(recorder, 5000), 12, phases=False)
    met = trace.op.copy()
    met[trace.kind == EventKind.ALLOC] = -1
    met[np.flatnonzero(trace.kind == EventKind.ALLOC)[-1]] = 0
    found = leaks(replace(trace, op=met))
    assert found.steps.source is StepSource.QUANTILES


def test_equal_parts_of_the_time_where_nothing_repeats() -> None:
    recorder = Recorder()
    for step in range(200):
        keep(recorder, 512, (Frame(TRAIN, 50, "train"), Frame(TRAIN, step, "main")))
    found = leaks(recorder.finish())
    assert (found.verdict, found.steps.source) == (LeakVerdict.NO_STEPS, StepSource.QUANTILES)
    assert not found.leaks
    assert found.bytes_per_step == pytest.approx(512 * 200 / 24, rel=0.05)


def test_a_model_being_built_by_one_line_raises_no_suspicion() -> None:
    recorder = Recorder()
    for _ in range(200):
        keep(recorder, 512)
    found = leaks(recorder.finish())
    assert found.verdict is LeakVerdict.NO_STEPS, "a model that is built grows, and is no iteration"
    assert found.steps.source is StepSource.REPEATS
    assert found.p_value < 1e-6


@pytest.mark.parametrize("events", [0, 1, 3])
def test_traces_with_next_to_nothing_are_too_short(events: int) -> None:
    recorder = Recorder()
    for _ in range(events):
        keep(recorder, 100)
    found = leaks(recorder.finish())
    assert (found.verdict, found.growing, found.levels) == (LeakVerdict.TOO_FEW_STEPS, (), ())


def test_given_boundaries_and_warmup_make_five_rounds_enough() -> None:
    trace = program(lambda recorder, step: void(keep(recorder, 512)), 7)
    starts = [int(np.flatnonzero(trace.phase == phase)[0]) - 1 for phase in range(7)]
    boundaries = np.array([*starts, len(trace) - 1, len(trace) - 1])
    found = leaks(trace, boundaries=boundaries, warmup=2)
    assert (found.verdict, found.levels) == (LeakVerdict.GROWING, tuple(512 * level for level in range(8)))
    assert found.p_value == pytest.approx(1 / 720)


@pytest.mark.parametrize("wrong", [{"alpha": 0.0}, {"alpha": 1.5}, {"warmup": -1}])
def test_impossible_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"is (not between|negative)"):
        leaks(Recorder().finish(), **wrong)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_trace_is_too_odd(data: st.DataObject) -> None:
    """Frees of nothing, doubled allocations, phases out of order, two devices: a report comes out all the same."""
    rows = data.draw(st.integers(0, 60))
    column = st.integers(-1, 3)
    builder = TraceBuilder()
    for name in ("setup", "step 2/forward", "step 0/forward", "step 1/backward"):
        builder.phase(name)
        builder.op(name)
    builder.stack(LEAK)
    builder.stack(OTHER)
    for _ in range(rows):
        builder.append(
            EventKind(data.draw(st.integers(0, 9))),
            device=data.draw(st.integers(0, 1)),
            address=data.draw(st.integers(0, 4)),
            size=data.draw(st.integers(0, 2000)),
            op=data.draw(column),
            phase=data.draw(column),
            stack=data.draw(st.integers(-1, 1)),
        )
    trace = builder.finish()
    for by in (None, *StepSource):
        if by is not StepSource.GIVEN:
            found = leaks(trace, data.draw(st.integers(0, 1)), by=by)
            assert len(found.levels) == max(0, len(found.steps) - 1)
