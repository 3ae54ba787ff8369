import pytest
import torch

from vramfit.virtual.kernels import Extras, extras
from vramfit.virtual.kernels.cub import scan_bytes, sort_bytes
from vramfit.virtual.kernels.sorting import stable_sort_sizes

from .support import FAKE, ask, aten, context, cuda


def test_cub_sorts_small_arrays_in_one_block():
    # 256 threads of 19 x 4 / 8 = 9 pairs of 8 bytes
    assert sort_bytes(2304, 8, 8, context()) == 1
    assert sort_bytes(2305, 8, 8, context()) > 1
    assert sort_bytes(0, 8, 8, context()) == 0


def test_cub_onesweep_keeps_a_second_set_of_keys_and_values():
    # 100,000 int64 pairs on capability 8.0: tiles of 384 x 10 = 3840, so 27 tiles; 8 passes of 256 digits.
    histograms, lookback = 8 * 256 * 4, 27 * 256 * 4
    copies = 800_000  # a multiple of 256 is 800,000 itself: 3125 x 256
    expected = histograms + lookback + 2 * copies + 256 + 255
    assert sort_bytes(100_000, 8, 8, context()) == expected


def test_cub_scan_keeps_a_descriptor_a_tile():
    # 1,000,000 floats: tiles of 128 x 15 = 1920, 521 of them and 32 more, 8 bytes each: 4424, rounded to 4608
    assert scan_bytes(1_000_000, 4) == 4608 + 255


def test_slices_up_to_4096_are_sorted_in_place():
    assert ask(aten.sort.default, cuda(32, 4096)) is None
    assert ask(aten.sort.default, cuda(32, 4097)) is not None


def test_one_long_slice_sorts_with_its_indices():
    ctx = context()
    found = ask(aten.sort.default, cuda(1_000_000))
    assert found is not None
    assert found.after == (8_000_000, sort_bytes(1_000_000, 4, 8, ctx))
    assert found.error_bytes > 0


def test_few_slices_are_sorted_together():
    # 16 x 10,000: two arrays of index and segment, the values sorted, and CUB's storage for 160,000 pairs
    ctx = context()
    pairs = 160_000 * 8
    assert stable_sort_sizes(160_000, 10_000, 4, ctx) == [
        *(pairs, pairs, 160_000 * 4),
        sort_bytes(160_000, 4, 8, ctx),
    ]


def test_many_slices_are_sorted_by_segment():
    sizes = stable_sort_sizes(200 * 5000, 5000, 4, context())
    assert sizes[0] == 200 * 5000 * 8


def test_sorting_across_rows_needs_dense_stand_ins():
    with FAKE:
        transposed = cuda(5000, 8).t()
    found = ask(aten.sort.default, transposed)
    assert found is not None
    assert found.after[:2] == (5000 * 8 * 4, 5000 * 8 * (4 + 8))


def test_topk_of_a_vocabulary():
    # Eight rows of 32,000: several blocks a row. 256,000 elements over 108 x 6 x 256 threads: 2, at least 4
    # each, so 32 blocks of 1024 a row, 256 in all.
    found = ask(aten.topk.default, cuda(8, 32_000), 50)
    assert found == Extras(after=(32, 64, 64, 256 * 512, 8 * 1024, 1024, 1024))


def test_topk_of_short_rows_needs_nothing():
    assert ask(aten.topk.default, cuda(8, 1000), 50) is None


def test_topk_of_few_very_long_rows_sorts_them_whole():
    found = ask(aten.topk.default, cuda(2, 128_000), 50)
    assert found is not None
    assert found.after[:2] == (2 * 128_000 * 4, 2 * 128_000 * 8)


def test_cumsum_uses_cub_for_one_long_row_only():
    found = ask(aten.cumsum.default, cuda(1_000_000), 0)
    assert found == Extras(after=(4608 + 255,), error_bytes=4096)
    assert ask(aten.cumsum.default, cuda(64, 1000), 1) is None


def test_multinomial_makes_noise_as_large_as_the_weights():
    weights = cuda(8, 32_000)
    assert ask(aten.multinomial.default, weights, 1) == Extras(after=(8 * 32_000 * 4,))
    repeated = ask(aten.multinomial.default, weights, 5, True)
    assert repeated is not None
    assert repeated.after[:2] == (8 * 32_000 * 4, 8 * 32_000 * 4)


def test_randperm_sorts_random_keys():
    found = extras(aten.randperm.default, (100_000,), {}, cuda(100_000, dtype=torch.int64), context())
    assert found is not None
    assert found.after[:3] == (800_000, 800_000, 800_000)


@pytest.mark.parametrize("inverse", [False, True])
def test_unique_sorts_a_copy(inverse):
    source = cuda(100_000, dtype=torch.int64)
    outputs = (cuda(50, dtype=torch.int64), source, cuda(0, dtype=torch.int64))
    found = extras(aten._unique2.default, (source, True, inverse), {}, outputs, context())
    assert found is not None
    assert found.before[:2] == (800_000, sort_bytes(100_000, 8, 8 if inverse else 0, context()))
    assert found.error_bytes > 0
