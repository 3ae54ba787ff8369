"""Requested and allocated bytes by category, against arithmetic and the allocator's own figures, to the byte."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vramfit.analysis import at, verdict
from vramfit.report import render, to_json
from vramfit.trace import Category
from vramfit.units import format_bytes
from vramfit.virtual.gpu import VirtualGPU

SIZES = {
    "below a block": lambda draw: draw.randrange(1, 128),
    "small pool": lambda draw: draw.randrange(1, 262_144),
    "large pool": lambda draw: draw.randrange(262_145, 2_000_000),
    "segments of their own": lambda draw: draw.randrange(2_700_000, 4_000_000),
    "all": lambda draw: draw.choice([draw.randrange(1, 1000), draw.randrange(1, 3_000_000)]),
}
"""Elements of a parameter of four bytes."""


class Odd(nn.Module):
    """Parameters of odd sizes."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum()


@pytest.mark.parametrize("draw_size", SIZES.values(), ids=SIZES.keys())
def test_what_was_requested_is_arithmetic_and_the_rest_is_slack(
    gpu: VirtualGPU, draw_size: Callable[[random.Random], int]
) -> None:
    draw = random.Random(17)
    sizes = [draw_size(draw) for _ in range(40)]
    model = Odd(sizes).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model().backward()
    optimizer.step()

    stats = torch.cuda.memory_stats()
    trace = gpu.trace
    now = at(trace, len(trace) - 1)
    total = 4 * sum(sizes)
    assert now.requested[Category.PARAMETERS] == now.requested[Category.GRADIENTS] == total
    assert now.requested[Category.OPTIMIZER_STATE] == 2 * total
    assert sum(now.requested.values()) == stats["requested_bytes.all.current"]
    assert sum(now.categories.values()) == now.allocated == stats["allocated_bytes.all.current"]
    assert sum(map(now.slack_of, Category)) == now.slack
    rounded = [-(-4 * size // 512) * 512 for size in sizes]
    whole = [0 if size <= 1 << 20 else 1 << 20 for size in rounded]  # at most what is not split off
    for category, copies in (
        (Category.PARAMETERS, 1),
        (Category.GRADIENTS, 1),
        (Category.OPTIMIZER_STATE, 2),
    ):
        most = copies * sum(size + rest for size, rest in zip(rounded, whole, strict=True))
        assert copies * sum(rounded) <= now.categories[category] <= most


def test_the_report_says_how_much_of_a_category_is_slack() -> None:
    sizes = [2_560_001] * 20  # two of them fill a segment of 20 MiB but for 0.47 MiB, which is not split off
    with VirtualGPU("RTX 4090") as gpu:
        model = Odd(sizes).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model().backward()
        optimizer.step()
        kept = gpu.run
    judged = verdict(kept)
    found = judged.device.breakdown
    slack = format_bytes(found.slack_of(Category.OPTIMIZER_STATE))
    assert f"of which slack: parameters {format_bytes(found.slack_of(Category.PARAMETERS))}" in render(
        kept, judged
    )
    assert f"optimizer state {slack}" in " ".join(render(kept, judged).split())
    document = to_json(kept, judged)
    assert document["requested_bytes"]["optimizer_state"] == 2 * 4 * sum(sizes)
    assert document["requested_bytes"] == document["devices"][0]["requested_bytes"]
    assert (
        sum(document["categories"].values()) - sum(document["requested_bytes"].values())
        == document["fragmentation"]["slack_bytes"]
    )
