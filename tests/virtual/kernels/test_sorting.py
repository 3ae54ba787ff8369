"""Sorting, selecting by rank, scans: in the order in which the C++ takes and gives back its blocks."""

import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.cub import scan_bytes, segmented_sort_bytes, sort_bytes
from vramfit.virtual.kernels.rules import Scratch, given_back
from vramfit.virtual.kernels.sorting import stable_sort

from .support import FAKE, ask, aten, context, cuda


def blocks(count, length, element, ctx):
    scratch = Scratch()
    stable_sort(scratch, count, length, element, ctx)
    return scratch.entries


def test_slices_up_to_4096_are_sorted_in_place_after_a_range_was_copied_into_them():
    assert ask(aten.sort.default, cuda(32, 4096)) == Extras(after=(4096 * 8, given_back(1)))
    longer = ask(aten.sort.default, cuda(32, 4097))
    assert longer is not None
    assert longer.after[0] > 4096 * 8


def test_one_long_slice_sorts_with_its_indices():
    ctx = context()
    found = ask(aten.sort.default, cuda(1_000_000), ctx=ctx)
    assert found is not None
    sort = sort_bytes(1_000_000, 4, 8, ctx)
    assert found.after == (8_000_000, sort, given_back(2), given_back(1))
    assert found.error_bytes > found.error_below_bytes > 0


def test_few_slices_are_sorted_together_by_value_then_by_slice():
    # 16 x 10,000: two arrays of index and segment, sorted keys, CUB's storage for pairs of 4 and 8 bytes; then
    # keys of 8 bytes alone, by the 4 bits that tell the slice.
    ctx, pairs = context(), 160_000 * 8
    by_value, by_slice = sort_bytes(160_000, 4, 8, ctx), sort_bytes(160_000, 8, 0, ctx, bits=4)
    assert blocks(160_000, 10_000, 4, ctx) == (
        *(pairs, pairs, 640_000, by_value, given_back(4), given_back(3)),
        *(by_slice, given_back(5), given_back(2), given_back(1)),
    )


def test_many_slices_are_sorted_by_segment():
    count = 200 * 5000
    storage = segmented_sort_bytes(count, 4, 8)
    assert blocks(count, 5000, 4, context()) == (count * 8, storage, given_back(2), given_back(1))


def test_sorting_across_rows_needs_dense_stand_ins():
    with FAKE:
        transposed = cuda(5000, 8).t()
    assert ask(aten.sort.default, transposed, 1).after[:3] == (160_000, 160_000, 320_000)
    # along the dimension that lies contiguously it does not: outputs keep these strides
    along = ask(aten.sort.default, transposed, 0)
    assert along == Extras(after=(8 * 8, given_back(1)))


def test_argsort_makes_sorted_values_too():
    found = ask(aten.argsort.default, cuda(8, 1000))
    assert found == Extras(before=(32_000,), after=(8000, given_back(1)))


def test_topk_of_a_vocabulary():
    # Eight rows of 32,000: several blocks a row. 256,000 elements over 108 x 6 x 256 threads: 2, at least 4
    # each, so 32 blocks of 1024 a row, 256 in all.
    found = ask(aten.topk.default, cuda(8, 32_000), 50)
    buffers = (32, 64, 64, 256 * 512, 8 * 1024, 1024, 1024)
    assert found == Extras(after=(*buffers, *(given_back(n) for n in range(7, 0, -1))))


def test_topk_of_short_rows_needs_nothing():
    assert ask(aten.topk.default, cuda(8, 1000), 50) is None


def test_topk_of_few_very_long_rows_selects_as_well():
    # Sorting them whole is for AMD's cards and CUDA before 11.6 (TensorTopK.cpp, should_use_sort).
    found = ask(aten.topk.default, cuda(2, 128_000), 50)
    assert found is not None
    assert sum(size for size in found.after if size > 0) < 2 * 128_000


def test_topk_of_many_sorts_what_it_found():
    # 5000 of 32,000: beyond 4096 the results are sorted beside themselves, and the indices gathered.
    found = ask(aten.topk.default, cuda(1, 32_000), 5000)
    assert found is not None
    assert found.after[14:16] == (40_000, 20_000)


def test_medians_sort_everything_unless_along_a_dimension():
    ctx = context()
    found = ask(aten.median.default, cuda(1_000_000), ctx=ctx)
    assert found is not None
    assert found.before[:3] == (4_000_000, 8_000_000, 8_000_000)
    assert ask(aten.median.dim, cuda(100, 1000), 1) is None
    with FAKE:
        transposed = cuda(100, 1000).t()
    assert ask(aten.median.dim, transposed, 1) == Extras(before=(400_000,))
    assert ask(aten.kthvalue.default, transposed, 3) == Extras(before=(400_000,))


def test_cumsum_uses_cub_for_one_long_row_only():
    storage = scan_bytes(1_000_000, 4)
    assert ask(aten.cumsum.default, cuda(1_000_000), 0) == Extras(
        after=(storage, given_back(1)), error_bytes=storage, error_below_bytes=storage // 2
    )
    assert ask(aten.cumsum.default, cuda(64, 1000), 1) is None


def test_cumsum_of_integers_and_masks_widens_them_first():
    assert ask(aten.cumsum.default, cuda(64, 1000, dtype=torch.bool), 1) == Extras(after=(512_000,))
    assert ask(aten.cumsum.default, cuda(64, 1000, dtype=torch.int64), 1) is None


def test_deterministic_sums_keep_a_number_for_each_multiprocessor():
    ctx = context(deterministic=True)
    found = ask(aten.cumsum.default, cuda(1_000_000), 0, ctx=ctx)
    assert found == Extras(after=(108 * 4, given_back(1)))


def test_running_maxima_of_strided_rows_copy_them():
    with FAKE:
        transposed = cuda(100, 1000).t()
    assert ask(aten.cummax.default, transposed, 1) == Extras(after=(400_000,))
    assert ask(aten.cummax.default, cuda(100, 1000), 1) is None
