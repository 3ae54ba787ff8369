"""Looks at many micro-batches by running a few of them: each after the second does what the second did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vramfit.planner.devices.cost import DeviceBackend, StepCost
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Choice, with_choices
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.workload import Workload

LOOKED_PIECES = 3
"""Micro-batches that are run to look at a step: the first finds no gradients, the last is followed by the step."""


PRICED_PIECES = 8
"""Micro-batches that are run to price a plan: what the allocator keeps from one to the next has settled by then."""


def fewer_pieces(
    choices: tuple[Choice, ...], sizes: Mapping[str, int], pieces: int
) -> tuple[tuple[Choice, ...], dict[str, int], float]:
    """The same choices for a batch of a few micro-batches of the same size.

    Args:
        choices: the techniques.
        sizes: of the batch.
        pieces: how many micro-batches.

    Returns:
        the choices, the sizes, and how many times as many micro-batches there are in truth.
    """
    name = batch_size_name(sizes)
    size = sizes[name]
    for index, choice in enumerate(choices):
        setting = choice.setting
        if isinstance(setting, MicroBatchingSetting) and pieces < setting.count <= size:
            piece = -(-size // setting.count)
            fewer = replace(choice, setting=replace(setting, count=pieces))
            looked_at = (*choices[:index], fewer, *choices[index + 1 :])
            return looked_at, {**sizes, name: pieces * piece}, setting.count / pieces
    return choices, dict(sizes), 1.0


def repeated(observation: StepProfile, times: float) -> StepProfile:
    """An observation of a few micro-batches as if there were so many times as many."""
    passes = observation.seconds - observation.tail_seconds
    return replace(
        observation,
        seconds=passes * times + observation.tail_seconds,
        flops=round(observation.flops * times),
        blocks=tuple(replace(block, calls=round(block.calls * times)) for block in observation.blocks),
    )


def price_with(
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
        chosen, run_sizes, times = fewer_pieces(choices, sizes, PRICED_PIECES)
    price = device.price(with_choices(workload, chosen), run_sizes, budget)
    if times == 1 or not price.step_seconds:
        return price
    passes = max(0.0, price.step_seconds - tail)
    return replace(
        price,
        step_seconds=price.step_seconds + passes * (times - 1),
        step_flops=round(price.step_flops * times),
    )
