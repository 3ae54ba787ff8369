from __future__ import annotations

from pathlib import Path

import pytest
from tests.trace.programs import Recorder

from vramfit.trace import Category, EventKind, Frame, MemoryTrace, TraceBuilder, TraceDevice, read_any

RECORDINGS = Path(__file__).parents[1] / "data" / "traces"
NAMES = sorted(path.name for path in RECORDINGS.glob("*.json.gz"))


@pytest.fixture(scope="session")
def recordings() -> dict[str, MemoryTrace]:
    """All real recordings, read once."""
    return {name: read_any(RECORDINGS / name) for name in NAMES}


@pytest.fixture
def rich_trace() -> MemoryTrace:
    """A small trace that uses every column and table, on two devices."""
    recorder = Recorder()
    recorder.run(60, seed=3, streams=(0, 5))
    second = Recorder(device=1, builder=recorder.builder, conf="")
    second.run(20, seed=4)
    builder: TraceBuilder = recorder.builder
    stack = builder.stack((Frame("model.py", 12, "forward"), Frame("träin.py", 3, "<module>")))
    builder.append(
        EventKind.ALLOC,
        device=0,
        address=1 << 46,
        size=4096,
        block=4096,
        time_us=10**15,
        category=Category.ACTIVATIONS,
        op=builder.op("aten.mm.default"),
        stack=stack,
        module=builder.module("Net.linear"),
        phase=builder.phase("step 0/forward"),
        tensor=builder.tensor("float32[32, 32]"),
    )
    builder.append(EventKind.MARKER, device=1, time_us=10**15 + 1)
    builder.append(EventKind.OOM, device=1, address=77, size=5 << 30, stack=stack, time_us=10**15 + 2)
    devices = (
        TraceDevice(
            index=0,
            name="RTX 4090",
            total_bytes=24 << 30,
            context_bytes=400 << 20,
            segments=tuple(recorder.allocator.segments()),
        ),
        second.described(),
    )
    return builder.finish(devices)
