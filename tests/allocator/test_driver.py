from __future__ import annotations

import pytest

from vramfit.allocator import Driver
from vramfit.allocator.driver import REGIONS, ScatteredDriver
from vramfit.units import GIB, MIB


def test_memory_runs_out_when_all_pages_are_taken() -> None:
    driver = Driver(100 * MIB, outside_bytes=60 * MIB)
    assert driver.free_bytes == 40 * MIB
    first = driver.malloc(30 * MIB)
    assert first is not None and driver.free_bytes == 10 * MIB
    assert driver.process_bytes == 90 * MIB
    assert driver.malloc(12 * MIB) is None
    driver.free(first, 30 * MIB)
    assert driver.free_bytes == 40 * MIB


def test_a_page_is_the_least_that_is_taken() -> None:
    driver = Driver(16 * MIB)
    assert driver.malloc(3 * MIB) is not None
    assert driver.free_bytes == 12 * MIB


def test_addresses_fall_and_holes_are_filled_from_the_top() -> None:
    driver = Driver(GIB)
    a, b, c = (driver.malloc(size * MIB) for size in (4, 8, 4))
    assert (a - b, b - c) == (8 * MIB, 4 * MIB)
    assert a % (2 * MIB) == 0
    driver.free(b, 8 * MIB)
    assert driver.malloc(10 * MIB) == c - 10 * MIB  # the hole is too small
    assert driver.malloc(2 * MIB) == b + 6 * MIB
    assert driver.malloc(6 * MIB) == b


def test_holes_grow_together() -> None:
    driver = Driver(GIB)
    addresses = [driver.malloc(2 * MIB) for _ in range(5)]
    for index in (1, 3, 2):
        driver.free(addresses[index], 2 * MIB)
    assert driver.malloc(6 * MIB) == addresses[3]
    driver.free(addresses[3], 6 * MIB)
    driver.free(addresses[4], 2 * MIB)
    driver.free(addresses[0], 2 * MIB)
    assert driver.malloc(100 * MIB) == addresses[0] - 98 * MIB


def test_reservations_take_addresses_but_no_memory() -> None:
    driver = Driver(64 * MIB)
    base = driver.reserve(1024 * GIB)
    assert driver.free_bytes == 64 * MIB
    assert driver.map(base, 40 * MIB)
    assert not driver.map(base + 40 * MIB, 26 * MIB)
    assert driver.free_bytes == 24 * MIB
    driver.unmap(base, 20 * MIB)
    assert driver.free_bytes == 44 * MIB
    driver.release(base, 1024 * GIB)
    assert driver.reserve(MIB) == base


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="a card of 0 bytes"):
        Driver(0)


@pytest.mark.parametrize("rising", [False, True])
def test_a_scattered_driver_gives_ranges_of_several_regions(rising: bool) -> None:
    driver = ScatteredDriver(GIB, draw=iter([0, 1, 0, 1, REGIONS - 1, 1]).__next__, rising=rising)
    a, b, c, d, e = (driver.malloc(8 * MIB) for _ in range(5))
    step = 8 * MIB if rising else -8 * MIB
    assert (c - a, d - b) == (step, step)
    assert len({address >> 42 for address in (a, b, e)}) == 3
    driver.free(b, 8 * MIB)
    assert driver.free_bytes == GIB - 32 * MIB
    assert driver.malloc(8 * MIB) == b


def test_a_scattered_driver_has_the_memory_of_one_card() -> None:
    driver = ScatteredDriver(20 * MIB, draw=iter(range(REGIONS)).__next__)
    assert driver.malloc(12 * MIB) is not None
    assert driver.malloc(12 * MIB) is None
    assert driver.malloc(7 * MIB) is not None
