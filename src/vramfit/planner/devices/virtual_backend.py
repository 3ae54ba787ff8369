"""Runs workloads on a virtual card: nothing is computed, and every byte is placed as on the card."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from vramfit.errors import VramfitError
from vramfit.gpus import GpuSpec
from vramfit.planner.devices.cost import PeakMeter, StepCost, profile_of, started
from vramfit.planner.devices.retry_cost import DriverCalls
from vramfit.planner.devices.same_start import between_steps, same_start
from vramfit.planner.step_profiler import StepProfile, StepProfiler, flops_of
from vramfit.techniques import Profile
from vramfit.trace import Run
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.op_call import OpCall
from vramfit.workload import State, Workload

STEPS = 2
"""Steps of a run: the second has the optimizer's state."""

_ENDLESS = 1 << 44
"""Memory of a card that never runs out."""


class VirtualBackend:
    """A virtual card.

    Args:
        alloc_conf: allocator settings; None reads the environment.
        own_process: whether nothing else goes on in this process, so that its garbage collector may be set up: what is
            alive after a run is looked at no more.
    """

    device_type = "cuda"

    def __init__(
        self,
        spec: GpuSpec,
        *,
        alloc_conf: str | None = None,
        host_bytes: int = 0,
        own_process: bool = False,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.total_bytes = spec.total_bytes
        self.host_bytes = host_bytes
        self._alloc_conf = alloc_conf
        self._own_process = own_process

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """Run two steps on a card of `budget` bytes, or on an endless one; see `DeviceBackend.step_cost`.

        Where the allocator empties its cache in the second, a third shows whether it does so in every step.

        Raises:
            VramfitError: the workload failed for another reason than memory.
        """
        steps: list[WatchedStep] = []

        def work(gpu: VirtualGPU, state: State) -> None:
            for _ in range(STEPS - 1):
                workload.run_step(state, sizes)
                between_steps()
            while not steps or (len(steps) == 1 and steps[0].driver.retries):
                with watched_step(gpu) as step:
                    workload.run_step(state, sizes)
                    between_steps()
                steps.append(step)

        run, host_bytes, failed = self._run(workload, work, budget)
        outcome = run.devices[0]
        last = WatchedStep() if failed else steps[-1]
        return StepCost(
            fits=not failed,
            peak_allocated_bytes=outcome.peak_allocated_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
            outside_bytes=outcome.context_bytes,
            host_bytes=host_bytes,
            step_seconds=last.seconds + last.driver.seconds,
            step_flops=last.flops,
            retries=last.driver.retries,
            retry_seconds=last.driver.seconds,
            oom=run.oom.message if failed and run.oom is not None else "",
        )

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[torch.nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """Run two steps on an endless card and look at the second; see `DeviceBackend.profile_step`.

        Raises:
            VramfitError: the workload failed.
        """
        found: list[tuple[State, StepProfile]] = []
        setup: list[int] = []

        def work(gpu: VirtualGPU, state: State) -> None:
            setup.append(torch.cuda.max_memory_allocated())
            for _ in range(STEPS - 1):
                workload.run_step(state, sizes)
                between_steps()
            profiler = StepProfiler(state.model, places(state.model), VirtualMeter(gpu))
            with profiler.watching():
                workload.run_step(state, sizes)
            found.append((state, profiler.profile()))

        run, host_bytes, _ = self._run(workload, work, None)
        state, step = found[0]
        outcome = run.devices[0]
        profile = profile_of(
            workload,
            state,
            sizes,
            step,
            device_type="cuda",
            capability=self.spec.compute_capability,
            total_bytes=self.spec.total_bytes,
            host_bytes=self.host_bytes,
            peak_allocated_bytes=outcome.peak_allocated_bytes,
            peak_reserved_bytes=outcome.peak_reserved_bytes,
            setup_bytes=setup[0],
            outside_bytes=outcome.context_bytes,
            categories=categories_of(run),
            link_bytes_per_second=self.spec.host_link,
            host_peak_bytes=host_bytes,
        )
        return profile, step

    def _run(
        self, workload: Workload, work: Callable[[VirtualGPU, State], None], budget: int | None
    ) -> tuple[Run, int, bool]:
        """Start a workload and let `work` have its state.

        Returns:
            what happened, the bytes that were taken of the host, and whether the card was too small.
        """
        total = _ENDLESS if budget is None else budget
        # The card's own figures stay those of its kind: the context does not shrink with the budget.
        spec = replace(self.spec, total_bytes=total, context_bytes=self.spec.typical_context_bytes)
        gpu = VirtualGPU(spec, alloc_conf=self._alloc_conf)
        ran: list[tuple[Run, int]] = []
        try:
            with (
                same_start(),
                gpu,
                started(workload, "cuda", lambda pageable: ran.append((gpu.run, pageable))) as state,
            ):
                work(gpu, state)
        except torch.OutOfMemoryError as error:
            if ran[0][0].oom is None:
                raise VramfitError(f"the workload ran out of memory outside the card: {error}") from error
            failed = True
        else:
            failed = False
        finally:
            # Elsewhere the next run's `same_start` collects: looking through a heap takes long.
            if self._own_process:
                gc.collect()
                gc.freeze()
        run, pageable = ran[0]
        return run, run.host_pinned_peak_bytes + pageable, failed


def _seconds(gpu: VirtualGPU) -> float:
    return gpu._machine.clock_us / 1e6


@dataclass(slots=True)
class WatchedStep:
    """What one step took.

    Attributes:
        seconds: of the simulated clock.
        flops: multiplications and additions.
        driver: calls of the driver.
    """

    seconds: float = 0.0
    flops: int = 0
    driver: DriverCalls = field(default_factory=lambda: DriverCalls(0, 0))


@contextmanager
def watched_step(gpu: VirtualGPU) -> Iterator[WatchedStep]:
    """Watch the step that runs inside; what is asked for is known once it is over."""
    machine, found = gpu._machine, WatchedStep()
    allocator = machine.device().allocator

    def count(call: OpCall) -> None:
        found.flops += flops_of(call.func, call.args, call.kwargs, call.out)

    began, before = _seconds(gpu), DriverCalls.of(allocator)
    machine.hooks.on_work = count
    try:
        yield found
    finally:
        machine.hooks.on_work = None
    found.seconds = _seconds(gpu) - began
    found.driver = DriverCalls.of(allocator).since(before)


class VirtualMeter(PeakMeter):
    """Time and peaks of a virtual card."""

    device_type = "cuda"

    def __init__(self, gpu: VirtualGPU) -> None:
        super().__init__()
        self._gpu = gpu

    def seconds(self) -> float:
        """The simulated clock."""
        return _seconds(self._gpu)

    def boundary(self) -> None:
        """Note the peak since the last boundary."""
        self.boundaries += 1
        # Asked of the allocator, without a table of all statistics: an operation has a boundary of its own.
        allocator = self._gpu._machine.device().allocator
        self._peaks.append(allocator.peak_allocated_bytes)
        allocator.reset_peak_stats()


def categories_of(run: Run) -> dict[str, int]:
    """Bytes at the peak of a run, by category."""
    from vramfit.analysis import peak

    breakdown = peak(run.trace, 0)
    return {category.name.lower(): size for category, size in breakdown.categories.items()}
