import pytest

from analysis.synthetic import Recorder, fitting_run
from vramfit.analysis import GrowthEvidence, growth, phases, summarise
from vramfit.trace import TEARDOWN, Category, EventKind, TraceBuilder
from vramfit.units import MIB


def leaking(iterations: int, leak: int) -> Recorder:
    recorder = Recorder()
    for iteration in range(iterations):
        recorder.phase(f"step {iteration}/forward")
        activation = recorder.alloc("", 64 * MIB, Category.ACTIVATIONS)
        if leak:
            recorder.alloc("", leak, Category.OTHER)
        recorder.phase(f"step {iteration}/backward")
        recorder.free(activation)
    return recorder


def test_each_phase_has_start_peak_and_end() -> None:
    found = {phase.name: phase for phase in phases(leaking(2, MIB).finish())}
    forward, backward = found["step 1/forward"], found["step 1/backward"]
    assert (forward.iteration, forward.part) == (1, "forward")
    assert (forward.start_allocated, forward.peak_allocated, forward.end_allocated) == (
        MIB,
        66 * MIB,
        66 * MIB,
    )
    assert backward.start_allocated == backward.peak_allocated == 66 * MIB, "it counts what it began with"
    assert backward.end_allocated == 2 * MIB
    assert forward.last_row < backward.first_row


def test_a_phase_entered_twice_is_one() -> None:
    recorder = Recorder()
    for size in (2, 8):
        recorder.phase("step 0/forward")
        first = recorder.alloc("", size * MIB, Category.ACTIVATIONS)
        recorder.phase("step 0/backward")
        recorder.free(first)
    found = {phase.name: phase for phase in phases(recorder.finish())}
    assert list(found) == ["step 0/forward", "step 0/backward"]
    assert found["step 0/forward"].peak_allocated == 8 * MIB
    assert found["step 0/backward"].end_allocated == 0


def test_the_worst_iteration_is_singled_out() -> None:
    summaries = {one.part: one for one in summarise(phases(fitting_run().trace))}
    assert list(summaries) == ["forward", "backward", "step"]
    backward = summaries["backward"]
    assert backward.count == 3
    assert backward.worst.name == "step 2/backward", "of equals the last, which has settled"
    assert backward.first.peak_allocated < backward.worst.peak_allocated


def test_phases_without_iterations_keep_their_name() -> None:
    recorder = Recorder()
    recorder.phase("inference")
    recorder.alloc("", MIB, Category.ACTIVATIONS)
    (phase,) = phases(recorder.finish())
    assert (phase.iteration, phase.part) == (None, "inference")


def test_a_trace_without_phases_has_none() -> None:
    recorder = Recorder()
    recorder.alloc("", MIB, Category.ACTIVATIONS)
    assert phases(recorder.finish()) == ()
    assert phases(TraceBuilder(devices=(), meta={}).finish()) == ()


def test_growth_is_the_steady_change() -> None:
    grown = growth(phases(leaking(6, MIB).finish()))
    assert grown.iterations == tuple(range(6))
    assert grown.end_allocated == tuple((number + 1) * MIB for number in range(6))
    assert grown.per_iteration == MIB


def test_a_steady_program_does_not_grow() -> None:
    assert growth(phases(leaking(6, 0).finish())).per_iteration == 0


def test_too_few_iterations_say_nothing_of_growth() -> None:
    assert growth(phases(leaking(3, MIB).finish())).per_iteration is None


def training(iterations: int, *, kept: int = 0, drops_first: bool = True, parameters: int = 0) -> Recorder:
    """Gradients of 64 MiB that each iteration drops at its start or its end; ``kept`` bytes stay from each."""
    recorder = Recorder()
    if parameters:
        recorder.alloc("", parameters, Category.PARAMETERS)
    gradients = None
    for iteration in range(iterations):
        recorder.phase(f"step {iteration}/forward")
        if kept:
            recorder.alloc("", kept, Category.OTHER)
        recorder.free(recorder.alloc("", MIB, Category.ACTIVATIONS))
        recorder.phase(f"step {iteration}/backward")
        gradients = recorder.alloc("", 64 * MIB, Category.GRADIENTS)
        recorder.phase(f"step {iteration}/optimizer")
        recorder.free(recorder.alloc("", MIB, Category.TEMPORARIES))
        if not drops_first or iteration + 1 < iterations:
            recorder.free(gradients)
    return recorder


@pytest.mark.parametrize("iterations", [4, 5, 9])
def test_gradients_that_only_the_last_iteration_still_holds_are_no_growth(iterations: int) -> None:
    grown = growth(phases(training(iterations).finish()))
    assert grown.end_allocated[-1] - grown.end_allocated[-2] == 64 * MIB
    assert grown.per_iteration == 0
    assert not grown.is_leak


def test_what_each_iteration_keeps_is_growth_whenever_gradients_are_dropped() -> None:
    for drops_first in (True, False):
        grown = growth(phases(training(6, kept=2 * MIB, drops_first=drops_first).finish()))
        assert grown.per_iteration == 2 * MIB
        assert grown.is_leak
        assert grown.evidence is GrowthEvidence.SIMILAR_RISES


