"""Writes through indices: flat positions, sorted when they accumulate or must be deterministic."""

import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.cub import sort_bytes
from vramfit.virtual.kernels.rules import given_back

from .support import FAKE, aten, context, cuda, extras


def backward_write(target, indices, values, ctx=None):
    """What autograd writes: its indices were checked before."""
    args = (target, indices, values, True, True)
    return extras(aten._index_put_impl_.default, args, {}, target, ctx or context())


def test_accumulating_writes_sort_their_positions():
    table, ids, values = cuda(1000, 64), cuda(5000, dtype=torch.int64), cuda(5000, 64)
    found = backward_write(table, [ids], values)
    flat = 5000 * 8
    assert found is not None
    # The index wrapped into range, times its stride (the first is given back); then what the sort needs:
    # positions up to 999 have 10 bits.
    sort = sort_bytes(5000, 8, 8, context(), bits=10)
    assert found.after == (flat, flat, given_back(1), flat, flat, flat, sort, given_back(6))
    args = (table, [ids], values, False)
    assert extras(aten._index_put_impl_.default, args, {}, table, context()) is None


def test_a_program_s_own_writes_look_for_indices_out_of_range():
    # wrapIndexOnce: the least and the largest index, each compared with the size, before anything else
    table, ids, values = cuda(1000, 64), cuda(500, dtype=torch.int64), cuda(500, 64)
    found = extras(aten.index_put_.default, (table, [ids], values, True), {}, table, context())
    assert found is not None
    compared = (8, 8, 1, given_back(3), 1, given_back(4), given_back(2), given_back(1))
    assert found.after[:8] == compared
    assert found.after[8:11] == (4000, 4000, given_back(5))


def test_flat_positions_are_summed_up_one_index_after_the_other():
    # As recorded of logits[rows, targets] with rows on the host: its product comes over, that of the targets is
    # made on the card, added and given back.
    logits, rows, targets = cuda(512, 10_000), torch.arange(512), cuda(512, dtype=torch.int64)
    found = backward_write(logits, [rows, targets], cuda(512))
    flat = 512 * 8
    assert found is not None
    assert found.after[:8] == (flat, flat, flat, given_back(2), given_back(3), flat, flat, flat)
    assert found.after[8:] == (1, given_back(7))


def test_a_broadcast_value_is_expanded_before_it_is_written():
    found = backward_write(cuda(1000, 64), [cuda(5000, dtype=torch.int64)], cuda(1))
    assert found is not None
    assert found.after[3] == 5000 * 64 * 4


def test_indices_that_are_not_neighbours_bring_their_dimensions_to_the_front():
    target, ids = cuda(10, 20, 30), cuda(400, dtype=torch.int64)
    found = backward_write(target, [ids, None, ids], cuda(400, 20))
    assert found is not None
    assert 10 * 20 * 30 * 4 in found.after


def test_narrow_indices_are_widened_and_strided_targets_copied():
    with FAKE:
        target = cuda(64, 1000).t()
    found = backward_write(target, [cuda(500, dtype=torch.int32)], cuda(500, 64))
    assert found is not None
    assert found.after[:2] == (256_000, 4000)
    reading = (cuda(1000, 64), [cuda(500, dtype=torch.int32)])
    assert extras(aten.index.Tensor, reading, {}, cuda(500, 64), context()) == Extras(before=(4000,))


def test_deterministic_programs_sort_other_writes_too():
    sure = context(deterministic=True)
    table, ids, values = cuda(1000, 64), cuda(500, dtype=torch.int64), cuda(500, 64)
    for op, args in {
        aten.index_put_.default: (table, [ids], values),
        aten.index_add.default: (table, 0, ids, values),
        aten.index_copy.default: (table, 0, ids, values),
    }.items():
        assert extras(op, args, {}, table, context()) is None
        found = extras(op, args, {}, table, sure)
        assert found is not None
        assert list(found.after).count(4000) == 5  # wrapped, flat, sorted, origin, range


def test_deterministic_scatters_write_slices_where_the_index_is_expanded():
    sure, target, values = context(deterministic=True), cuda(1000, 64), cuda(500, 64)
    with FAKE:
        rows = cuda(500, 1, dtype=torch.int64).expand(500, 64)
    assert extras(aten.scatter_add.default, (target, 0, rows, values), {}, target, context()) is None
    slices = extras(aten.scatter_add.default, (target, 0, rows, values), {}, target, sure)
    assert slices is not None
    assert max(slices.after) == sort_bytes(500, 8, 8, sure, bits=10) or max(slices.after) == 4000
    everywhere = cuda(500, 64, dtype=torch.int64)
    single = extras(aten.scatter_add.default, (target, 0, everywhere, values), {}, target, sure)
    assert single is not None
    assert single.after[0] == 64 * 8  # a range for the other dimension
    assert 32_000 * 8 in single.after
    assert single.error_bytes >= 32_000 * 2 * 8  # older releases wrote all positions into one array


def test_a_boolean_index_turns_into_positions():
    values, mask = cuda(100, 64), cuda(100, dtype=torch.bool)
    found = extras(aten.index.Tensor, (values, [mask]), {}, cuda(30, 64), context())
    assert found == Extras(before=(30 * 8,))
    ids = cuda(30, dtype=torch.int64)
    assert extras(aten.index.Tensor, (values, [ids]), {}, cuda(30, 64), context()) is None


def test_masked_scatter_counts_along_the_mask():
    values, mask = cuda(100, 64), cuda(100, 64, dtype=torch.bool)
    found = extras(aten.masked_scatter.default, (values, mask, values), {}, values, context())
    assert found is not None
    assert found.after[0] == 100 * 64 * 8
    rows = cuda(100, 1, dtype=torch.bool)
    broadcast = extras(aten.masked_scatter.default, (values, rows, values), {}, values, context())
    assert broadcast is not None
    assert broadcast.after[1] == 6400  # the mask at its full size


def test_means_of_what_is_written_count_it():
    table, ids, values = cuda(10, 4), cuda(50, dtype=torch.int64), cuda(50, 4)
    args = (table, 0, ids, values, "mean")
    found = extras(aten.index_reduce.default, args, {}, table, context())
    assert found == Extras(after=(160, 800, given_back(2), 40, given_back(3)))
    assert extras(aten.index_reduce.default, (*args[:4], "amax"), {}, table, context()) is None
