"""Runs workloads on this machine's CPU: they run for real, and torch's own profiler counts what they allocate.

Seconds are estimated from the arithmetic and traffic of each operation at rates that are measured once: what a clock
says of one run on a shared machine would be noise to the planner.

NOTE [Marks]: boundaries between intervals are events of the profiler like the allocations, so that one clock orders
both. Another clock would put what is allocated near a boundary on the wrong side of it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from vramfit.capture.gradient_sums import measure_counts
from vramfit.planner.devices.cost import PeakMeter, StepCost, profile_of
from vramfit.planner.step_profiler import Estimate, StepProfile, StepProfiler, called, flops_of, tensors_of
from vramfit.techniques import Profile, live_of
from vramfit.torch_internals.autograd_engine import RecordFunctionFast
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.workload import State, Workload

STEPS = 2
"""Steps of a run: the second has the optimizer's state."""

_MEMORY = "[memory]"
"""What the profiler calls an allocation or a free (torch/csrc/profiler/collection.cpp)."""

_MARK = "vramfit: a boundary"
"""What the profiler calls the end of an interval."""


class CpuBackend:
    """The CPU, as a device whose tensors are counted.

    Args:
        host_bytes: memory of the machine that may be taken; None for all.
        estimate: the seconds of an operation; None takes `seconds_of`.
    """

    name = "CPU"
    device_type = "cpu"

    def __init__(self, *, host_bytes: int | None = None, estimate: Estimate | None = None) -> None:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.total_bytes = machine_bytes if host_bytes is None else host_bytes
        self.host_bytes = 0
        self._estimate: Estimate = seconds_of if estimate is None else estimate

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """Run two steps and count the bytes of the tensors; see `DeviceBackend.step_cost`.

        The budget does not stop the run: whether its peak stays within is known afterwards. FLOPs and seconds are those
        of a third step, so that the bytes are those of a program that nobody watches: under a dispatch mode autograd
        sums gradients elsewhere than without.
        """
        step = FlopMode(self._estimate)

        def watched(state: State) -> None:
            with step:
                workload.run_step(state, sizes)

        with _run(workload, sizes, afterwards=watched) as (state, counter):
            workload.run_step(state, sizes)
            counter.boundary()
        peak = max(counter.peaks())
        return StepCost(
            fits=budget is None or peak <= budget,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
            step_seconds=step.seconds,
            step_flops=step.total,
            oom="" if budget is None or peak <= budget else f"the peak is {peak} B of {budget} B",
        )

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[torch.nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """Run two steps and look at the second; see `DeviceBackend.profile_step`."""
        with _run(workload, sizes) as (state, counter):
            profiler = StepProfiler(state.model, places(state.model), counter, estimate=self._estimate)
            with profiler.watching():
                workload.run_step(state, sizes)
        step = profiler.profile()
        peak = max(counter.peaks())
        found = profile_of(
            workload,
            state,
            sizes,
            step,
            device_type="cpu",
            capability=(0, 0),
            total_bytes=self.total_bytes,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=peak,
        )
        return found, step


class FlopMode(TorchDispatchMode):
    """Counts what torch's own counter counts, and holds nothing: that one's module hooks keep tensors alive.

    Args:
        estimate: the seconds of an operation, from itself, its arguments, its results and its FLOPs; None for no time.
    """

    def __init__(self, estimate: Estimate | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._estimate = estimate
        self.total = 0
        self.seconds = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        out = called(func, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        self.total += flops
        if self._estimate is not None and func.namespace != "prim":
            self.seconds += self._estimate(func, args, kwargs, out, flops)
        return out


class _Counter(PeakMeter):
    """Peaks between boundaries, from the profiler's list of allocations and frees: known once the run is over."""

    device_type = "cpu"

    def seconds(self) -> float:
        """Seconds of the wall clock."""
        return time.perf_counter()

    def boundary(self) -> None:
        """An interval ends now. See NOTE [Marks]."""
        self.boundaries += 1
        # Below the dispatcher: under a profiler it would be one of the operations that are profiled.
        with RecordFunctionFast(_MARK):
            pass

    def read(self, events: Iterable[tuple[str, int]]) -> None:
        """Take the run's allocations, frees and boundaries: their names and bytes, negative for a free, in order."""
        held = highest = 0
        for name, size in events:
            if name == _MARK:
                self._peaks.append(highest)
                highest = held  # what is held when an interval begins counts in it too
            else:
                held += size
                highest = max(highest, held)


@contextmanager
def _run(
    workload: Workload, sizes: dict[str, int], *, afterwards: Callable[[State], None] = lambda _state: None
) -> Iterator[tuple[State, _Counter]]:
    """Start a workload and take all steps but the last; what the block does is counted, what comes after it is not."""
    counter = _Counter()
    rates()  # what measuring them allocates is no part of a run
    measure_counts()
    gc.collect()  # what earlier runs left in cycles, freed during this one, would be missing in its bytes
    with ExitStack() as stack:
        # There is one cycle; until 2.11 torch warns that others would be dropped.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            state = workload.start("cpu")
            if (live := live_of(state)) is not None:
                stack.callback(
                    live.undo
                )  # what techniques changed beyond the model must not reach the next run
            counter.boundary()  # what making the model took for a moment is no part of a step
            for _ in range(STEPS - 1):
                workload.run_step(state, sizes)
            yield state, counter
        afterwards(state)
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() in (_MEMORY, _MARK)
    ]
    events.sort(key=lambda event: event.start_ns())
    counter.read((event.name(), event.nbytes()) for event in events)
    counter._peaks[0] = 0
    gc.collect()


def seconds_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, flops: int) -> float:
    """Estimated seconds of an operation on this machine: the larger of its arithmetic and its traffic."""
    arithmetic, traffic = rates()
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of((args, kwargs, out)))
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


CPU_FLOPS = 20e9
"""FLOP/s that a core reaches, at least, in a training step in float32.

Measured on one core of an AMD EPYC with torch 2.13, by the FLOPs of torch.utils.flop_counter: 26 and 33 GFLOP/s for a
transformer of width 64 and a convolutional network of 16 channels, 46 to 91 GFLOP/s for larger ones. It stands below
all of them, and counts one core, since a guess that is too long costs a smaller trial, and one that is too short costs
the user's time.
"""


def cpu_seconds(flops: float) -> float:
    """Seconds that as many floating-point operations take at most, guessed."""
    return flops / CPU_FLOPS
