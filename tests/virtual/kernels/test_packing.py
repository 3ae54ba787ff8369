"""Tables of addresses and sizes that packing and unpacking many tensors takes."""

import importlib

import pytest
import torch

from vramfit.virtual.kernels import Extras
from vramfit.virtual.kernels.rules import given_back

from .support import aten, context, cuda, extras


def table_of(entries: int) -> tuple[int, int]:
    return (8 * entries, given_back(1))


LLAMA_BLOCK = (*[(2048, 2048)] * 4, *[(8192, 2048)] * 3, (2048,), (2048,))


def test_gradients_of_a_block_are_packed_with_an_entry_for_each_tile():
    gradients = [cuda(*shape, dtype=torch.bfloat16) for shape in LLAMA_BLOCK]
    out = cuda(67_112_960)
    found = extras(aten._chunk_cat.out, (gradients, 0, 1), {"out": out}, out, context("H200"))
    tiles = 4 * 8192 + 3 * 32768 + 2 * 4  # of 2 KiB in float32
    assert found == Extras(before=table_of(tiles + 6 * 9 + 2))


def test_each_rank_has_its_chunk_padded():
    # 10 rows for 4 ranks: 3 each, 3 x 256 x 4 bytes are 1.5 tiles
    found = extras(aten._chunk_cat.default, ([cuda(10, 256)], 0, 4), {}, cuda(4, 768), context())
    assert found == Extras(before=table_of(2 + 6 + 2))


def test_fsdp2_calls_the_same_kernels_by_names_of_its_own():
    importlib.import_module("torch.distributed.fsdp")
    gradients, out = [cuda(10, 256), cuda(300)], cuda(4, 843)
    found = extras(
        torch.ops.fsdp.chunk_cat.default,
        (gradients,),
        {"dim": 0, "num_chunks": 4, "out": out},
        None,
        context(),
    )
    assert found == Extras(before=table_of(2 + 1 + 6 * 2 + 2))
    sizes, outputs = [2048, 1024], [cuda(8, 2048), cuda(8, 1024)]
    call = torch.ops.fsdp.split_with_sizes_copy.default
    found = extras(call, (cuda(8, 3072), sizes), {"dim": 1, "out": outputs}, None, context("H200"))
    assert found == split(cuda(8, 3072), sizes, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types_that_the_kernel_does_not_convert_take_no_table(dtype):
    out = cuda(1, 2560, dtype=dtype)
    assert extras(aten._chunk_cat.out, ([cuda(10, 256)], 0, 1), {"out": out}, out, context()) is None


def split(whole: torch.Tensor, sizes: list[int], dim: int, card: str = "H200") -> Extras | None:
    shape = list(whole.shape)
    outputs = [cuda(*shape[:dim], size, *shape[dim + 1 :], dtype=whole.dtype) for size in sizes]
    call = aten.split_with_sizes_copy.out
    return extras(call, (whole, sizes, dim), {"out": outputs}, None, context(card))


def test_a_small_gathered_block_is_unpacked_tile_by_tile():
    # 132 x 2048 threads in blocks of 128, twice: 4224 blocks at most
    assert split(cuda(8, 3072), [2048, 1024], 1) == Extras(after=table_of(4 + 2 + 4 * 2 + 1))


def test_a_large_gathered_block_is_unpacked_in_longer_rounds():
    sizes = [4 << 20, 2 << 20]
    # 8192 + 4096 tiles of each of 8 ranks, 98304: 24 rounds, 5 ranks and so 5 tiles a block of threads
    blocks = -(-8192 // 5) + -(-4096 // 5)
    assert split(cuda(8, 6 << 20), sizes, 1) == Extras(after=table_of(blocks + 4 * 2 + 1))
    # an RTX 3060 has 28 x 1536 threads, 672 blocks: 147 rounds, all 8 ranks in 19 tiles
    blocks = -(-8192 // 19) + -(-4096 // 19)
    assert split(cuda(8, 6 << 20), sizes, 1, "RTX 3060 12GB") == Extras(after=table_of(blocks + 4 * 2 + 1))


def test_unpacking_into_another_type_takes_no_table():
    whole = cuda(8, 3072)
    outputs = [cuda(8, 3072, dtype=torch.bfloat16)]
    call = aten.split_with_sizes_copy.out
    assert extras(call, (whole, [3072], 1), {"out": outputs}, None, context()) is None
