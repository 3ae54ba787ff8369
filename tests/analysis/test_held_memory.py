"""What names held beyond their use: moments, what a backward pass has used, and what would free it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from analysis.synthetic import TRAIN, Recorder
from vramfit.analysis import HeldAt, held
from vramfit.analysis.held_remedies import remedy
from vramfit.holders.chains import Root, Through
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.trace.holder_notes import (
    HOLDERS,
    Beyond,
    HolderNote,
    holder_notes,
    least_bytes,
    notes_text,
    spans,
)
from vramfit.units import GIB, MIB

NOTE = HolderNote(
    name="kept",
    where="train",
    root=Root.GLOBAL.value,
    through=(),
    chain="train.kept[0]",
    kind="list",
    elements=0,
    reason=Beyond.UNUSED,
    device=0,
    rows=(),
)
LINE = (Frame(TRAIN, 7, "main"),)


def traced(recorder: Recorder, *notes: HolderNote) -> MemoryTrace:
    trace = recorder.finish()
    return replace(trace, meta={**trace.meta, HOLDERS: notes_text(notes)})


def block(recorder: Recorder, size: int = 64 * MIB) -> tuple[int, int]:
    """The address and the row of a new block."""
    address = recorder.alloc("float32[4]", size, Category.TEMPORARIES, op="aten.relu.default", stack=LINE)
    return address, len(recorder.builder) - 1


def test_bytes_are_those_at_the_peak_and_only_from_when_on_they_count() -> None:
    recorder = Recorder()
    _, early = block(recorder)
    late_address, late = block(recorder)
    top, _ = block(recorder, GIB)
    peak = len(recorder.builder) - 1
    recorder.free(top)
    recorder.free(late_address)
    note = replace(NOTE, rows=((early, early, early + 1), (late, late, peak + 1)))
    (found,) = held(traced(recorder, note))
    assert (found.moment, found.bytes, found.count, found.end_bytes) == (HeldAt.PEAK, 64 * MIB, 1, 64 * MIB)
    assert (found.line, found.op) == (LINE[0], "aten.relu.default")


def test_a_moment_within_two_percent_of_the_peak_counts_as_it() -> None:
    """Only one of many alike steps is looked at."""
    recorder = Recorder()
    first, _ = block(recorder, GIB)
    recorder.free(first)
    kept, row = block(recorder)
    second, _ = block(recorder, GIB - 70 * MIB)
    recorder.free(second)
    recorder.free(kept)
    (found,) = held(traced(recorder, replace(NOTE, rows=((row, row, row),))))
    assert (found.moment, found.bytes, found.end_bytes) == (HeldAt.PEAK, 64 * MIB, 0)


def test_what_is_left_when_the_peak_is_long_past_is_of_the_end() -> None:
    recorder = Recorder()
    first, _ = block(recorder, GIB)
    recorder.free(first)
    _, row = block(recorder)
    (found,) = held(traced(recorder, replace(NOTE, rows=((row, row, row),))))
    assert (found.moment, found.bytes) == (HeldAt.END, 64 * MIB)


def test_where_the_program_ran_out_that_moment_counts() -> None:
    recorder = Recorder()
    gone, early = block(recorder)
    recorder.free(gone)
    _, row = block(recorder)
    recorder.oom(GIB)
    (found,) = held(traced(recorder, replace(NOTE, rows=((early, early, early), (row, row, row)))))
    assert (found.moment, found.count) == (HeldAt.RAN_OUT, 1)


@pytest.mark.parametrize("backward", [True, False])
def test_a_graph_counts_unless_a_backward_pass_may_have_used_it(backward: bool) -> None:
    recorder = Recorder()
    recorder.phase("step 0/forward")
    address, row = block(recorder)
    recorder.phase("step 0/backward" if backward else "step 0/forward")
    other, _ = block(recorder, MIB)
    recorder.free(address)
    recorder.phase("step 1/backward")  # after it has gone
    recorder.free(other)
    found = held(traced(recorder, replace(NOTE, reason=Beyond.GRAPH, rows=((row, row, row),))))
    assert [one.bytes for one in found] == ([] if backward else [64 * MIB])


def test_little_memory_is_not_reported() -> None:
    assert (least_bytes(GIB // 2), least_bytes(100 * GIB)) == (16 * MIB, 2 * GIB)
    recorder = Recorder()
    _, row = block(recorder, 16 * MIB - 512)
    assert held(traced(recorder, replace(NOTE, rows=((row, row, row),)))) == ()
    block(recorder, 10 * GIB)
    _, large = block(recorder, 100 * MIB)
    assert held(traced(recorder, replace(NOTE, rows=((large, large, large),)))) == ()


def test_another_device_and_a_trace_without_notes_say_nothing() -> None:
    recorder = Recorder()
    _, row = block(recorder)
    trace = traced(recorder, replace(NOTE, device=1, rows=((row, row, row),)))
    assert held(trace, 0) == ()
    assert held(recorder.finish()) == ()


def test_notes_survive_their_text_and_what_cannot_be_read_is_left_out() -> None:
    note = replace(NOTE, rows=spans({3: 9, 4: 9, 5: 8, 9: 8}), through=(Through.CLOSURE.value,))
    assert note.rows == ((3, 4, 9), (5, 5, 8), (9, 9, 8))
    assert holder_notes({HOLDERS: notes_text([note])}) == (note,)
    assert holder_notes({HOLDERS: "[1]"}) == holder_notes({HOLDERS: "{"}) == holder_notes({}) == ()
    foreign = json.dumps([{"name": "kept"}])
    assert holder_notes({HOLDERS: foreign}) == ()


def test_rows_beyond_the_trace_do_no_harm() -> None:
    recorder = Recorder()
    block(recorder)
    assert held(traced(recorder, replace(NOTE, rows=((7, 99, 7),)))) == ()


LOCAL = {"root": Root.LOCAL.value, "where": "evaluate() (train.py:17)", "name": "total"}
TENSOR = {"kind": "torch.Tensor", "elements": 1}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "empty kept when its values have been used, or put x.detach().cpu() into it"),
        ({"kind": "dict", "rows": ((1, 4, 5),)}, "del kept when it has been used, or keep it on the CPU"),
        (
            {"kind": "dict", "rows": tuple((row, row, row) for row in range(3))},
            "remove from kept what has been used, or put x.detach().cpu() into it",
        ),
        (
            {"kind": "torch.Tensor"},
            "del kept when it has been used, or move it to the CPU until it is used again",
        ),
        ({"reason": Beyond.ERROR}, "keep str(error) in kept instead of the error"),
        ({"reason": Beyond.CYCLE, "root": Root.DEAD_CYCLE.value}, "gc.collect() after the last use"),
        (
            {"reason": Beyond.CYCLE, "root": Root.GRAPH_CYCLE.value},
            "break the cycle with ctx.save_for_backward",
        ),
        ({"reason": Beyond.GRAPH}, "torch.no_grad() around these passes, or put x.detach()"),
        (
            {"reason": Beyond.GRAPH, **LOCAL, **TENSOR},
            "torch.no_grad() in evaluate(), or add loss.item() to total",
        ),
        ({"reason": Beyond.NO_MODULE}, "save the state_dict() of models in kept"),
        (
            {"reason": Beyond.NO_MODULE, "name": "schedule.optimizer", "kind": "torch.optim.adamw.AdamW"},
            "del schedule, which keeps the optimizer",
        ),
        ({"through": (Through.CACHE.value,), "name": "table"}, "table.cache_clear()"),
        ({"through": (Through.GENERATOR.value,)}, "close the generator"),
        ({"through": (Through.CLOSURE.value,), "name": "seen in the closure of f"}, "empty seen after use"),
        ({"through": (Through.HOOK.value,), "kind": "torch.Tensor"}, "let the hook keep x.detach().cpu()"),
        ({"kind": "torch.Tensor", "name": "model.last"}, "set model.last to None"),
    ],
)
def test_the_remedy_is_that_of_the_holder(changes: dict[str, object], told: str) -> None:
    assert remedy(replace(NOTE, **changes)).startswith(told)


def test_what_torch_load_made_is_loaded_elsewhere_and_the_cpu_is_not_moved_to_itself() -> None:
    checkpoint = replace(NOTE, name="checkpoint", kind="dict")
    loaded = 'del checkpoint when it has been loaded, or torch.load(..., map_location="cpu")'
    assert remedy(checkpoint, loaded=True) == loaded
    assert remedy(checkpoint, loaded=True, on_card=False) == "del checkpoint when it has been loaded"
    assert remedy(NOTE, on_card=False) == "empty kept when its values have been used"
