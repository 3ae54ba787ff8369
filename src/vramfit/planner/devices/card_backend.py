"""Runs workloads on this machine's card: they run for real, with no more memory than the budget leaves them."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from vramfit.errors import UnknownGpuError, UsageError, VramfitError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.planner.devices.cost import DeviceBackend, PeakMeter, StepCost, profile_of, started
from vramfit.planner.step_profiler import StepProfile, StepProfiler
from vramfit.techniques import Profile
from vramfit.torch_internals.cuda_memory import clear_cublas_workspaces, empty_host_cache
from vramfit.workload import Batch, State, Workload

WARM_STEPS = 2
"""Steps before any is timed: the second is the first that has the optimizer's state."""

TIMED_STEPS = 5
"""Steps whose median counts."""

_LIBRARIES_OUT = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""How libraries say that the card is full, which ask it themselves and not torch's allocator."""


class CardBackend:
    """The card of this process.

    NOTE [What a budget leaves to torch]
    ``torch.cuda.set_per_process_memory_fraction`` bounds what torch's allocator reserves, as a part of the card's
    whole memory. The CUDA context and what libraries keep for themselves lie outside of it. A budget covers both: so
    the allocator may have the budget less what lies outside, and a run whose libraries grew beyond that afterwards
    does not fit.

    Args:
        others_bytes: of the card that other processes hold, which is no part of what a workload takes.

    Attributes:
        left_bytes: most bytes of tensors that were still on the card after a run had been cleared away: something
            outside the model keeps them.

    Raises:
        UsageError: torch sees no card.
    """

    device_type = "cuda"

    def __init__(self, *, others_bytes: int = 0, host_bytes: int = 0) -> None:
        if not torch.cuda.is_available():
            raise UsageError(
                "torch finds no CUDA card here", "Leave --card out: the virtual GPU gives the same figures"
            )
        self.index = torch.cuda.current_device()
        torch.empty(
            1, device=self._device
        )  # the context, without which nothing is known of what lies outside
        self.name = torch.cuda.get_device_name(self.index)
        self.total_bytes = int(torch.cuda.get_device_properties(self.index).total_memory)
        self.host_bytes = host_bytes
        self.left_bytes = 0
        self._others_bytes = others_bytes
        self._pageable_bytes = 0  # of the host, as techniques held them at the end of the last run
        self._clear()

    @property
    def outside_bytes(self) -> int:
        """What this process holds of the card outside torch's allocator now: the context, and libraries."""
        free, total = torch.cuda.mem_get_info(self.index)
        reserved = torch.cuda.memory_reserved(self.index)
        return max(0, total - free - reserved - self._others_bytes)

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """Run some steps within a budget of bytes, or within the card; see `DeviceBackend.step_cost`.

        The seconds are the median of `TIMED_STEPS` steps, by events of the card; making the batch is no part of them.
        Whatever comes of it, nothing of the run is left on the card.
        """
        cost = self._measured(workload, sizes, budget)
        if cost.fits and budget is not None and cost.total_bytes > budget:
            # Libraries that were loaded in this run took what the allocator was allowed: now they are there from the
            # start.
            cost = self._measured(workload, sizes, budget)
        if cost.fits and budget is not None and cost.total_bytes > budget:
            why = f"torch and what lies outside of it take {cost.total_bytes} B of {budget} B"
            return replace(cost, fits=False, oom=why)
        return cost

    def _measured(self, workload: Workload, sizes: dict[str, int], budget: int | None) -> StepCost:
        self._clear()
        if budget is not None and budget <= self.outside_bytes:
            return self._cost(oom=f"the CUDA context takes {self.outside_bytes} B of {budget} B")
        with self._limited(budget):
            seconds, oom = _failing_softly(lambda: self._steps(workload, sizes, budget))
            cost = self._cost(seconds=seconds or 0.0, oom=oom)
        self._clear()
        return cost

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[torch.nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """Run some steps and look at the last; see `DeviceBackend.profile_step`.

        Raises:
            torch.OutOfMemoryError: the card is too small for the program as it is.
        """
        self._clear()
        with self._running(_with_one_batch(workload, sizes)) as (run, state):
            setup = torch.cuda.max_memory_allocated(self.index)
            for _ in range(WARM_STEPS):
                run.run_step(state, sizes)
            meter = _CardMeter(self.index)
            before = torch.cuda.max_memory_allocated(self.index)
            profiler = StepProfiler(state.model, places(state.model), meter)
            with profiler.watching():
                run.run_step(state, sizes)
        step = profiler.profile()
        profile = profile_of(
            workload,
            state,
            sizes,
            step,
            device_type="cuda",
            capability=torch.cuda.get_device_capability(self.index),
            total_bytes=self.total_bytes,
            host_bytes=self.host_bytes,
            peak_allocated_bytes=max((before, *meter.peaks())),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self.index),
            setup_bytes=setup,
            outside_bytes=self.outside_bytes,
            link_bytes_per_second=_link_of(self.name),
            host_peak_bytes=self._host_peak_bytes,
        )
        return profile, step

    # -- a run -------------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def _steps(self, workload: Workload, sizes: dict[str, int], budget: int | None) -> float:
        """Start a workload and take its steps; the median seconds of those that count."""
        with self._running(_with_one_batch(workload, sizes)) as (run, state):
            self._limit(budget)  # settings that a technique gave the allocator may have lifted it
            for _ in range(WARM_STEPS):
                run.run_step(state, sizes)
            return self._timed(lambda: run.run_step(state, sizes))

    def _timed(self, step: Callable[[], object]) -> float:
        found = []
        for _ in range(TIMED_STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.index)
            begin.record()
            step()
            end.record()
            torch.cuda.synchronize(self.index)
            found.append(begin.elapsed_time(end) / 1e3)
        return float(statistics.median(found))

    @contextmanager
    def _running(self, workload: Workload) -> Iterator[tuple[Workload, State]]:
        with started(workload, self._device, self._keep_pageable) as state:
            yield workload, state

    def _keep_pageable(self, nbytes: int) -> None:
        self._pageable_bytes = nbytes

    @property
    def _host_peak_bytes(self) -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.peak"]) + self._pageable_bytes

    def _cost(self, *, seconds: float = 0.0, oom: str = "") -> StepCost:
        """What the run that just ended took, by torch's own figures."""
        torch.cuda.synchronize(self.index)
        stats = torch.cuda.memory_stats(self.index)
        return StepCost(
            fits=not oom,
            peak_allocated_bytes=int(stats["allocated_bytes.all.peak"]),
            peak_reserved_bytes=int(stats["reserved_bytes.all.peak"]),
            outside_bytes=self.outside_bytes,
            host_bytes=self._host_peak_bytes,
            step_seconds=seconds,
            oom=oom,
        )

    # -- the card ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _limited(self, budget: int | None) -> Iterator[None]:
        """Let torch's allocator have what a budget leaves it. See NOTE [What a budget leaves to torch]."""
        before = torch.cuda.get_per_process_memory_fraction(self.index)
        self._limit(budget)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.index)

    def _limit(self, budget: int | None) -> None:
        if budget is not None:
            limit = budget - self.outside_bytes
            torch.cuda.set_per_process_memory_fraction(fraction_of(limit, self.total_bytes), self.index)

    def _let_backward_go(self) -> None:
        """Wait until the card's backward thread has let go of what it ran last.

        That thread wakes the one that waits for a pass before it drops the pass itself, and with it the graph of one
        that failed (torch/csrc/autograd/engine.cpp, thread_main). It takes one pass after the other: once it has
        taken the next, the last is gone. The next, here, has nothing to hold.
        """
        with torch.enable_grad():
            nothing = torch.empty(0, device=self._device, requires_grad=True)
            nothing.clone().backward(torch.empty(0, device=self._device))

    def _clear(self) -> None:
        """Give everything back, and count peaks anew."""
        self._let_backward_go()
        gc.collect()  # a model is full of cycles
        torch.cuda.synchronize(self.index)
        clear_cublas_workspaces()
        torch.cuda.empty_cache()
        empty_host_cache()
        self.left_bytes = max(self.left_bytes, torch.cuda.memory_allocated(self.index))
        torch.cuda.reset_peak_memory_stats(self.index)
        torch.cuda.reset_peak_host_memory_stats()


