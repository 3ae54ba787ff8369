"""Where tiles lie."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vramfit.errors import UsageError
from vramfit.inference.tile_grid import TileLayout, blended_axis, exact_axis, make_layout
from vramfit.inference.tile_settings import Blend, TileSettings

small = st.integers(1, 60)


@given(length=st.integers(1, 400), tile=small, halo=st.integers(0, 20), stride=st.integers(1, 8))
def test_cores_of_an_exact_axis_are_the_axis_once_each(
    length: int, tile: int, halo: int, stride: int
) -> None:
    tile, halo = max(tile // stride, 1) * stride, halo // stride * stride
    assume(tile >= length or tile - 2 * halo >= stride)
    tiles = exact_axis(length, tile, halo, stride)
    assert [one.keep_start for one in tiles] == [0, *(one.keep_stop for one in tiles[:-1])]
    assert tiles[-1].keep_stop == tiles[-1].stop == length
    for one in tiles:
        assert one.start % stride == 0 and one.keep_start % stride == 0 and one.size <= max(tile, 1)
        assert one.keep_start < one.keep_stop
        assert one.keep_start - one.start >= halo or one.start == 0
        assert one.stop - one.keep_stop >= halo or one.stop == length
    assert all(one.size == tile for one in tiles[:-1])
    assert len(tiles) == 1 or tiles[-1].size > tile - stride


@settings(deadline=None)  # the first one imports MONAI
@given(length=st.integers(1, 400), tile=small, overlap=st.floats(0, 0.99))
def test_places_of_a_blended_axis_are_those_of_monai(length: int, tile: int, overlap: float) -> None:
    utils = pytest.importorskip("monai.data.utils")
    inferers = pytest.importorskip("monai.inferers.utils")
    size = max(length, tile)
    step = inferers._get_scan_interval((size,), (tile,), 1, (overlap,))
    expected = utils.dense_patch_slices((size,), (tile,), step, return_slice=False)
    assert [(one.start, one.stop) for one in blended_axis(length, tile, overlap)] == [
        tuple(map(int, place)) for (place,) in expected
    ]


def layout(shape: tuple[int, ...], axes: int = 2, **given_: object) -> TileLayout:
    return make_layout(shape, axes, len(shape) == axes + 2, TileSettings(**given_))


def test_a_layout_tells_how_much_work_it_is() -> None:
    found = layout((3, 100, 50), tile=(40, None), halo=(5, 0), tile_batch=2)
    assert found.counts == (3, 1) and found.total == 3 and found.tile == (40, 50)
    assert found.work == pytest.approx(1.2)
    assert [[tile.index for tile in batch] for batch in found.batched()] == [[0, 1], [2]]
    assert found.batches == 2
    assert [found.tile_at(tile.index) for tile in found.tiles()] == list(found.tiles())


def test_tiles_of_another_size_are_not_in_one_batch() -> None:
    found = layout((1, 1, 21, 8), tile=8, halo=0, stride=4, tile_batch=8)
    assert [[tile.sizes for tile in batch] for batch in found.batched()] == [[(8, 8)] * 2, [(5, 8)]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tile": 8, "halo": 4}, "leaves nothing of a tile"),
        ({"tile": 16, "halo": 4, "stride": 16}, "leaves nothing of a tile"),
        ({"tile": 0, "halo": 0}, "tile="),
        ({"tile": (8, 8, 8), "halo": 0}, "3 numbers for 2"),
        ({"tile": 8, "halo": -1}, "halo=-1"),
        ({"tile": 8, "halo": 1.5}, "halo=1.5"),
        ({"tile": 8, "overlap": 1.0}, "overlap=1.0"),
        ({"tile": 8, "overlap": (0.5,)}, "1 numbers for 2"),
        ({"tile": 8, "halo": 1, "blend": Blend.COSINE}, "do not overlap"),
        ({"tile": 8, "tile_batch": 0}, "tile_batch=0"),
    ],
)
def test_what_does_not_fit_is_told_in_one_line(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said) as told:
        layout((3, 40, 40), **wrong)
    assert "\n" not in str(told.value)


def test_an_empty_input_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        layout((0, 1, 8, 8), tile=4, halo=0)
