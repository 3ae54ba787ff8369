"""The search for a tile against brute force, on devices that are made up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.inference.tile_grid import make_layout
from vramfit.inference.tile_settings import TileSettings
from vramfit.planner.tile_search import TileCost, TileOption, TileSearch, tile_options


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    halo=st.integers(0, 20),
    multiple=st.sampled_from([1, 2, 8, 16]),
)
def test_tiles_cover_the_image_and_keep_its_multiples(shape: list[int], halo: int, multiple: int) -> None:
    dims = len(shape)
    options = tile_options(shape, halo=[halo] * dims, stride=[multiple] * dims)
    assert options[0].tile == tuple(shape)
    assert options[0].count == 1
    for option in options:
        settings_ = TileSettings(tile=option.tile, halo=(halo,) * dims, stride=(multiple,) * dims)
        layout = make_layout((1, 1, *shape), dims, True, settings_)
        assert layout.tile == option.tile
        assert layout.total == option.count


@pytest.mark.parametrize("case", range(12))
def test_the_search_comes_near_to_brute_force_in_few_runs(case: int) -> None:
    draw = random.Random(case)
    dims = 1 + case % 3
    shape = [draw.randrange(60, [100_000, 4_000, 260][dims - 1]) for _ in range(dims)]
    halo = [draw.choice([0, 4, 16])] * dims
    options = tile_options(shape, halo=halo, stride=[draw.choice([1, 8, 16])] * dims)
    base, slope = draw.uniform(1e6, 1e8), draw.uniform(100, 3000)
    least, rate = draw.uniform(2e-4, 5e-3), draw.uniform(1e-9, 2e-8)
    limit = round(base + slope * options[0].elements * draw.choice([0.3, 0.1, 0.03]))

    def cost(option: TileOption) -> TileCost:
        size = round(base + slope * option.elements)
        seconds = max(least, rate * option.elements) * option.calls
        return TileCost(fits=size <= limit, total_bytes=size, seconds=seconds)

    search = TileSearch(options, cost, limit)
    best = search.best()
    fastest = min((cost(option).seconds for option in options if cost(option).fits), default=None)
    if fastest is None:
        assert best is None
        return
    assert best is not None
    assert best[1].fits
    assert best[1].seconds <= 1.05 * fastest
    assert len(search.seen) <= 24


def test_nothing_is_found_where_the_smallest_tile_is_too_large() -> None:
    options = tile_options([64, 64], halo=[4, 4], stride=[16, 16])
    search = TileSearch(options, lambda one: TileCost(fits=False, total_bytes=one.elements, seconds=1.0), 10)
    assert search.best() is None
    assert search.smallest[1].total_bytes == min(option.elements for option in options)