def fraction_of(limit: int, total: int) -> float:
    """The fraction of a card that lets torch's allocator reserve `limit` bytes of `total`, and not one less.

    The allocator takes the whole number below fraction x total (c10/cuda/CUDACachingAllocator.cpp,
    setMemoryFraction), and segments fill their room to the byte.
    """
    fraction = min(1.0, max(0, limit) / total)
    while fraction < 1.0 and int(fraction * total) < limit:
        fraction = min(1.0, fraction + 2.0**-53)
    return fraction


def _failing_softly(run: Callable[[], float]) -> tuple[float | None, str]:
    """What a run gives, or the message of the request that failed.

    The error holds the frames that it came through, and these the run's tensors: it must not leave this function.
    """
    try:
        return run(), ""
    except torch.OutOfMemoryError as error:
        return None, _first_line(error)
    except RuntimeError as error:
        if not any(text in str(error) for text in _LIBRARIES_OUT):
            raise
        return None, _first_line(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _with_one_batch(workload: Workload, sizes: Mapping[str, int]) -> Workload:
    """The same workload with a batch that is made once: making one takes the host time that is no part of a step."""
    made = workload.batch(**sizes)

    def batch(**_: int) -> Batch:
        # Some containers (transformers' BatchEncoding) move themselves to the device, for good.
        moves = hasattr(made, "to") and not isinstance(made, torch.Tensor)
        return copy.deepcopy(made) if moves else made

    return replace(workload, batch=batch)


def _link_of(name: str) -> float:
    """Bytes a second between a card and the host by the catalogue; 0 where it is not in there."""
    try:
        return find_gpu(name).host_link
    except VramfitError:
        return 0.0


class _CardMeter(PeakMeter):
    """Time and peaks of the card."""

    device_type = "cuda"

    def __init__(self, index: int) -> None:
        super().__init__()
        self._index = index

    def seconds(self) -> float:
        """Seconds of the wall clock, once all work is done."""
        torch.cuda.synchronize(self._index)
        return time.perf_counter()

    def boundary(self) -> None:
        """Note the peak since the last boundary."""
        self.boundaries += 1
        self._peaks.append(torch.cuda.max_memory_allocated(self._index))
        torch.cuda.reset_peak_memory_stats(self._index)


# -- questions that are for a card -----------------------------------------------------------------------------------


def card_of(device: DeviceBackend) -> CardBackend:
    """The card, which some questions are for."""
    if not isinstance(device, CardBackend):
        raise TypeError(f"{device.name} is not a card")
    return device


def another_card(card: CardBackend, gpu: GpuSpec | None) -> str:
    """Why this machine's card says nothing of the one that is asked about; empty where it does, or any will do."""
    if gpu is None:
        return ""
    try:
        here = find_gpu(card.name).name
    except UnknownGpuError:
        here = card.name
    return "" if here == gpu.name else f"this machine's card is a {card.name}, not a {gpu.name}"


# -- other processes -------------------------------------------------------------------------------------------------


def card_of_this_process(host_bytes: int = 0) -> CardBackend:
    """The card, and what others hold of it by the driver's account from before this process used it.

    Raises:
        UsageError: torch sees no card.
    """
    if not torch.cuda.is_available():
        return CardBackend()  # which says so
    used = {} if torch.cuda.is_initialized() else _used_before()
    uuid = str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))
    return CardBackend(others_bytes=used.get(uuid.removeprefix("GPU-"), 0), host_bytes=host_bytes)


def _used_before() -> dict[str, int]:
    """Bytes in use on each card of the driver, by its UUID; none where the driver does not answer."""
    from vramfit.doctor.probe import query_driver

    driver, _ = query_driver()
    cards = () if driver is None else driver.cards
    return {card.uuid.removeprefix("GPU-"): card.used_bytes for card in cards}
