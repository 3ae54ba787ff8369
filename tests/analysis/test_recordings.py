"""Recordings of real cards: what the curves say at the end is what the final segments hold."""

from pathlib import Path

import pytest

from vramfit.analysis import Measure, curves, fragmentation, lifetimes
from vramfit.trace import read_any

RECORDINGS = sorted((Path(__file__).parents[1] / "data" / "traces").glob("*.json.gz"))


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) == 13


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name.split(".json")[0])
def test_curves_end_where_the_final_segments_do(path: Path) -> None:
    trace = read_any(path)
    for device in trace.devices:
        blocks = [block for segment in device.segments for block in segment["blocks"]]
        allocated = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        active = sum(block["size"] for block in blocks if block["state"].startswith("active"))
        reserved = sum(segment["total_size"] for segment in device.segments)
        lives = lifetimes(trace, device.index)
        found = curves(trace, lives)
        ends = {measure: int(found.of(measure)[-1]) for measure in Measure}
        assert ends == {
            Measure.ALLOCATED: allocated,
            Measure.ACTIVE: active,
            Measure.RESERVED: reserved,
        }
        assert min(int(found.allocated.min()), *found.start.values()) >= 0
        held = fragmentation(trace, lives, len(trace) - 1)
        assert (held.reserved, held.occupied) == (reserved, active)
