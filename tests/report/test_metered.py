"""Why a limit was passed: where first, and what was alive when most was."""

from vramfit.analysis import Measure
from vramfit.report.metered import render_out_of_memory, render_over_limit
from vramfit.trace import Category, DeviceOutcome, EventKind, Frame, Run, Source, TraceBuilder, TraceDevice
from vramfit.units import MIB


def run_of_three_blocks() -> Run:
    """30 MiB on line 1, 10 MiB on line 2, the first freed, then 5 MiB on line 3; each in a segment of its own."""
    builder = TraceBuilder(meta={"source": "card"})
    device = {"device": 0, "time_us": 1}
    for number, size in enumerate((30, 10, 5)):
        address = (number + 1) << 30
        if number == 2:
            for kind in (EventKind.FREE_REQUESTED, EventKind.FREE_COMPLETED):
                builder.append(kind, address=1 << 30, size=30 * MIB, block=30 * MIB, **device)
        builder.append(EventKind.SEGMENT_ALLOC, address=address, size=size * MIB, **device)
        stack = builder.stack((Frame(filename="train.py", line=number + 1, name="step"),))
        builder.append(
            EventKind.ALLOC,
            address=address,
            size=size * MIB,
            block=size * MIB,
            stack=stack,
            category=Category.ACTIVATIONS,
            **device,
        )
    outcome = DeviceOutcome(
        index=0,
        gpu="RTX 4090",
        total_bytes=24 << 30,
        context_bytes=0,
        stats={},
        peak_allocated_bytes=40 * MIB,
        peak_reserved_bytes=45 * MIB,
        peak_active_bytes=40 * MIB,
    )
    spec = TraceDevice(index=0, name="RTX 4090", total_bytes=24 << 30, context_bytes=0, segments=())
    return Run(
        trace=builder.finish(devices=(spec,)),
        devices=(outcome,),
        oom=None,
        warnings=(),
        ops=3,
        seconds_simulated=0.0,
        seconds_wall=0.0,
        exit_code=0,
        error=None,
        program=("train.py",),
        torch_version="2.13.0",
        platform="Linux",
        source=Source.CARD,
    )


def test_a_limit_of_reserved_bytes() -> None:
    """The segment passes it, the block behind it has the line; the tables are of the allocated peak."""
    text = render_over_limit(run_of_three_blocks(), device=0, measure=Measure.RESERVED, limit=42 * MIB)
    lines = text.splitlines()
    assert lines[0] == "peak reserved memory 45.00 MiB is over the limit of 42.00 MiB by 3.00 MiB"
    assert lines[1] == "  on RTX 4090, device 0"
    assert lines[2] == "  first passed at train.py:3"
    assert lines[3].startswith(
        "  where most was allocated, 40.00 MiB were reserved: 40.00 MiB in use, 0 B in gaps"
    )
    assert "40.00 MiB allocated, train.py:2" in text


def test_a_limit_of_allocated_bytes() -> None:
    text = render_over_limit(run_of_three_blocks(), device=0, measure=Measure.ALLOCATED, limit=20 * MIB)
    assert "first passed at train.py:1" in text
    assert "were reserved" not in text


def test_nothing_is_said_where_all_was_served() -> None:
    assert render_out_of_memory(run_of_three_blocks()) == ""
