"""Clocks that a program reads: those of the card where it asks for them, else this machine's, with a warning."""

from __future__ import annotations

import gc
import queue
import threading
import time
import timeit
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils import benchmark

from vramfit.errors import UsageError
from vramfit.options.clock_choice import ProgramClock
from vramfit.virtual.gpu import VirtualGPU

READING = 1e-6


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: Hypothesis times collections, and each of its readings is one of the clock's."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


CLOCKS: dict[str, Callable[[], float]] = {
    "time": lambda: time.time(),
    "perf_counter": lambda: time.perf_counter(),
    "monotonic": lambda: time.monotonic(),
    "time_ns": lambda: time.time_ns() / 1e9,
    "perf_counter_ns": lambda: time.perf_counter_ns() / 1e9,
    "monotonic_ns": lambda: time.monotonic_ns() / 1e9,
}


def work() -> None:
    factor = torch.ones(2048, 2048, device="cuda")
    for _ in range(8):
        factor @ factor


@pytest.mark.parametrize("name", CLOCKS)
def test_a_simulated_clock_tells_the_seconds_of_the_card(name: str) -> None:
    read = CLOCKS[name]
    with VirtualGPU("RTX 4090", clock="simulated") as gpu:
        work()
        began, before = read(), gpu.mode.machine.clock_us
        work()
        took, simulated = read() - began, (gpu.mode.machine.clock_us - before) / 1e6
        # A float of some billion seconds holds no more of a fraction than this.
        assert took == pytest.approx(simulated + READING, abs=5e-7)
        assert simulated > 1e-3
    assert not gpu.run.warnings
    here = time.time()
    assert abs(read() - CLOCKS[name]()) < 1 and time.time() - here < 1


def test_what_waits_waits_by_the_real_clock() -> None:
    began = time.monotonic()
    with VirtualGPU("RTX 4090", clock="simulated"):
        with pytest.raises(queue.Empty):
            queue.Queue[int]().get(timeout=0.02)
        assert not threading.Event().wait(0.02)
        before = time.monotonic()
        time.sleep(0.02)
        assert time.monotonic() - before == pytest.approx(0.02 + READING, abs=1e-7)
        until = time.perf_counter() + 0.001
        while time.perf_counter() < until:
            pass  # each reading takes a moment
    assert time.monotonic() - began >= 0.06


def test_what_times_code_for_a_program_times_the_card() -> None:
    before = timeit.Timer.__init__.__defaults__
    with VirtualGPU("RTX 4090", clock="simulated") as gpu:
        work()
        started = gpu.mode.machine.clock_us
        work()
        once = (gpu.mode.machine.clock_us - started) / 1e6
        assert timeit.timeit(work, number=4) == pytest.approx(4 * once + READING, rel=1e-6)
        assert timeit.repeat(work, number=1, repeat=2) == pytest.approx([once + READING] * 2, rel=1e-6)
        timed = benchmark.Timer("work()", globals={"work": work}).timeit(4)
        assert timed.mean == pytest.approx(once, rel=1e-3)
    assert timeit.Timer.__init__.__defaults__ is before


def test_timing_the_card_by_this_machine_is_told_once_with_its_line() -> None:
    with VirtualGPU("RTX 4090") as gpu:
        time.perf_counter()
        time.perf_counter()  # nothing has run between
        assert not gpu.run.warnings
        for _ in range(3):
            work()
            read = time.perf_counter()
        assert read > 0
    (warning,) = gpu.run.warnings
    assert (warning.code, warning.count) == ("clock-of-this-machine", 1)
    assert warning.location is not None and warning.location.startswith(__file__)
    assert "--clock simulated" in warning.message


def test_a_clock_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="clock='wall' is no clock"):
        VirtualGPU("RTX 4090", clock="wall")
    assert ProgramClock("simulated") is ProgramClock.SIMULATED
