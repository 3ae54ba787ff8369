"""Two runs compared: what stays the same, what moves, and that the parts sum to the whole."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.synthetic import (
    MODEL,
    TORCH_LINEAR,
    TRAIN,
    TRAINER,
    Recorder,
    fitting_run,
    gpt_training,
    oom_run,
)
from vramfit.analysis import (
    Change,
    PeakState,
    diff,
    diff_states,
    state_from_trace,
    states_from_report,
    verdict,
)
from vramfit.errors import TraceFormatError, UsageError
from vramfit.report import to_json
from vramfit.trace import Category, EventKind, Frame, MemoryTrace
from vramfit.units import MIB

STACK = (TORCH_LINEAR, Frame(MODEL, 40, "forward"), TRAINER, Frame(TRAIN, 33, "main"))


def one(
    size: int = MIB,
    *,
    count: int = 1,
    stack: tuple[Frame, ...] = STACK,
    op: str = "aten.addmm.default",
    module: str = "GPT.h.0.mlp",
    category: Category = Category.ACTIVATIONS,
    tensor: str = "float32[8]",
) -> MemoryTrace:
    recorder = Recorder()
    for _ in range(count):
        recorder.alloc(tensor, size, category, op=op, module=module, stack=stack)
    return recorder.finish()


def moved(stack: tuple[Frame, ...], lines: int) -> tuple[Frame, ...]:
    return tuple(frame._replace(line=frame.line + lines) for frame in stack)


def test_a_run_is_like_itself() -> None:
    trace = fitting_run().trace
    found = diff(trace, trace)
    assert found.same
    assert found.changes == ()
    assert not found.modules


def test_a_larger_batch_grows_activations_alone() -> None:
    before, after = Recorder(), Recorder()
    gpt_training(before)
    gpt_training(after, layers=13)
    found = diff(before.finish(), after.finish())
    assert found.allocated is not None
    assert found.allocated.difference > 0
    assert sum(change.size.difference for change in found.changes) == found.allocated.difference
    assert sum(pair.difference for pair in found.categories.values()) == found.allocated.difference
    assert sum(pair.difference for pair in found.modules.values()) == found.allocated.difference
    assert {change.change for change in found.changes} == {Change.GREW}


@pytest.mark.parametrize(
    ("after", "line"),
    [
        pytest.param(one(2 * MIB, stack=moved(STACK, 3)), 43, id="lines moved"),
        pytest.param(one(2 * MIB, op="aten.linear.default"), 40, id="another operator"),
        pytest.param(one(2 * MIB, module="GPT.h.7.mlp"), 40, id="another layer"),
        pytest.param(one(2 * MIB, tensor="float32[16]"), 40, id="another shape"),
        pytest.param(
            one(
                2 * MIB,
                stack=tuple(f._replace(filename=f.filename.replace("/home/ada", "/build/7")) for f in STACK),
            ),
            40,
            id="another checkout",
        ),
    ],
)
def test_the_same_code_is_recognised(after: MemoryTrace, line: int) -> None:
    (change,) = diff(one(), after).changes
    assert change.change is Change.GREW
    assert (change.size.before, change.size.after) == (MIB, 2 * MIB)
    assert change.line_before is not None
    assert change.line_after is not None
    assert (change.line_before.line, change.line_after.line) == (40, line)


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(one(stack=(TORCH_LINEAR, Frame(MODEL, 40, "backward"))), id="another function"),
        pytest.param(one(stack=(*STACK[:3], Frame(TRAIN, 33, "evaluate"))), id="another caller"),
        pytest.param(one(module="GPT.wte"), id="another module"),
        pytest.param(one(category=Category.PARAMETERS), id="another category"),
    ],
)
def test_other_code_is_new(after: MemoryTrace) -> None:
    assert {change.change for change in diff(one(), after).changes} == {Change.NEW, Change.GONE}


def test_of_what_moved_those_of_the_same_shape_belong_together() -> None:
    before, after = Recorder(), Recorder()
    for recorder, lines in ((before, 0), (after, 5)):
        for number, shape in enumerate(("float32[1]", "float32[2]")):
            line = (Frame(MODEL, 10 + number + lines, "forward"),)
            size = MIB * (1 + number) * (2 if number and lines else 1)
            recorder.alloc(shape, size, Category.ACTIVATIONS, op="aten.mm.default", stack=line)
    (change,) = diff(before.finish(), after.finish()).changes
    assert (change.tensor_before, change.tensor_after) == ("float32[2]", "float32[2]")
    assert (change.size.before, change.size.after) == (2 * MIB, 4 * MIB)


def test_a_recording_without_categories_compares() -> None:
    (change,) = diff(one(category=Category.OTHER), one(2 * MIB)).changes
    assert change.change is Change.GREW
    assert change.category is Category.ACTIVATIONS


def test_what_one_side_does_not_know_is_left_aside() -> None:
    """As between a trace and a torch snapshot of the same run, which has stacks alone."""
    whole = fitting_run().trace
    bare = replace(
        whole,
        category=whole.category * 0,
        op=whole.op * 0 - 1,
        module=whole.module * 0 - 1,
        tensor=whole.tensor * 0 - 1,
    )
    for pair in ((whole, bare), (bare, whole)):
        found = diff(*pair)
        assert found.same, found.changes


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 9)), max_size=12),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 9)), max_size=12),
)
def test_changes_always_sum_to_the_difference(
    before: list[tuple[int, int, int]], after: list[tuple[int, int, int]]
) -> None:
    traces = []
    for blocks in (before, after):
        recorder = Recorder()
        for line, op, size in blocks:
            stack = (Frame(MODEL, 10 + line, f"f{line % 2}"),)
            recorder.alloc("", size * MIB, Category(op), op=f"aten.op{op}.default", stack=stack)
        traces.append(recorder.finish())
    found = diff(*traces)
    assert found.allocated is not None
    if found.detailed:
        assert sum(change.size.difference for change in found.changes) == found.allocated.difference
    turned = diff(traces[1], traces[0])
    assert sorted(change.size.difference for change in found.changes) == sorted(
        -change.size.difference for change in turned.changes
    )


class TestReports:
    def report(self, run: object = None) -> dict[str, object]:
        found = fitting_run() if run is None else run
        document: dict[str, object] = json.loads(json.dumps(to_json(found, verdict(found))))  # type: ignore[arg-type]
        return document

    def test_a_report_is_like_the_trace_it_was_made_of(self) -> None:
        run = fitting_run()
        (state,) = states_from_report(self.report(run), "base.json")
        found = diff(state, state_from_trace(run.trace, name="now"))
        assert found.same, found.changes
        assert found.detailed

    def test_a_run_that_ran_out_is_taken_at_that_moment(self) -> None:
        run = oom_run()
        (state,) = states_from_report(self.report(run))
        assert state.ran_out
        assert state_from_trace(run.trace).ran_out
        assert diff(state, state_from_trace(run.trace)).same

    def test_what_the_list_omits_is_told(self) -> None:
        run = fitting_run()
        document = json.loads(json.dumps(to_json(run, verdict(run, tensors=2))))
        (state,) = states_from_report(document)
        found = diff(state, state_from_trace(run.trace))
        assert found.allocated is not None
        assert found.allocated.difference == 0
        listed = sum(change.size.difference for change in found.changes)
        assert listed + found.omitted.difference == 0
        assert found.omitted.before > 0

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("devices",), {}),
            (("devices",), [3]),
            (("devices", 0, "index"), "0"),
            (("devices", 0, "peak"), None),
            (("devices", 0, "categories", "parameters"), 1.5),
            (("tensors", 0, "total_bytes"), "many"),
            (("tensors", 0, "line"), 7),
            (("modules", 0, "path"), 1),
            (("phases",), None),
        ],
    )
    def test_a_damaged_report_is_told(self, path: tuple[str | int, ...], value: object) -> None:
        document = self.report()
        target: object = document
        for step in path[:-1]:
            target = target[step]  # type: ignore[index]
        target[path[-1]] = value  # type: ignore[index]
        with pytest.raises(TraceFormatError, match=r"base.json: .*not what a report"):
            states_from_report(document, "base.json")


class TestDevices:
    def test_shared_devices_are_compared(self) -> None:
        before = [PeakState(name="a", device=0, allocated=1), PeakState(name="a", device=1, allocated=5)]
        after = [PeakState(name="b", device=1, allocated=7), PeakState(name="b", device=2, allocated=9)]
        (found,) = diff_states(before, after)
        assert found.allocated is not None
        assert found.allocated.difference == 2

    def test_single_devices_need_not_have_the_same_index(self) -> None:
        (found,) = diff_states(
            [PeakState(name="a", device=0, reserved=1)], [PeakState(name="b", device=3, reserved=1)]
        )
        assert found.same

    def test_no_device_in_common(self) -> None:
        before = [PeakState(name="a", device=0), PeakState(name="a", device=2)]
        with pytest.raises(UsageError, match="a and b have no device in common") as caught:
            diff_states(before, [PeakState(name="b", device=5)])
        assert caught.value.hint == "They have devices 0, 2 and device 5"
        with pytest.raises(UsageError, match="b has no device 2"):
            diff_states(before, [PeakState(name="b", device=5)], 2)


def test_an_error_that_was_caught_is_not_the_end() -> None:
    recorder = Recorder()
    recorder.alloc("a", 8 * MIB, Category.ACTIVATIONS)
    recorder.oom(64 * MIB)
    assert state_from_trace(recorder.finish()).ran_out
    recorder.alloc("b", 4 * MIB, Category.ACTIVATIONS)
    trace = recorder.finish()
    assert (trace.kind == EventKind.OOM).sum() == 1
    assert not state_from_trace(trace).ran_out


def test_figures_alone_tell_no_changes() -> None:
    found = diff(PeakState(name="card.json", device=0, reserved=5), state_from_trace(one()))
    assert not found.detailed
    assert found.changes == ()
    assert found.allocated is None
    assert found.reserved is not None
    assert replace(found, reserved=None).categories == {}
