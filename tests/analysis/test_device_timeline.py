"""What follows from a device of a trace is worked out once, however many analyses and reports ask for it."""

import gc
import weakref
from collections import Counter
from pathlib import Path

import pytest

from vramfit.analysis import (
    DeviceTimeline,
    causes,
    curves,
    device_timeline,
    leaks,
    lifetimes,
    peaks,
    phases,
    run_from_trace,
    segment_spans,
    states,
    verdict,
)
from vramfit.report.forms import Material, write_as
from vramfit.trace import MemoryTrace, read_any
from vramfit.trace.actual import read_actual

RECORDINGS = Path(__file__).parents[1] / "data/traces"


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """How often each was worked out for each device."""
    found: Counter[tuple[str, int]] = Counter()

    def lifetimes_counted(trace: MemoryTrace, device: int) -> object:
        found["lifetimes", device] += 1
        return lifetimes(trace, device)

    def curves_counted(trace: MemoryTrace, lives: object) -> object:
        found["curves", lives.device] += 1  # type: ignore[attr-defined]
        return curves(trace, lives)  # type: ignore[arg-type]

    def spans_counted(trace: MemoryTrace, device: int) -> object:
        found["spans", device] += 1
        return segment_spans(trace, device)

    monkeypatch.setattr(device_timeline, "lifetimes", lifetimes_counted)
    monkeypatch.setattr(device_timeline, "curves", curves_counted)
    monkeypatch.setattr(device_timeline, "segment_spans", spans_counted)
    return found


@pytest.mark.parametrize(("name", "devices"), [("eor-nn", 1), ("expandable-3gpu-oom", 3)])
def test_all_forms_of_a_report_work_it_out_once(
    tmp_path: Path, counted: Counter[tuple[str, int]], name: str, devices: int
) -> None:
    trace = read_any(RECORDINGS / f"{name}.json.gz")
    run = run_from_trace(trace)
    material = Material(source=run, judged=verdict(run))
    for ending in ("html", "json", "csv", "svg", "perfetto.json"):
        write_as(tmp_path / f"report.{ending}", material)
    for device in trace.known_devices:
        causes(trace, device)
        leaks(trace, device)
        peaks(trace, device)
        phases(trace, device)
    assert len(trace.known_devices) == devices
    for what in ("lifetimes", "curves", "spans"):
        assert all(counted[what, device] == 1 for device in trace.known_devices)
    assert set(counted.values()) == {1}


def test_the_states_of_a_recording_take_it_once(counted: Counter[tuple[str, int]]) -> None:
    states(read_actual(RECORDINGS / "eor-nn.json.gz"))
    assert counted["lifetimes", 0] == counted["curves", 0] == 1


def test_a_timeline_is_the_same_for_a_trace_and_goes_with_it() -> None:
    trace = read_any(RECORDINGS / "eor-nn.json.gz")
    found = DeviceTimeline.of(trace, 0)
    assert found is DeviceTimeline.of(trace, 0) and found is not DeviceTimeline.of(trace, 1)
    assert found.curves.allocated.tolist() == curves(trace, lifetimes(trace)).allocated.tolist()
    gone = weakref.ref(trace)
    del trace
    gc.collect()
    assert gone() is None
    with pytest.raises(ReferenceError, match="is gone"):
        _ = found.spans
