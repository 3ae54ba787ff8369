from pathlib import Path

import numpy as np
import pytest

from analysis.synthetic import Recorder
from vramfit.analysis import fragmentation, lifetimes, segment_spans
from vramfit.trace import Category, EventKind, MemoryTrace, TraceBuilder, TraceDevice, read_any
from vramfit.units import MIB

TRACES = sorted((Path(__file__).parents[1] / "data/traces").glob("*.json.gz"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_the_spans_sum_to_the_reserved_bytes_at_any_moment(path: Path) -> None:
    trace = read_any(path)
    for device in {found.index for found in trace.devices}:
        spans, lives = segment_spans(trace, device), lifetimes(trace, device)
        for row in np.linspace(-1, len(trace) - 1, 25).astype(int).tolist():
            held = spans.held(row)
            reserved = int((spans.end[held] - spans.start[held]).sum())
            assert reserved == fragmentation(trace, lives, row).reserved, row


def test_spans_of_one_moment_do_not_overlap() -> None:
    trace = read_any(next(path for path in TRACES if "expandable" in path.name))
    spans = segment_spans(trace, 0)
    assert spans.expandable.all()
    held = spans.held(len(trace) - 1)
    assert (spans.start[held][1:] >= spans.end[held][:-1]).all()


def test_a_segment_that_comes_and_goes() -> None:
    builder = TraceBuilder(devices=[TraceDevice(index=0)])
    for kind, address, size in (
        (EventKind.SEGMENT_ALLOC, 1000 * MIB, 20 * MIB),
        (EventKind.SEGMENT_FREE, 1000 * MIB, 20 * MIB),
        (EventKind.SEGMENT_ALLOC, 1000 * MIB, 40 * MIB),
        (EventKind.SEGMENT_FREE, 2000 * MIB, 2 * MIB),
    ):
        builder.append(kind, device=0, address=address, size=size)
    spans = segment_spans(builder.finish())
    found = list(
        zip(*(column.tolist() for column in (spans.start, spans.end, spans.born, spans.freed)), strict=True)
    )
    assert found == [
        (1000 * MIB, 1020 * MIB, 0, 1),
        (1000 * MIB, 1040 * MIB, 2, 4),
        (2000 * MIB, 2002 * MIB, -1, 3),
    ]


def test_pages_that_are_unmapped_in_other_pieces_than_they_were_mapped() -> None:
    builder = TraceBuilder(devices=[TraceDevice(index=0)])
    builder.append(EventKind.SEGMENT_MAP, device=0, address=0, size=40 * MIB)
    builder.append(EventKind.SEGMENT_UNMAP, device=0, address=10 * MIB, size=10 * MIB)
    builder.append(EventKind.SEGMENT_MAP, device=0, address=10 * MIB, size=4 * MIB)
    spans = segment_spans(builder.finish())
    sizes = [int((spans.end - spans.start)[spans.held(row)].sum()) // MIB for row in (-1, 0, 1, 2)]
    assert sizes == [0, 40, 30, 34]
    assert spans.expandable.all()


@pytest.mark.parametrize(
    "trace", [Recorder().finish(), TraceBuilder().finish()], ids=["no events", "no device"]
)
def test_nothing_held(trace: MemoryTrace) -> None:
    assert len(segment_spans(trace).start) == 0


def test_other_devices_are_left_out() -> None:
    recorder = Recorder(devices=2)
    recorder.alloc("float32[1]", 4, Category.OTHER, device=1)
    trace = recorder.finish()
    assert len(segment_spans(trace, 0).start) == 0
    assert len(segment_spans(trace, 1).start) == 1
