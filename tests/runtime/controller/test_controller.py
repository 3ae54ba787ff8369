"""Sizes by a learnt bound: few steps out of memory, most of the throughput, and back at full size soon."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vramfit
from vramfit.errors import UsageError
from vramfit.runtime.controller.memory_reading import MemoryReading
from vramfit.runtime.controller.peak_quantile import PeakQuantile
from vramfit.runtime.controller.size_policy import CONTEXT_BYTES, PolicySettings, SizePolicy, StepMode

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "survive"))
from controller import run
from controller_parts.policies import ByBound
from controller_parts.simulator import Card

GIB = 1 << 30


def taken(items: int, length: int) -> int:
    return 50_000 + 3_000 * items + 40 * items * length + items * length * length // 50


def test_a_peak_without_noise_is_learnt_exactly() -> None:
    draw, peak = np.random.default_rng(0), PeakQuantile()
    for _ in range(300):
        items, length = int(draw.integers(1, 200)), int(draw.integers(16, 2000))
        peak.learn(items, length, taken(items, length))
    for items, length in ((1, 16), (57, 333), (200, 2000)):
        assert peak.predicted(items, length) == pytest.approx(taken(items, length), rel=0.01)
        assert peak.bound(items, length) >= taken(items, length)


def test_a_bound_holds_for_all_but_few() -> None:
    draw, peak, exceeded = np.random.default_rng(1), PeakQuantile(), 0
    for number in range(2000):
        items, length = int(draw.integers(1, 200)), int(draw.integers(200, 2000))
        real = round(taken(items, length) * (1 + abs(draw.normal(0, 0.01))))
        exceeded += number > 50 and real > peak.bound(items, length)
        peak.learn(items, length, real)
    assert exceeded <= 2


def test_a_shortage_widens_the_bound_until_many_good_steps() -> None:
    peak = PeakQuantile()
    for number in range(100):
        peak.learn(10 + number % 7, 100, taken(10 + number % 7, 100))
    narrow = peak.bound(10, 100)
    peak.ran_out()
    wide = peak.bound(10, 100)
    for number in range(1000):
        peak.learn(10 + number % 7, 100, taken(10 + number % 7, 100))
    assert narrow < peak.bound(10, 100) < wide


def settled(policy: SizePolicy, room: int, steps: int = 60) -> int:
    size = policy.decide(room, 100)
    for _ in range(steps):
        policy.observe(size, 100, size.items * 100 * (1 << 16))
        size = policy.decide(room, 100)
    return size.items


def test_a_newcomer_is_left_more_than_it_took_and_one_that_left_nothing() -> None:
    policy = SizePolicy(PolicySettings())
    full = settled(policy, 20 * GIB)
    assert 0.95 < full / (20 * GIB / (100 << 16)) < 0.98
    coming = policy.decide(20 * GIB - 2 * CONTEXT_BYTES, 100).items
    assert coming < 0.9 * full
    assert settled(policy, 15 * GIB) < 0.76 * full
    policy.decide(20 * GIB, 100)
    assert settled(policy, 20 * GIB, 20) >= 0.99 * full


def test_a_mode_that_takes_less_is_taken_where_the_plain_one_does_not_fit() -> None:
    modes = (StepMode(name="plain"), StepMode(name="checkpointing", memory=0.3, time=4 / 3))
    policy = SizePolicy(PolicySettings(), modes)
    for items in (1, 2, 3, 4) * 5:
        size = policy.decide(GIB, 100)
        assert size.mode.name == "plain"
        policy.observe(type(size)(items=items, mode=size.mode, bound_bytes=0), 100, items << 20)
    assert policy.decide(800 << 10, 100).mode.name == "checkpointing"


@pytest.mark.parametrize("seed", [0, 3])
def test_the_simulated_training(seed: int) -> None:
    card = Card(seed, 600)
    found = run(card, ByBound(card))
    assert found.throughput > 0.95
    assert found.shortages <= 1
    assert all(one <= 20 for one in found.returns)


class Source:
    """A card of 1,000 bytes, of which others may take some."""

    def __init__(self) -> None:
        self.free, self.allocated, self.taken = 1000, 0, 0

    def now(self) -> MemoryReading:
        return MemoryReading(
            total=1000, free=self.free, allocated=self.allocated, reserved=self.allocated, neighbours=0
        )

    def begin(self) -> None:
        self.taken = 0

    def peak(self) -> int:
        return self.taken


def test_a_controller_on_a_source() -> None:
    source = Source()
    controller = vramfit.BatchController(source=source, start=2)
    sizes = []
    for step in range(60):
        source.allocated = 100  # what is alive between steps is no longer free
        source.free = 900
        size = controller.size(length=3)
        sizes.append(size.items)
        if step == 30:
            with pytest.raises(torch.OutOfMemoryError), controller.step(size, 3):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
            continue
        with controller.step(size, 3):
            source.taken = source.allocated + 3 * size.items
    assert sizes[:4] == [2, 4, 8, 16]
    assert controller.shortages == 1
    assert sizes[31] < 0.75 * sizes[30]
    assert 0.9 * 300 < sizes[-1] <= 300


def test_arguments() -> None:
    with pytest.raises(UsageError, match="nothing says what is free"):
        vramfit.BatchController("cpu")
    with pytest.raises(UsageError, match="named"):
        vramfit.BatchController(source=Source(), modes=[])
