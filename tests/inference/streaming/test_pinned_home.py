"""Weights in blocks of pinned memory: apart from one another, with little lost, and back where they were."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from vramfit.inference.streaming.pinned_home import LARGEST_BLOCK, PinnedHome, block_places
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(1, 300 * MIB), min_size=1, max_size=60))
def test_tensors_lie_apart_in_blocks_of_powers_of_two(sizes: list[int]) -> None:
    ends: dict[int, int] = {}
    for size, (number, block, offset) in zip(sizes, block_places(sizes), strict=True):
        assert block & (block - 1) == 0
        assert offset % 512 == 0
        assert offset >= ends.get(number, 0)
        assert offset + size <= block <= max(LARGEST_BLOCK, 2 * max(sizes))
        ends[number] = offset + size


def test_little_is_lost_of_a_large_language_model() -> None:
    layer = [2 * 4096 * 4096] * 4 + [2 * 4096 * 11008] * 3 + [2 * 4096] * 2
    places = block_places(layer * 32)
    taken = sum({number: block for number, block, _ in places}.values())
    one_by_one = sum(1 << (size - 1).bit_length() for size in layer * 32)
    assert taken < 1.04 * 32 * sum(layer) < 0.8 * one_by_one


def test_parameters_are_pinned_and_go_back() -> None:
    with VirtualGPU("RTX 4090") as gpu:
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        model[1].cuda()
        parameters = list(model.parameters())
        home = PinnedHome()
        home.take(parameters)
        assert all(one.is_pinned() and one.device.type == "cpu" for one in parameters)
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.host_memory_stats()["active_bytes.current"] == 20 * MIB  # blocks of 16 MiB and of 4
        home.give_back()
        assert list(model.parameters()) is not parameters
        assert [one.device.type for one in parameters] == ["cpu", "cpu", "cuda", "cuda", *["cpu"] * 4]
        assert not any(one.is_pinned() for one in parameters)
        assert torch.cuda.host_memory_stats()["active_bytes.current"] == 0
    assert gpu.run.host_pinned_peak_bytes == 20 * MIB  # blocks of 16 MiB and of 4


def test_a_parameter_of_pinned_memory_is_pinned_on_the_virtual_card() -> None:
    with VirtualGPU("RTX 4090"):
        pinned = torch.empty(1024, pin_memory=True)
        parameter = nn.Parameter(pinned[:100])
        del pinned
        assert parameter.is_pinned()
        assert not nn.Parameter(torch.empty(100)).is_pinned()