@pytest.mark.parametrize(("steps", "rises"), [(3, 1), (4, 2), (5, 3)])
def test_too_few_rises_are_seen_and_not_called_a_leak(steps: int, rises: int) -> None:
    grown = growth(phases(training(steps, kept=2 * MIB).finish()))
    assert (grown.evidence, grown.rises, grown.last_rise) == (GrowthEvidence.TOO_FEW_STEPS, rises, 2 * MIB)
    assert grown.is_suspected
    assert not grown.is_leak


def test_a_small_last_rise_is_not_worth_a_sentence() -> None:
    grown = growth(phases(training(4, kept=MIB, parameters=200 * MIB).finish()))
    assert (grown.evidence, grown.last_rise) == (GrowthEvidence.TOO_FEW_STEPS, MIB)
    assert not grown.is_suspected


def test_three_rises_of_other_sizes_are_not_called_a_leak() -> None:
    recorder = Recorder()
    for iteration, size in enumerate([1, 1, 1, 2, 8, 3]):
        recorder.phase(f"step {iteration}/forward")
        recorder.free(recorder.alloc("", MIB, Category.ACTIVATIONS))
        recorder.alloc("", size * MIB, Category.OTHER)
    assert growth(phases(recorder.finish())).evidence is GrowthEvidence.TOO_FEW_STEPS


def test_from_seven_steps_on_the_test_of_explain_decides() -> None:
    grown = growth(phases(training(7, kept=2 * MIB).finish()))
    assert (grown.evidence, grown.is_leak) == (GrowthEvidence.TESTED, True)
    recorder = Recorder()
    for iteration in range(
        12
    ):  # rises until the eighth, and three times in a row at the end of the first eight
        recorder.phase(f"step {iteration}/forward")
        recorder.free(recorder.alloc("", MIB, Category.ACTIVATIONS))
        if iteration < 8:
            recorder.alloc("", 2 * MIB, Category.OTHER)
    assert growth(phases(recorder.finish())).evidence is GrowthEvidence.NONE


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_end_of_a_program_that_frees_everything_hides_no_growth(evaluates: bool) -> None:
    """A function that trains lets go of all that it held when it returns."""
    recorder, held = Recorder(), []
    for iteration in range(7):
        recorder.phase(f"step {iteration}/forward")
        held.append(recorder.alloc("", 2 * MIB, Category.OTHER))
        recorder.free(recorder.alloc("", MIB, Category.ACTIVATIONS))
    for address in held:
        recorder.free(address)
    if evaluates:
        recorder.free(recorder.alloc("", MIB, Category.OTHER))
    grown = growth(phases(recorder.finish()))
    assert grown.per_iteration == 2 * MIB
    assert grown.is_leak


def test_what_is_left_unevenly_counts_by_its_mean() -> None:
    recorder = Recorder()
    for iteration in range(10):
        recorder.phase(f"step {iteration}/forward")
        recorder.free(recorder.alloc("", MIB, Category.ACTIVATIONS))
        recorder.alloc("", (2 if iteration % 2 else 6) * MIB, Category.OTHER)
    grown = growth(phases(recorder.finish()))
    assert grown.per_iteration == 4 * MIB
    assert grown.is_leak


def test_the_slope_of_very_many_iterations_is_that_of_few() -> None:
    assert growth(phases(leaking(1500, MIB).finish())).per_iteration == MIB


def ended(*, told: bool) -> TraceBuilder:
    """Three steps that drop their gradients of 64 MiB at their ends, then all else goes: 8 MiB of a model."""
    recorder = Recorder()
    recorder.phase("setup")
    model = recorder.alloc("", 8 * MIB, Category.PARAMETERS)
    for iteration in (1, 2, 3):
        recorder.phase(f"step {iteration}/backward")
        gradients = recorder.alloc("", 64 * MIB, Category.GRADIENTS)
        recorder.phase(f"step {iteration}/optimizer")
        recorder.free(recorder.alloc("", MIB, Category.TEMPORARIES))
        recorder.builder.rest()
        if iteration < 3 or told:
            recorder.free(gradients)
    if told:
        recorder.phase(TEARDOWN)
        recorder.mark_phase()
    else:
        recorder.free(gradients)
    recorder.free(model)
    return recorder.builder


@pytest.mark.parametrize("told", [False, True])
def test_the_last_phase_ends_before_the_program_lets_go_of_what_it_holds(told: bool) -> None:
    trace = ended(told=told).finish(ended=True)
    found = phases(trace)
    assert [phase.end_allocated for phase in found if phase.part == "optimizer"] == [8 * MIB] * 3
    assert growth(found).end_allocated == (8 * MIB,) * 3
    assert TEARDOWN not in {phase.name for phase in found}
    assert trace.phases[trace.phase[-1]] == TEARDOWN


def test_a_program_that_is_not_over_has_no_teardown() -> None:
    assert TEARDOWN not in ended(told=False).finish().phases


def test_what_fails_after_the_last_work_is_no_teardown() -> None:
    builder = ended(told=False)
    builder.append(EventKind.OOM, device=0, size=MIB, phase=0)
    assert TEARDOWN not in builder.finish(ended=True).phases
