"""Runs a workload with techniques for its price, many micro-batches by a few of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vramfit.planner.pieces import PRICED_PIECES, fewer_pieces
from vramfit.planner.price import Device, Price
from vramfit.techniques import Choice, with_choices
from vramfit.workload import Workload


def price_with(
    device: Device,
    workload: Workload,
    choices: tuple[Choice, ...],
    sizes: Mapping[str, int],
    budget: int | None,
    *,
    tail: float = 0.0,
) -> Price:
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
