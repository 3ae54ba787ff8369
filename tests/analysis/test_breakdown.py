from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.synthetic import MODEL, TRAIN, Recorder, fitting_run
from vramfit.analysis import Measure, ModuleNode, at, curves, lifetimes, peak, timeline
from vramfit.trace import Category, EventKind, Frame, MemoryTrace
from vramfit.units import MIB

OPERATIONS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 3 * MIB),
        st.sampled_from(list(Category)),
        st.integers(0, 1),
        st.sampled_from(["", "Net", "Net.h.0.mlp", "Net.h.1.mlp", "Net.head"]),
    ),
    max_size=40,
)


def program(operations: list[tuple[bool, int, Category, int, str]]) -> MemoryTrace:
    """Allocate, or free a block that is alive, on two devices."""
    recorder = Recorder(devices=2)
    alive: list[int] = []
    for is_free, size, category, device, module in operations:
        if is_free and alive:
            recorder.free(alive.pop(size % len(alive)))
        else:
            address = recorder.alloc("float32[1]", size + 1, category, module=module, device=device)
            alive.append(address)
    return recorder.finish()


def recount(trace: MemoryTrace, device: int) -> list[dict[int, tuple[int, int, int]]]:
    """After each event the blocks alive: address -> (block, size, category)."""
    alive: dict[int, tuple[int, int, int]] = {}
    states = []
    for row in range(len(trace)):
        if trace.device[row] == device:
            address = int(trace.address[row])
            if trace.kind[row] == EventKind.ALLOC:
                alive[address] = (int(trace.block[row]), int(trace.size[row]), int(trace.category[row]))
            elif trace.kind[row] == EventKind.FREE_REQUESTED:
                del alive[address]
        states.append(dict(alive))
    return states


def own_bytes(node: ModuleNode) -> int:
    return node.own_bytes + sum(own_bytes(child) for child in node.children)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS, st.integers(0, 1), st.sampled_from(list(Measure)))
def test_every_sum_equals_a_recount(
    operations: list[tuple[bool, int, Category, int, str]], device: int, measure: Measure
) -> None:
    trace = program(operations)
    states = recount(trace, device)
    allocated = [sum(block for block, _, _ in state.values()) for state in states]
    assert curves(trace, lifetimes(trace, device)).allocated.tolist() == allocated
    stacked = timeline(trace, device)
    assert stacked.categories.sum(axis=0).tolist() == allocated

    found = peak(trace, device, by=measure)
    row = found.moment.row
    state = states[row] if row >= 0 else {}
    if measure is Measure.ALLOCATED:
        assert found.allocated == max(allocated, default=0)
    sums: Counter[Category] = Counter()
    for block, _, category in state.values():
        sums[Category(category)] += block
    assert found.categories == {kind: sums[kind] for kind in Category}
    assert found.allocated == sum(sums.values())
    assert found.modules.total_bytes == own_bytes(found.modules) == found.allocated
    assert sum(group.total_bytes for group in found.tensors) + found.tensors_omitted[1] == found.allocated
    assert sum(group.count for group in found.tensors) == len(state)
    assert found.slack == sum(block - size for block, size, _ in state.values())
    fragments = found.fragmentation
    assert fragments.occupied == found.active == found.allocated
    assert fragments.reserved == fragments.occupied + fragments.inactive_split + fragments.releasable
    assert fragments.largest_free <= fragments.reserved - fragments.occupied


@settings(max_examples=50, deadline=None)
@given(OPERATIONS)
def test_the_reserved_peak_is_described_where_most_is_allocated(
    operations: list[tuple[bool, int, Category, int, str]],
) -> None:
    trace = program(operations)
    found = peak(trace, by=Measure.RESERVED)
    reserved = np.cumsum(
        np.where((trace.kind == EventKind.SEGMENT_ALLOC) & (trace.device == 0), trace.size, 0)
    )
    assert found.reserved == (int(reserved.max()) if len(reserved) else 0)


def test_the_peak_names_op_phase_and_line() -> None:
    found = peak(fitting_run().trace)
    assert found.moment.phase == "step 1/backward"
    assert found.moment.op == "aten.mm.default"
    assert found.moment.line == Frame(TRAIN, 34, "main")
    assert found.categories[Category.OPTIMIZER_STATE] == 2 * found.categories[Category.PARAMETERS]


def test_like_tensors_of_like_layers_are_one_group() -> None:
    found = peak(fitting_run().trace)
    group = next(
        group
        for group in found.tensors
        if group.tensor == "bfloat16[4, 1024, 3072]" and group.module == "GPT.h.*.mlp.up"
    )
    assert group.count == 12
    assert group.block_bytes == 24 * MIB
    assert group.total_bytes == 12 * 24 * MIB
    assert group.line == Frame(MODEL, 40, "forward")
    assert group.library_line is None, "the user's line is within the library's, so that adds nothing"


def test_a_library_between_torch_and_the_user_is_named_too() -> None:
    recorder = Recorder()
    layer = Frame("/venv/lib/python3.11/site-packages/timm/layers/mlp.py", 9, "forward")
    recorder.alloc("float32[8]", 32, Category.ACTIVATIONS, stack=(layer, Frame(TRAIN, 5, "main")))
    (group,) = peak(recorder.finish()).tensors
    assert group.line == Frame(TRAIN, 5, "main")
    assert group.library_line == layer


def test_groups_beyond_the_limit_are_counted() -> None:
    trace = fitting_run().trace
    few, all_of_them = peak(trace, tensors=3), peak(trace)
    assert len(few.tensors) == 3
    assert few.tensors == all_of_them.tensors[:3]
    assert few.tensors_omitted == (
        len(all_of_them.tensors) - 3,
        sum(group.total_bytes for group in all_of_them.tensors[3:]),
    )


def test_a_moment_outside_the_trace_is_refused() -> None:
    trace = fitting_run().trace
    assert at(trace, -1).allocated == 0
    with pytest.raises(IndexError, match="no event"):
        at(trace, len(trace))
