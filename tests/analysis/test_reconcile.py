"""Each planted difference is found as what it is, and the parts sum to the difference whatever it is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.reconciling import (
    CONTEXT,
    WORKSPACE,
    Give,
    Program,
    Take,
    late,
    outcome_of,
    predicted,
    recorded,
    serve,
    training,
    without_history,
)
from analysis.synthetic import MODEL, TRAIN, virtual_run
from vramfit.analysis import (
    Cause,
    Comparison,
    DeviceReconciliation,
    Part,
    Quantity,
    Reconciliation,
    Tolerance,
    When,
    check_device,
    reconcile,
)
from vramfit.errors import UsageError
from vramfit.trace import Actual, Category, DeviceFigures, Frame, Run, TraceBuilder, read_actual, read_any
from vramfit.units import MIB

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.json.gz"))
PROGRAM = training()
EXTRA_LINE = Frame(TRAIN, 99, "extra")


def only(found: Reconciliation) -> DeviceReconciliation:
    check_sums(found)
    (device,) = found.devices
    return device


def check_sums(found: Reconciliation) -> None:
    """Columns of parts sum to their figures, and the blocks that differ to the parts of the requests."""
    for device in found.devices:
        for comparison in device.comparisons:
            assert sum(part.predicted for part in comparison.parts) == comparison.predicted
            assert sum(part.recorded for part in comparison.parts) == comparison.recorded
            assert sum(part.difference for part in comparison.parts) == comparison.difference
            if device.requests is not None or device.when is When.SNAPSHOT:
                check_blocks(comparison)
        if device.counterfactual is not None:
            cause, reserved = device.counterfactual, of(device, Quantity.RESERVED)
            assert cause.by_requests + cause.by_settings + cause.by_allocator == reserved.difference


def check_blocks(comparison: Comparison) -> None:
    if comparison.quantity is Quantity.TOTAL:
        return
    for part, workspace in ((Part.REQUESTS, False), (Part.WORKSPACES, True)):
        total = sum(
            row.total
            for row in comparison.differing
            if row.cause is not Cause.ROUNDED and row.is_workspace == workspace
        )
        assert total == parts(comparison)[part]


def of(device: DeviceReconciliation, quantity: Quantity) -> Comparison:
    found = device.of(quantity)
    assert found is not None
    return found


def parts(comparison: Comparison) -> dict[Part, int]:
    return {part.part: part.difference for part in comparison.parts}


def differing(device: DeviceReconciliation, quantity: Quantity = Quantity.RESERVED) -> dict[Part, int]:
    return {part: amount for part, amount in parts(of(device, quantity)).items() if amount}


def with_extra(size: int = 30 * MIB, *, kept: bool = False) -> Program:
    """The program with one more temporary around the optimizer of the second step, where its peak is."""
    at = next(i for i, step in enumerate(PROGRAM) if isinstance(step, Take) and step.name == "g15up")
    take = Take("extra", size, Category.TEMPORARIES, "aten.erf.default", EXTRA_LINE)
    end = len(PROGRAM) if kept else next(i for i in range(at, len(PROGRAM)) if PROGRAM[i] == Give("g10up"))
    return [*PROGRAM[:at], take, *PROGRAM[at:end], Give("extra"), *PROGRAM[end:]]


# -- equal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "roundup_power2_divisions:4"])
def test_a_program_as_recorded_differs_in_nothing(conf: str, stacks: bool) -> None:
    found = reconcile(predicted(PROGRAM, conf=conf), recorded(PROGRAM, conf=conf, stacks=stacks))
    device = only(found)
    assert found.within
    assert [comparison.difference for comparison in device.comparisons[:2]] == [0, 0]
    assert not differing(device)
    assert not any(comparison.differing for comparison in device.comparisons)
    assert device.requests is not None
    assert device.requests.equal
    assert device.counterfactual is not None
    assert device.counterfactual.is_exact
    assert not any((device.counterfactual.by_requests, device.counterfactual.by_allocator))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".json")[0])
def test_a_recording_differs_from_itself_in_nothing(path: Path) -> None:
    trace = read_any(path)
    indices = [device.index for device in trace.devices if device.segments]
    outcomes = tuple(outcome_of(trace, device=index) for index in indices)
    found = reconcile(virtual_run(trace, devices=outcomes), read_actual(path))
    check_sums(found)
    assert [device.device for device in found.devices] == indices
    for device in found.devices:
        assert all(not differing(device, quantity) for quantity in (Quantity.ALLOCATED, Quantity.RESERVED))
        assert device.requests is not None
        assert device.requests.equal
        assert device.counterfactual is not None
        assert device.counterfactual.is_exact


# -- one planted difference each -----------------------------------------------------------------------------


@pytest.mark.parametrize("stacks", [False, True])
def test_an_extra_temporary_is_a_request_of_its_line(stacks: bool) -> None:
    device = only(reconcile(predicted(with_extra()), recorded(PROGRAM, stacks=stacks)))
    assert differing(device) == {Part.REQUESTS: 30 * MIB}
    assert differing(device, Quantity.ALLOCATED)[Part.REQUESTS] == 30 * MIB
    assert set(differing(device, Quantity.ALLOCATED)) == {Part.REQUESTS, Part.ELSEWHERE}
    (row,) = of(device, Quantity.RESERVED).differing
    assert (row.cause, row.count, row.total, row.is_near) == (Cause.EXTRA, 1, 30 * MIB, False)
    assert (row.label.op, row.label.line, row.label.category) == (
        "aten.erf.default",
        EXTRA_LINE,
        Category.TEMPORARIES,
    )
    assert device.requests is not None
    assert (device.requests.matched, device.requests.predicted) == (
        device.requests.recorded,
        device.requests.recorded + 1,
    )
    assert device.counterfactual is not None
    assert device.counterfactual.by_requests == of(device, Quantity.RESERVED).difference > 0
    assert device.counterfactual.by_allocator == device.counterfactual.by_settings == 0


@pytest.mark.parametrize("stacks", [False, True])
def test_a_missing_temporary_is_named_by_its_line_or_by_what_came_before(stacks: bool) -> None:
    device = only(reconcile(predicted(PROGRAM), recorded(with_extra(), stacks=stacks)))
    (row,) = of(device, Quantity.RESERVED).differing
    assert (row.cause, row.total, row.is_near) == (Cause.MISSING, -30 * MIB, not stacks)
    assert row.label.line == (EXTRA_LINE if stacks else Frame(MODEL, 33, "forward"))
    assert differing(device) == {Part.REQUESTS: -30 * MIB}


def test_a_missing_workspace_is_a_workspace() -> None:
    without = [step for step in PROGRAM if not isinstance(step, Take) or step.name != "w1"]
    fewer = only(reconcile(predicted(without), recorded(PROGRAM)))
    assert differing(fewer, Quantity.ALLOCATED) == {Part.WORKSPACES: -WORKSPACE}
    (row,) = of(fewer, Quantity.ALLOCATED).differing
    assert (row.cause, row.is_workspace, row.size) == (Cause.MISSING, True, WORKSPACE)
    more = only(reconcile(predicted(PROGRAM), recorded(without)))
    assert differing(more, Quantity.ALLOCATED) == {Part.WORKSPACES: WORKSPACE}


def test_a_workspace_from_before_the_recording_may_be_missing_too() -> None:
    without = [step for step in PROGRAM if not isinstance(step, Take) or step.name != "w0"]
    whole = recorded(PROGRAM)
    assert whole.trace is not None
    device = only(reconcile(predicted(without), late(whole, len(whole.trace) * 2 // 3)))
    assert differing(device, Quantity.ALLOCATED) == {Part.WORKSPACES: -WORKSPACE}


def test_rounding_of_requests_is_rounding() -> None:
    rounded = predicted(PROGRAM, conf="roundup_power2_divisions:4")
    device = only(reconcile(rounded, recorded(PROGRAM)))
    assert set(differing(device, Quantity.ALLOCATED)) == {Part.SLACK, Part.ELSEWHERE}
    found = parts(of(device, Quantity.RESERVED))
    assert found[Part.REQUESTS] == found[Part.WORKSPACES] == 0
    assert found[Part.SLACK] > 20 * MIB
    rows = of(device, Quantity.ALLOCATED).differing
    assert {row.cause for row in rows} == {Cause.ROUNDED}
    assert sum(row.total for row in rows) == parts(of(device, Quantity.ALLOCATED))[Part.SLACK]
    assert rows[0].size == 12 * MIB + 700
    assert device.counterfactual is not None
    assert device.counterfactual.by_requests == device.counterfactual.by_allocator == 0
    assert device.counterfactual.by_settings == of(device, Quantity.RESERVED).difference
    assert any("allocator settings differ" in note for note in device.notes)


def test_segments_of_another_size_are_free_memory_in_segments() -> None:
    sizes = [Take(f"b{number}", 9 * MIB) for number in range(21)]
    program: Program = [*sizes, *(Give(f"b{number}") for number in range(0, 20, 2))]
    device = only(reconcile(predicted(program, conf="large_segment_size_mb:200"), recorded(program)))
    assert set(differing(device)) <= {Part.FRAGMENTED, Part.CACHED}
    assert not differing(device, Quantity.ALLOCATED)
    reserved = of(device, Quantity.RESERVED)
    assert reserved.difference == sum(differing(device).values()) != 0
    assert device.counterfactual is not None
    assert device.counterfactual.by_settings == reserved.difference


def test_more_context_is_outside_pytorch() -> None:
    figures = DeviceFigures(outside=CONTEXT + 25 * MIB, gpu="NVIDIA GeForce RTX 4090")
    found = reconcile(predicted(PROGRAM), replace(recorded(PROGRAM), figures=(figures,)))
    device = only(found)
    total = of(device, Quantity.TOTAL)
    assert {part.part: part.difference for part in total.parts} == {Part.HELD: 0, Part.OUTSIDE: -25 * MIB}
    assert total.difference == -25 * MIB
    assert of(device, Quantity.RESERVED).difference == 0
    assert not any("recorded on" in note for note in device.notes)


def test_blocks_that_are_held_longer_say_so() -> None:
    at = next(i for i, step in enumerate(PROGRAM) if step == Give("a1.5.0"))
    end = next(i for i, step in enumerate(PROGRAM) if step == Give("g10up"))
    program = [*PROGRAM[:at], *PROGRAM[at + 1 : end], Give("a1.5.0"), *PROGRAM[end:]]
    device = only(reconcile(predicted(program), recorded(PROGRAM)))
    (row,) = of(device, Quantity.ALLOCATED).differing
    assert (row.cause, row.total) == (Cause.LONGER, 5 * MIB + 100)
    assert device.requests is not None
    assert device.requests.moved_frees == 1
    (row,) = of(only(reconcile(predicted(PROGRAM), recorded(program))), Quantity.ALLOCATED).differing
    assert (row.cause, row.total) == (Cause.SHORTER, -5 * MIB - 100)


def test_the_order_of_returns_between_the_same_requests_is_no_difference() -> None:
    at = next(i for i, step in enumerate(PROGRAM) if step == Give("a1.5.0"))
    program = [*PROGRAM[:at], *reversed(PROGRAM[at : at + 4]), *PROGRAM[at + 4 :]]
    device = only(reconcile(predicted(program), recorded(PROGRAM)))
    assert device.requests is not None
    assert device.requests.equal


# -- recordings of a part ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("stacks", [False, True])
def test_a_recording_that_begins_late_is_compared_with_its_stretch(share: float, stacks: bool) -> None:
    whole = recorded(PROGRAM, stacks=stacks)
    assert whole.trace is not None
    device = only(reconcile(predicted(PROGRAM), late(whole, int(share * len(whole.trace)))))
    assert not differing(device)
    assert not differing(device, Quantity.ALLOCATED)
    assert device.requests is not None
    assert device.requests.equal
    assert device.requests.before > 0
    assert device.requests.after == 0
    assert any("begins on a device in use" in note for note in device.notes)


def test_a_recording_that_ends_early_leaves_out_what_follows() -> None:
    growing = [*PROGRAM, Take("big", 500 * MIB)]
    run = predicted(growing)
    device = only(reconcile(run, recorded(PROGRAM)))
    assert not differing(device)
    assert device.requests is not None
    assert device.requests.equal
    assert device.requests.after == 1
    assert device.run_peak_reserved == run.devices[0].peak_reserved_bytes
    assert any("more outside the stretch" in note for note in device.notes)


def test_a_snapshot_without_history_is_compared_with_the_moment_most_like_it() -> None:
    at = next(i for i, step in enumerate(PROGRAM) if step == Give("g15up"))
    held = without_history(recorded(PROGRAM[:at]))
    device = only(reconcile(predicted(PROGRAM), held))
    assert device.when is When.SNAPSHOT
    assert not differing(device, Quantity.ALLOCATED)
    assert device.requests is None
    assert any("no history" in note for note in device.notes)
    extra = only(
        reconcile(predicted(PROGRAM), without_history(recorded([*PROGRAM[:at], Take("x", 7 * MIB)])))
    )
    assert differing(extra, Quantity.ALLOCATED) == {Part.REQUESTS: -7 * MIB}


def test_another_program_is_said_to_be_one() -> None:
    other: Program = [Take(f"x{number}", (number + 1) * 100_001) for number in range(200)]
    device = only(reconcile(predicted(PROGRAM), recorded(other)))
    assert any("is it the same program" in note for note in device.notes)


# -- any difference at all -----------------------------------------------------------------------------------


def perturbed(program: Program, seed: int, edits: int) -> Program:
    """Leave out, add, resize and delay at random; what is given back was always taken."""
    chance = random.Random(seed)
    steps = list(program)
    for number in range(edits):
        at = chance.randrange(len(steps))
        step, verb = steps[at], chance.choice(["drop", "add", "resize", "delay"])
        if verb == "add":
            end = chance.randrange(at, len(steps) + 1)
            steps.insert(end, Give(f"new{number}"))
            steps.insert(at, Take(f"new{number}", chance.choice([100, 5 * MIB + 100, 40 * MIB, WORKSPACE])))
        elif isinstance(step, Give):
            if verb == "delay":
                later = chance.randrange(at, len(steps))
                del steps[at]
                again = any(isinstance(s, Take) and s.name == step.name for s in steps[at : later + 1])
                if not again:
                    steps.insert(later, step)
        elif verb == "resize":
            steps[at] = replace(step, size=max(1, step.size + chance.randrange(-500, 3 * MIB)))
        elif verb == "drop":
            end = next((i for i in range(at, len(steps)) if steps[i] == Give(step.name)), None)
            if end is not None:
                del steps[end]
            del steps[at]
    return steps


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 60),
    st.sampled_from(["", "expandable_segments:True", "roundup_power2_divisions:8"]),
    st.booleans(),
    st.floats(0, 1),
)
def test_the_parts_sum_to_the_difference(
    seed: int, edits: int, conf: str, stacks: bool, share: float
) -> None:
    actual = recorded(perturbed(training(layers=3), seed, edits), conf=conf, stacks=stacks)
    assert actual.trace is not None
    if share > 0.3:
        actual = late(actual, int((share - 0.3) * len(actual.trace)))
    found = reconcile(predicted(training(layers=3)), replace(actual, figures=(DeviceFigures(outside=seed),)))
    device = only(found)
    assert {comparison.quantity for comparison in device.comparisons} == set(Quantity)
    assert device.requests is None or device.requests.matched <= device.requests.recorded


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(0, 40))
def test_the_parts_of_a_snapshot_without_history_sum_too(seed: int, edits: int) -> None:
    program = perturbed(training(layers=2, steps=2), seed, edits)
    held = without_history(recorded(program[: len(program) * 2 // 3]))
    only(reconcile(predicted(training(layers=2, steps=2)), held))


# -- figures alone -------------------------------------------------------------------------------------------


def against(**figures: object) -> DeviceReconciliation:
    run = predicted(PROGRAM)
    stats = {**run.devices[0].stats, "requested_bytes.all.peak": 900 * MIB}
    run = replace(run, devices=(replace(run.devices[0], stats=stats),))
    known = DeviceFigures(**figures)  # type: ignore[arg-type]
    return only(reconcile(run, Actual(name="card.json", figures=(known,))))


def test_figures_are_split_as_far_as_they_tell() -> None:
    peak = predicted(PROGRAM).devices[0]
    reserved = against(peak_reserved=peak.peak_reserved_bytes - 5)
    assert differing(reserved) == {Part.SEGMENTS: 5}
    both = against(peak_reserved=peak.peak_reserved_bytes - 5, peak_allocated=peak.peak_allocated_bytes - 3)
    assert differing(both) == {Part.BLOCKS: 3, Part.UNUSED: 2}
    requested = against(
        peak_reserved=peak.peak_reserved_bytes,
        peak_allocated=peak.peak_allocated_bytes - 3,
        peak_requested=900 * MIB - 2,
        outside=CONTEXT,
    )
    assert differing(requested) == {Part.REQUESTED: 2, Part.SLACK: 1, Part.UNUSED: -3}
    assert of(requested, Quantity.TOTAL).difference == 0
    own = against(
        whole_run=True,
        peak_allocated=peak.peak_allocated_bytes,
        peak_reserved=peak.peak_reserved_bytes,
        slack=0,
        workspaces=WORKSPACE,
    )
    assert differing(own)[Part.WORKSPACES] == WORKSPACE
    assert any("only figures" in note for note in own.notes)


# -- devices and the tolerance -------------------------------------------------------------------------------


def two_devices() -> Run:
    trace = serve(PROGRAM)
    return virtual_run(trace, devices=(outcome_of(trace), outcome_of(trace, device=1)))


def test_devices_are_compared_by_index() -> None:
    second = Actual(name="second", trace=serve(PROGRAM, device=1))
    single = reconcile(predicted(PROGRAM), second)
    assert [(device.device, device.recorded_device) for device in single.devices] == [(0, 1)]
    assert not differing(only(single))
    both = reconcile(two_devices(), second)
    assert [(device.device, device.recorded_device) for device in both.devices] == [(1, 1)]
    figures = tuple(DeviceFigures(device=index, peak_reserved=1) for index in (0, 5))
    several = Actual(name="card.json", figures=figures)
    assert any("also has device 5" in note for note in reconcile(predicted(PROGRAM), several).notes)
    chosen = reconcile(predicted(PROGRAM), several, device=5)
    assert [(device.device, device.recorded_device) for device in chosen.devices] == [(0, 5)]


def test_nothing_to_compare_is_an_error() -> None:
    figures = Actual(
        name="card.json", figures=tuple(DeviceFigures(device=i, peak_reserved=1) for i in (4, 5))
    )
    with pytest.raises(UsageError, match="of devices 4, 5, which the run does not have"):
        reconcile(predicted(PROGRAM), figures)
    with pytest.raises(UsageError, match="knows nothing of device 2"):
        check_device(figures, 2)
    with pytest.raises(UsageError, match="no memory of any device"):
        check_device(Actual(name="empty", trace=TraceBuilder().finish()), None)
    with pytest.raises(UsageError, match="saw no card"):
        reconcile(replace(predicted(PROGRAM), devices=()), figures)


def test_two_programs_that_use_no_card_are_equal() -> None:
    unused = Actual(name="unused.vft", trace=serve([]))
    found = reconcile(predicted([]), unused)
    assert found.within
    assert found.devices[0].notes == ()


def test_other_versions_and_cards_are_noted() -> None:
    figures = DeviceFigures(peak_reserved=1, torch="2.6.0+cu124", gpu="NVIDIA A100-SXM4-80GB")
    found = reconcile(predicted(PROGRAM), Actual(name="card.json", figures=(figures,)))
    assert found.notes == ("recorded with torch 2.6.0+cu124, predicted with 2.13.0",)
    assert found.devices[0].notes[0] == "recorded on NVIDIA A100-SXM4-80GB, predicted for RTX 4090"
    failed = reconcile(replace(predicted(PROGRAM), exit_code=1), recorded(PROGRAM))
    assert failed.notes == ("the program failed, so the prediction ends there",)


@pytest.mark.parametrize(
    ("text", "recorded_bytes", "bound"),
    [("1%", 1000, 10), ("0.5 %", 1000, 5), ("0%", 1000, 0), ("50MiB", 1, 50 * MIB), ("7B", 1000, 7)],
)
def test_tolerances(text: str, recorded_bytes: int, bound: int) -> None:
    tolerance = Tolerance.parse(text)
    assert tolerance.bound(recorded_bytes) == bound
    assert tolerance.allows(-bound, recorded_bytes)
    assert not tolerance.allows(bound + 1, recorded_bytes)


@pytest.mark.parametrize("text", ["", "%", "one percent", "-1%", "1%%", "nan%"])
def test_what_is_no_tolerance(text: str) -> None:
    with pytest.raises(UsageError, match="not a tolerance"):
        Tolerance.parse(text)


def test_every_quantity_must_be_within() -> None:
    figures = DeviceFigures(outside=CONTEXT + 100 * MIB)
    actual = replace(recorded(PROGRAM), figures=(figures,))
    run = predicted(PROGRAM)
    assert not reconcile(run, actual, tolerance=Tolerance.parse("50MiB")).within
    assert reconcile(run, actual, tolerance=Tolerance.parse("100MiB")).within
    assert not reconcile(run, actual, tolerance=Tolerance.parse("1%")).within
