"""A run made of a trace alone: figures, the end, and the card where that is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from analysis.synthetic import Recorder, fitting_run, oom_run
from vramfit.analysis import Outcome, run_from_trace, verdict
from vramfit.trace import Category, Source, read_any
from vramfit.units import GIB, MIB

TRACES = Path(__file__).parents[1] / "data" / "traces"


def test_it_is_the_run_that_wrote_the_trace() -> None:
    whole = fitting_run()
    found = run_from_trace(whole.trace, name="run.vft")
    assert found.source is Source.VIRTUAL
    assert found.program == ("run.vft",)
    for made, known in zip(found.devices, whole.devices, strict=True):
        assert made.peak_allocated_bytes == known.peak_allocated_bytes
        assert made.peak_reserved_bytes == known.peak_reserved_bytes
        assert (made.gpu, made.total_bytes, made.context_bytes) == (
            known.gpu,
            known.total_bytes,
            known.context_bytes,
        )
    assert verdict(found).outcome is Outcome.FITS


def test_how_it_ended() -> None:
    found = run_from_trace(oom_run().trace)
    assert found.oom is not None
    assert (found.oom.requested_bytes, found.oom.handled, found.exit_code) == (512 * MIB, False, 1)
    assert verdict(found).outcome is Outcome.DOES_NOT_FIT


def test_a_caught_error_is_told_and_no_end() -> None:
    recorder = Recorder()
    recorder.alloc("a", MIB, Category.ACTIVATIONS)
    recorder.oom(GIB)
    recorder.alloc("b", MIB, Category.ACTIVATIONS)
    found = run_from_trace(recorder.finish())
    assert found.oom is not None
    assert found.oom.handled
    assert found.exit_code == 0
    assert verdict(found).fits is True


def test_without_a_card_there_is_no_verdict() -> None:
    recorder = Recorder(total_bytes=0, context_bytes=0)
    recorder.alloc("a", MIB, Category.ACTIVATIONS)
    judged = verdict(run_from_trace(recorder.finish()))
    assert judged.outcome is Outcome.UNKNOWN
    assert judged.fits is None


@pytest.mark.parametrize(
    "path", sorted(TRACES.glob("*.json.gz")), ids=lambda path: path.name.split(".json")[0]
)
def test_recordings_have_the_peak_of_their_segments(path: Path) -> None:
    """The peak of reserved bytes is at least what the file's own segments hold at the end."""
    found = run_from_trace(read_any(path), name=path.name)
    held: dict[int, int] = {}
    for segment in json.loads(gzip.decompress(path.read_bytes()))["segments"]:
        held[segment["device"]] = held.get(segment["device"], 0) + segment["total_size"]
    assert {device.index for device in found.devices} >= set(held)
    for device in found.devices:
        assert device.peak_reserved_bytes >= held.get(device.index, 0)
        assert device.peak_allocated_bytes <= device.peak_reserved_bytes
    assert found.source is Source.CARD


def test_the_recorded_error_is_found() -> None:
    found = run_from_trace(read_any(TRACES / "expandable-3gpu-oom.json.gz"))
    assert found.oom is not None
    assert found.oom.device == 1
    judged = verdict(found)
    assert judged.outcome is Outcome.DOES_NOT_FIT
    assert judged.device.total == found.oom.reserved_bytes + found.oom.free_bytes
