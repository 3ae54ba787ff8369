"""What all comparisons of gradients need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.techniques.test_activation_offload import LateLane

from vramfit.techniques import activation_offload


@pytest.fixture
def late_lane(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLane]:
    """Let saved tensors of the CPU leave and come back, as late as those of a card may."""
    lane = LateLane()
    monkeypatch.setattr(activation_offload, "lane_of", lambda _device: lane)
    yield lane
    assert not lane.wrong
