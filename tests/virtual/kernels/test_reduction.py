import pytest
import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.rules import given_back

from .support import FAKE, ask, aten, context, cuda

# A recording on a card with 72 SMs of capability 7.5 holds, for 1,966,080 elements: a mean that allocates its
# 4 bytes of output, then 576 bytes and 4; and an `all` of as many booleans with 144 bytes and 4.
TURING_72 = "Quadro RTX 6000"


def test_the_recorded_mean_and_all():
    ctx = context(TURING_72)
    assert (ctx.spec.sm_count, ctx.capability) == (72, (7, 5))
    assert ask(aten.mean.default, cuda(1_966_080), ctx=ctx) == Extras(after=(576, 4))
    flags = cuda(1_966_080, dtype=torch.bool)
    assert ask(aten.all.default, flags, ctx=ctx) == Extras(after=(144, 4))
    # What anomaly detection asks is the same kernel.
    assert ask(aten._is_any_true.default, flags, ctx=ctx) == Extras(after=(144, 4))


def test_rows_fit_in_blocks_of_their_own():
    # 4096 rows of 768: one warp or block per row, never several blocks.
    assert ask(aten.sum.dim_IntList, cuda(4096, 768), [1]) is None


def test_bias_gradient_sums_columns_over_blocks():
    # sum(0) of 8192 x 1024 floats on an A100 (108 SMs of 2048 threads). Columns vary fastest and are loaded
    # four at a time: 256 vectors by 8192 rows; 512 / 4 = 128 threads: 32 wide, 4 high. 8192 values a thread
    # column, >= 4 x 16, so rows split over the 4: 2048 each. Blocks: 8 columns of blocks for 108 x 16 = 1728.
    # Per output: min(1728 / 8 = 216, 2048 / 16 = 128), at least 2048 / 256 = 8: 128 blocks.
    # Partial results: 4 B x 1024 outputs x 128 x (32 x 4); counters 8 x 4 B.
    found = ask(aten.sum.dim_IntList, cuda(8192, 1024), [0])
    assert found == Extras(after=(4 * 1024 * 128 * 128, 32))


def test_index_reductions_keep_pairs_of_sixteen_bytes():
    ctx = context(TURING_72)
    mean = ask(aten.mean.default, cuda(1_966_080), ctx=ctx)
    largest = ask(aten.argmax.default, cuda(1_966_080), ctx=ctx)
    assert mean is not None and largest is not None
    assert largest.after == (mean.after[0] * 4, mean.after[1])


def test_halves_accumulate_in_float32_and_integers_in_int64():
    ctx = context(TURING_72)
    assert ask(aten.sum.default, cuda(1_966_080, dtype=torch.float16), ctx=ctx) == Extras(after=(576, 4))
    wide = ask(aten.sum.default, cuda(1_966_080, dtype=torch.int64), ctx=ctx)
    assert wide == Extras(after=(1152, 4))


@pytest.mark.parametrize("shape", [(), (0,), (100,), (1, 1, 1)])
def test_small_reductions_need_nothing(shape):
    assert ask(aten.sum.default, cuda(*shape)) is None


def test_a_transposed_input_is_seen_as_it_lies_in_memory():
    with FAKE:
        transposed = cuda(1024, 8192).t()
    assert ask(aten.sum.dim_IntList, transposed, [1]) == ask(aten.sum.dim_IntList, cuda(1024, 8192), [0])


def test_variance_keeps_four_numbers_an_output():
    ctx = context(TURING_72)
    found = ask(aten.var.correction, cuda(1_966_080), [0], ctx=ctx)
    assert found is not None
    assert found.after[0] % 16 == 0


def test_counting_a_mask_widens_it_to_int64():
    # sum of booleans: ReduceOps.cpp, make_reduction_from_ty copies them in the type of the result
    found = ask(aten.sum.default, cuda(1000, dtype=torch.bool))
    assert found == Extras(after=(8000,))
    assert ask(aten.sum.default, cuda(1000, dtype=torch.int64)) is None
    assert ask(aten.sum.dim_IntList, cuda(8, 128, dtype=torch.int32), [1]) == Extras(after=(8 * 128 * 8,))
    assert ask(aten.count_nonzero.dim_IntList, cuda(1000), []) == Extras(before=(1000,), after=(8000,))


def test_halves_are_summed_as_float32_without_a_copy():
    assert ask(aten.sum.default, cuda(1000, dtype=torch.float16), dtype=torch.float32) is None
    doubled = ask(aten.sum.default, cuda(1000, dtype=torch.float16), dtype=torch.float64)
    assert doubled == Extras(after=(8000,))


def test_inputs_beyond_two_gibibytes_are_reduced_in_pieces():
    # 8192 x 128,256 floats are 4.2 GB: two halves of 4096 rows reach 2.1 GB - 4 rows' worth, still more than
    # 2**31 - 1 bytes by 0: 4096 x 128,256 x 4 = 2,101,346,304, which fits.
    found = ask(aten.sum.dim_IntList, cuda(8192, 128_256), [0])
    assert found is not None
    buffers = [size for size in found.after if size > 0]
    assert len(buffers) == 4  # partial results and counters of each half
    assert buffers[:2] == buffers[2:]
    assert list(found.after).count(given_back(1)) == 1
    # Each half: 4096 rows by 32,064 vectors of four; 128 threads, 32 wide and 4 high: 1024 rows each, at least
    # 64; 1002 columns of blocks <= 108 x 16; max(min(ceil(1728 / 1002), 1024 / 16), 1024 / 256) = 4 blocks.
    assert buffers[0] == 4 * 128_256 * 4 * (32 * 4)
    assert buffers[1] == 1002 * 4


def test_halves_in_pieces_accumulate_beside_their_output():
    found = ask(aten.sum.dim_IntList, cuda(16_384, 128_256, dtype=torch.bfloat16), [0])
    assert found is not None
    assert found.after[0] == 128_256 * 4  # float32 sums, which a bfloat16 output cannot hold
    largest = ask(aten.max.dim, cuda(8192, 128_256), 0)
    assert largest is not None
    assert largest.after[0] == 128_256 * 16


def test_the_position_in_a_whole_strided_tensor_is_found_in_a_copy():
    with FAKE:
        transposed = cuda(100, 50).t()
    found = ask(aten.argmax.default, transposed)
    assert found == Extras(after=(20_000,))
    assert ask(aten.argmax.default, transposed, 1) is None
