"""Prices workloads on this machine's CPU: they run for real, and torch's own profiler counts what they allocate.

Seconds of single operations are estimated from their arithmetic and traffic at rates that are measured once: what a
clock says of one call on a shared machine would be noise to the planner.
"""

from __future__ import annotations

import gc
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from vramfit.planner.observing import FlopMode, Observation, Observer
from vramfit.planner.price import Price
from vramfit.techniques import Profile, live_of
from vramfit.workload import State, Workload

STEPS = 2
"""Steps of a run: the second has the optimizer's state."""

_MEMORY = "[memory]"
"""What the profiler calls an allocation or a free (torch/csrc/profiler/collection.cpp)."""


class CpuDevice:
    """The CPU, as a device whose tensors are counted.

    Args:
        host_bytes: memory of the machine that may be taken; None for all.

    Attributes:
        name: ``CPU``.
        device_type: ``cpu``.
        total_bytes: memory of the machine.
    """

    name = "CPU"
    device_type = "cpu"

    def __init__(self, *, host_bytes: int | None = None) -> None:
        self.total_bytes = _machine_bytes() if host_bytes is None else host_bytes
        self.host_bytes = 0

    def price(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> Price:
        """Run two steps and count the bytes of the tensors; see `Device.price`.

        The budget does not stop the run: whether its peak stays within is known afterwards.
        """
        with _run(workload, sizes) as (state, counter):
            flops = FlopMode()
            began = time.perf_counter()
            with flops:
                workload.run_step(state, sizes)
            seconds = time.perf_counter() - began
            counter.boundary()
        peak = max(counter.peaks())
        return Price(
            fits=budget is None or peak <= budget,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            step_seconds=seconds,
            step_flops=flops.total,
            oom="" if budget is None or peak <= budget else f"the peak is {peak} B of {budget} B",
        )

    def observe(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[torch.nn.Module], Sequence[str]]
    ) -> tuple[Profile, Observation]:
        """Run two steps and look at the second; see `Device.observe`."""
        with _run(workload, sizes) as (state, counter):
            observer = Observer(state.model, places(state.model), counter, estimate=seconds_of)
            with observer.watching():
                workload.run_step(state, sizes)
        observation = observer.observation()
        peak = max(counter.peaks())
        found = Profile(
            model=state.model,
            optimizer=state.optimizer,
            sizes=dict(sizes),
            trains=workload.trains,
            own_step=workload.step is not None,
            device_type="cpu",
            capability=(0, 0),
            total_bytes=self.total_bytes,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            step_seconds=observation.seconds,
            step_flops=observation.flops,
            categories={},
            logits_bytes=observation.logits_bytes,
            blocks=observation.blocks,
        )
        return found, observation


class _Counter:
    """Peaks between boundaries, from the profiler's list of allocations and frees."""

    def __init__(self) -> None:
        self.boundaries = 0
        self._times: list[int] = []
        self._peaks: list[int] = []

    def seconds(self) -> float:
        """Of the clock on the wall."""
        return time.perf_counter()

    def boundary(self) -> None:
        """A stretch ends now."""
        self.boundaries += 1
        self._times.append(time.time_ns())

    def peaks(self) -> Sequence[int]:
        """Known once the run is over."""
        return self._peaks

    def read(self, events: Sequence[tuple[int, int]]) -> None:
        """Take the allocations and frees of the run: times in ns since 1970, and bytes, negative for a free."""
        self._peaks = [0] * len(self._times)
        held = 0
        for at, size in events:
            stretch = bisect_left(self._times, at)
            held += size
            if stretch < len(self._peaks):
                # What is held when a stretch begins counts in it too.
                self._peaks[stretch] = max(self._peaks[stretch], held, held - size)
        for index in range(1, len(self._peaks)):
            if not self._peaks[index]:
                self._peaks[index] = self._peaks[index - 1]


@contextmanager
def _run(workload: Workload, sizes: dict[str, int]) -> Iterator[tuple[State, _Counter]]:
    """Start a workload and take all steps but the last; what the block does is counted."""
    counter = _Counter()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = workload.start("cpu")
        counter.boundary()  # what making the model took for a moment is no part of a step
        for _ in range(STEPS - 1):
            workload.run_step(state, sizes)
        yield state, counter
    if (live := live_of(state)) is not None:
        live.undo()  # what techniques changed beyond the model must not reach the next run
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == _MEMORY
    )
    counter.read(events)
    counter._peaks[0] = 0
    gc.collect()


def seconds_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, flops: int) -> float:
    """Estimated seconds of an operation on this machine: the larger of its arithmetic and its traffic."""
    arithmetic, traffic = rates()
    moved = sum(
        leaf.numel() * leaf.element_size()
        for leaf in tree_leaves((args, kwargs, out))
        if isinstance(leaf, torch.Tensor)
    )
    if func.is_view or not moved:
        return 0.0
    return max(flops / arithmetic, moved / traffic)


@cache
def rates() -> tuple[float, float]:
    """What this machine reaches: FLOP/s of a matrix product, B/s of a copy; the best of some runs."""
    a, b = torch.rand(512, 512), torch.rand(512, 512)
    source = torch.rand(1 << 22)
    product = min(_timed(lambda: a @ b) for _ in range(5))
    copy = min(_timed(source.clone) for _ in range(5))
    return 2 * 512**3 / product, 2 * source.numel() * source.element_size() / copy


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
