"""Predicted requests replayed with segments at the addresses of a recording."""

from __future__ import annotations

import pytest
import torch
from comparing.addresses import peaks_at_recorded_addresses
from comparing.rows import Figure, Origin, Row, Stream, Tool
from comparing.tables import exactness

from vramfit.allocator import Driver
from vramfit.trace import MemoryTrace
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


class Rising(Driver):
    """A card whose segments lie one above the other."""

    def malloc(self, size: int) -> int | None:
        return self.reserve(size) if self._claim(size) else None

    def free(self, address: int, size: int) -> None:
        self.mapped_bytes -= size
        self.release(address, size)


def _trace() -> MemoryTrace:
    """Which of two equal free blocks is taken decides whether 40 MiB are free in one piece at the end."""
    with VirtualGPU("24GiB", alloc_conf="") as gpu:
        large, other = (torch.empty(mib * MIB, dtype=torch.uint8, device="cuda") for mib in (40, 30))
        del large
        first = torch.empty(10 * MIB, dtype=torch.uint8, device="cuda")
        del other
        kept = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del first
        last = torch.empty(40 * MIB, dtype=torch.uint8, device="cuda")
        del kept, last
    return gpu.trace


def test_peaks_are_those_at_the_recordings_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    falling = _trace()
    with monkeypatch.context() as patch:
        patch.setattr("vramfit.virtual.machine.Driver", Rising)
        rising = _trace()
    assert peaks_at_recorded_addresses(falling, falling) == (70 * MIB, 70 * MIB)
    assert peaks_at_recorded_addresses(rising, falling) == (70 * MIB, 110 * MIB)
    assert peaks_at_recorded_addresses(falling, rising) == (70 * MIB, 70 * MIB)


def test_rows_that_are_exact_are_counted() -> None:
    def row(predicted: int, at_addresses: tuple[int, int] | None) -> Row:
        stream = Stream(recorded=1, predicted=1, differing=0, at_addresses=at_addresses)
        figures = {Tool.VRAMFIT: Figure(allocated=predicted, reserved=20)}
        return Row(
            name="x",
            origin=Origin.CARD,
            device="",
            torch="",
            allocated=10,
            reserved=20,
            stream=stream,
            figures=figures,
        )

    rows = [row(10, (10, 20)), row(11, (10, 20)), row(11, (11, 20)), row(11, None)]
    assert exactness(rows) == (
        "Both peaks are equal to the byte in 1 of 3 recordings of our own, and in 2 with segments at the card's "
        "addresses."
    )
    assert exactness([]) == ""
