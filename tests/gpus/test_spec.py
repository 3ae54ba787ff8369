"""What follows from a card's figures."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.gpus import Price, find_gpu
from vramfit.units import KIB, MIB


def test_limits_come_from_the_capability() -> None:
    a100, rtx_4090 = find_gpu("A100"), find_gpu("RTX 4090")
    assert (a100.max_threads_per_sm, a100.shared_memory_per_block_optin) == (2048, 163 * KIB)
    assert (rtx_4090.max_threads_per_sm, rtx_4090.shared_memory_per_block_optin) == (1536, 99 * KIB)
    assert rtx_4090.shared_memory_per_block == 48 * KIB
    assert rtx_4090.shared_memory_per_sm == 100 * KIB
    assert rtx_4090.registers_per_sm == 65_536
    assert rtx_4090.warp_size == 32


def test_a_measured_context_is_kept() -> None:
    assert find_gpu("RTX 3090").typical_context_bytes == 250 * MIB
    assert find_gpu("RTX 6000 Ada").typical_context_bytes == 430 * MIB


@pytest.mark.parametrize(
    ("name", "measured_mib"),
    [
        ("RTX 3090", 250),
        ("RTX 6000 Ada", 430),
        ("RTX 4090", 392),
        ("RTX 3080", 225),
        ("RTX 4070", 161),
        ("RTX 5060", 135),
    ],
)
def test_the_context_rule_meets_what_was_measured(name: str, measured_mib: int) -> None:
    card = dataclasses.replace(find_gpu(name), context_bytes=None)
    assert card.typical_context_bytes / MIB == pytest.approx(measured_mib, rel=0.09)


def test_prices_read_as_money() -> None:
    assert str(Price(value=1599, unit="USD", date="2022-10-12", source="s")) == "$1,599"
    assert str(Price(value=2.5, unit="USD/h", date="2024-06", source="s")) == "$2.50/h"


def test_a_card_cannot_be_changed() -> None:
    card = find_gpu("T4")
    with pytest.raises(dataclasses.FrozenInstanceError):
        card.total_bytes = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        card.peak_flops["float32"] = 1.0  # type: ignore[index]
