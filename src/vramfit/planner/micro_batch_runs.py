"""The cost of many micro-batches from a run of a few: each after the second does what the second did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vramfit.planner.devices.cost import DeviceBackend, StepCost
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Choice, with_choices
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.workload import Workload

PROFILED_MICRO_BATCHES = 3
"""Micro-batches that are run to profile a step: the first finds no gradients, the last is followed by the step."""


COSTED_MICRO_BATCHES = 8
"""Micro-batches that are run for the cost of a plan: what the allocator keeps from one to the next is steady then."""


def with_fewer_micro_batches(
    choices: tuple[Choice, ...], sizes: Mapping[str, int], count: int
) -> tuple[tuple[Choice, ...], dict[str, int], float]:
    """The same choices for a batch of a few micro-batches of the same size.

    Args:
        choices: the techniques.
        sizes: of the batch.
        count: how many micro-batches.

    Returns:
        the choices, the sizes, and how many times as many micro-batches there are in truth.
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
    """What a step with these techniques costs.

    Args:
        device: where to run.
        workload: plain.
        choices: the techniques.
        sizes: of the batch.
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
    )
