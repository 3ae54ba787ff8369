"""What a step of a workload costs on a device, in bytes and seconds, and the devices' protocol.

Many micro-batches are looked at by running a few of them: each after the second does what the second did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.planner.plan_file import PlanFigures
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import AttachedProgram, Choice, Profile, live_of, with_choices
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.workload import State, Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a step costs.

    Attributes:
        fits: whether it ran within the device's budget.
        peak_allocated_bytes: most bytes that tensors held at once, from the start of the model on.
        peak_reserved_bytes: most bytes that torch's allocator held; on the CPU the same as allocated.
        outside_bytes: memory of the device outside torch: the CUDA context.
        host_bytes: most bytes that were pinned on the host, and what else techniques hold there.
        step_seconds: of the last step, with what its retries cost.
        step_flops: of the last step.
        retries: how often the allocator emptied its cache in that step, since the device had no memory left; it does so
            in every step.
        retry_seconds: what that costs, as part of `step_seconds`; see `retry_cost.py`.
        oom: the message of the request that failed, or empty.
    """

    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_bytes: int = 0
    host_bytes: int = 0
    step_seconds: float = 0.0
    step_flops: int = 0
    retries: int = 0
    retry_seconds: float = 0.0
    oom: str = ""

    @property
    def figures(self) -> PlanFigures:
        """The cost as a plan holds it."""
        return PlanFigures(
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            total_bytes=self.total_bytes,
            host_bytes=self.host_bytes,
            step_seconds=self.step_seconds,
            step_flops=self.step_flops,
            retries=self.retries,
            retry_seconds=self.retry_seconds,
        )

    @property
    def time_first(self) -> tuple[float, float]:
        """What costs are ordered by where the quickest step is wanted: smaller is better."""
        return self.step_seconds, self.total_bytes

    @property
    def bytes_first(self) -> tuple[float, float, float]:
        """The same where the lowest peak is."""
        return self.total_bytes, self.peak_allocated_bytes, self.step_seconds

    @property
    def total_bytes(self) -> int:
        """All that the device has to have."""
        return self.peak_reserved_bytes + self.outside_bytes


class DeviceBackend(Protocol):
    """Where workloads are run: a virtual card, or this machine's CPU."""

    name: str
    device_type: str
    total_bytes: int

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """Run some steps; past the budget a request fails.

        Args:
            budget: bytes that the device is taken to have; None for as many as it takes.
        """
        ...

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """Run some steps without a limit, and look at the last."""
        ...


def profile_of(
    workload: Workload, state: State, sizes: Mapping[str, int], step: StepProfile, **figures: Any
) -> Profile:
    """The profile of a workload that ran; `figures` are the device's own, the other fields of `Profile`."""
    return Profile(
        model=state.model,
        optimizer=state.optimizer,
        sizes=dict(sizes),
        trains=workload.trains,
        own_step=workload.step is not None,
        step_seconds=step.seconds,
        step_flops=step.flops,
        logits_bytes=step.logits_bytes,
        blocks=step.blocks,
        **figures,
    )


PROFILED_MICRO_BATCHES = 3
"""Micro-batches that are run to profile a step: the first finds no gradients, the last is followed by the step."""

COSTED_MICRO_BATCHES = 8
"""Micro-batches that are run for the cost of a plan: what the allocator keeps from one to the next is steady then."""


def with_fewer_micro_batches(
    choices: tuple[Choice, ...], sizes: Mapping[str, int], count: int
) -> tuple[tuple[Choice, ...], dict[str, int], float]:
    """The same choices for a batch of a few micro-batches of the same size.

    Returns:
        the choices, the sizes, and how many times as many micro-batches the plan has.
    """
    name = batch_size_name(sizes)
    size = sizes[name]
    for index, choice in enumerate(choices):
        setting = choice.setting
        if isinstance(setting, MicroBatchingSetting) and count < setting.count <= size:
            micro_batch_size = -(-size // setting.count)
            fewer = replace(choice, setting=replace(setting, count=count))
            reduced = (*choices[:index], fewer, *choices[index + 1 :])
            return reduced, {**sizes, name: count * micro_batch_size}, setting.count / count
    return choices, dict(sizes), 1.0


def cut_short(choices: tuple[Choice, ...], sizes: Mapping[str, int]) -> bool:
    """Whether a plan is costed by a few of its micro-batches. On the CPU all are run all the same."""
    return with_fewer_micro_batches(choices, sizes, COSTED_MICRO_BATCHES)[2] != 1


def scaled_up(step: StepProfile, times: float) -> StepProfile:
    """The profile of a step with a few micro-batches as if there were so many times as many."""
    passes = step.seconds - step.tail_seconds
    return replace(
        step,
        seconds=passes * times + step.tail_seconds,
        flops=round(step.flops * times),
        blocks=tuple(replace(block, calls=round(block.calls * times)) for block in step.blocks),
    )


def step_cost_with(
    device: DeviceBackend,
    workload: Workload,
    choices: tuple[Choice, ...],
    sizes: Mapping[str, int],
    budget: int | None,
    *,
    tail: float = 0.0,
) -> StepCost:
    """What a step of a plain workload costs with these techniques.

    Args:
        budget: bytes of the device; None for as many as it takes.
        tail: seconds of the optimizer's step, which comes once, however many micro-batches there are.
    """
    chosen, run_sizes, times = choices, dict(sizes), 1.0
    if device.device_type == "cuda":  # on the CPU the batch itself counts
        chosen, run_sizes, times = with_fewer_micro_batches(choices, sizes, COSTED_MICRO_BATCHES)
    cost = device.step_cost(with_choices(workload, chosen), run_sizes, budget)
    if times == 1 or not cost.step_seconds:
        return cost
    passes = max(0.0, cost.step_seconds - tail)
    return replace(
        cost,
        step_seconds=cost.step_seconds + passes * (times - 1),
        step_flops=round(cost.step_flops * times),
        retries=round(cost.retries * times),
        retry_seconds=cost.retry_seconds * times,
    )


def own_step_cost(
    device: DeviceBackend,
    model: Callable[[], nn.Module],
    step: Callable[[State, Any], Any],
    budget: int | None = None,
    choices: tuple[Choice, ...] = (),
) -> StepCost:
    """What a step of one's own costs that makes its inputs itself.

    Args:
        step: given the model's state, and a batch that says nothing.
        budget: bytes of the device; None for as many as it takes.
        choices: techniques that the model has.
    """
    sizes = {"batch_size": 1}
    workload = Workload(model=model, batch=lambda batch_size: torch.empty(batch_size), sizes=sizes, step=step)
    return device.step_cost(with_choices(workload, choices), sizes, budget)


@contextmanager
def started(
    workload: Workload, device: torch.device | str, ended: Callable[[int], None] = lambda _: None
) -> Iterator[State]:
    """A workload that was started; what techniques changed beyond the model (TF32, the allocator) is undone afterwards.

    Args:
        ended: called before the undo, also after an error, with the bytes that techniques hold on the host unpinned.
    """
    live: AttachedProgram | None = None
    try:
        state = workload.start(device)
        live = live_of(state)
        yield state
    finally:
        ended(0 if live is None else live.pageable_bytes)
        # What undoing does to memory counts no more, nor whether there is enough of it.
        with suppress(torch.OutOfMemoryError):
            if live is not None:
                live.undo()


class PeakMeter:
    """What notes the peak of each interval as it ends; a part of `StepMeter`."""

    def __init__(self) -> None:
        self.boundaries = 0
        self._peaks: list[int] = []

    def peaks(self) -> Sequence[int]:
        """Peaks of all intervals."""
        return self._peaks
