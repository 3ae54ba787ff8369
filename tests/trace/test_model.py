from __future__ import annotations

import numpy as np
import pytest

from vramfit.trace import Category, EventKind, Frame, MemoryTrace, TraceBuilder, TraceDevice
from vramfit.trace.model import COLUMNS


def build(rows: int = 3) -> TraceBuilder:
    builder = TraceBuilder(devices=(TraceDevice(index=0),), meta={"source": "virtual"})
    for row in range(rows):
        builder.append(EventKind.ALLOC, device=0, address=row << 9, size=row, block=512, time_us=row)
    return builder


def test_builder_interns_names_and_stacks() -> None:
    builder = build()
    stack = (Frame("a.py", 1, "f"), Frame("b.py", 2, "g"))
    assert builder.op("aten.mm") == builder.op("aten.mm") == 0
    assert builder.op("aten.add") == 1
    first = builder.stack(stack)
    assert builder.stack(tuple(stack)) == first
    other = builder.stack(stack[1:])
    assert other != first
    assert builder.frames_of(first) == stack
    assert builder.frames_of(-1) == ()
    trace = builder.finish()
    assert trace.ops == ("aten.mm", "aten.add")
    assert [tuple(trace.frames[index] for index in stack) for stack in trace.stacks] == [stack, stack[1:]]


def test_builder_changes_metadata_afterwards() -> None:
    builder = build()
    row = builder.append(EventKind.ALLOC, device=0, category=Category.OTHER)
    builder.set_category(row, Category.GRADIENTS)
    builder.set_module(row, builder.module("Net"))
    builder.set_tensor(row, builder.tensor("int8[1]"))
    assert builder.category(row) is Category.GRADIENTS
    trace = builder.finish()
    assert (trace.category[row], trace.module[row], trace.tensor[row]) == (Category.GRADIENTS, 0, 0)


def test_finished_trace_is_independent_and_read_only() -> None:
    builder = build()
    trace = builder.finish()
    builder.append(EventKind.OOM, device=0)
    assert len(trace) == 3
    assert len(builder) == 4
    with pytest.raises(ValueError, match="read-only"):
        trace.size[0] = 5


def test_columns_have_their_types_and_one_length() -> None:
    trace = build().finish()
    assert {name: getattr(trace, name).dtype for name in COLUMNS} == {
        name: np.dtype(dtype) for name, dtype in COLUMNS.items()
    }
    columns = {name: getattr(trace, name) for name in COLUMNS}
    with pytest.raises(ValueError, match="column size"):
        MemoryTrace(**{**columns, "size": columns["size"][:2]})


def test_equals_sees_every_part(rich_trace: MemoryTrace) -> None:
    from dataclasses import replace

    assert rich_trace.equals(replace(rich_trace))
    assert not rich_trace.equals("a trace")
    assert not rich_trace.equals(build().finish())
    for name in COLUMNS:
        changed = getattr(rich_trace, name).copy()
        changed[0] += 1
        assert not rich_trace.equals(replace(rich_trace, **{name: changed})), name
    assert not rich_trace.equals(replace(rich_trace, ops=("other",)))
    assert not rich_trace.equals(replace(rich_trace, meta={}))
    assert not rich_trace.equals(replace(rich_trace, devices=rich_trace.devices[:1]))
    shorter = replace(rich_trace.devices[0], segments=rich_trace.devices[0].segments[:1])
    assert not rich_trace.equals(replace(rich_trace, devices=(shorter, rich_trace.devices[1])))


def test_for_device_keeps_order_and_tables(rich_trace: MemoryTrace) -> None:
    one = rich_trace.for_device(1)
    assert set(one.device.tolist()) == {1}
    assert one.address.tolist() == rich_trace.address[rich_trace.device == 1].tolist()
    assert one.stacks == rich_trace.stacks
    assert [device.index for device in one.devices] == [1]
