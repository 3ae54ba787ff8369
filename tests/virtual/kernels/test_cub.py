"""CUB's storage, worked out by hand from the dispatch and tuning headers of CCCL 3.0."""

import pytest

from vramfit.virtual.kernels.cub import (
    reduce_bytes,
    scan_bytes,
    segmented_sort_bytes,
    select_bytes,
    sort_bytes,
    sort_error,
    unique_by_key_bytes,
)

from .support import context


def test_one_block_sorts_what_fits_a_tile():
    # 256 threads of 19 x 4 / 8 = 9 pairs of 8 bytes; of 19 pairs of 4 bytes
    assert sort_bytes(2304, 8, 8, context()) == 1
    assert sort_bytes(2305, 8, 8, context()) > 1
    assert sort_bytes(4864, 4, 4, context()) == 1
    assert sort_bytes(0, 8, 8, context()) == 0


def test_recorded_sorts_of_512_to_2048_positions():
    # index_put_ in the recordings of 128 to 512 tokens, batch 4, asked for one byte each time.
    assert [sort_bytes(count, 8, 8, context("H100 SXM")) for count in (512, 1024, 2048)] == [1, 1, 1]


def test_one_sweep_keeps_a_second_set_of_keys_and_values():
    # 100,000 int64 pairs on capability 8.0: tiles of 384 x 21 x 4 / 8 = 3840, so 27 of them; 8 passes of 256
    # digits, counted in 64-bit offsets; 100,000 x 8 is 3125 x 256 as it is.
    histograms, earlier_tiles, again = 8 * 256 * 8, 27 * 256 * 4, 800_000
    assert sort_bytes(100_000, 8, 8, context()) == histograms + earlier_tiles + 2 * again + 256 + 255


@pytest.mark.parametrize(
    ("card", "key", "value", "tile"),
    [
        ("T4", 8, 8, 256 * 11),  # Policy700: 23 x 4 / 8
        ("T4", 4, 4, 256 * 46),
        ("A100 80GB", 4, 8, 384 * 8),  # Policy800: 17 x 4 / 8 with 64-bit offsets
        ("A100 80GB", 8, 0, 384 * 10),
        ("H100 SXM", 8, 8, 384 * 12),  # OnesweepPolicyKey64: 24 x 4 / 8
        ("H100 SXM", 4, 8, 384 * 14),  # OnesweepPolicyKey32: 29 x 4 / 8
        ("H100 SXM", 2, 8, 512 * 11),  # sm90_small_key_tuning<2, 8, 8>: 23 x 4 / 8
    ],
)
def test_tiles_differ_between_cards_and_types(card, key, value, tile):
    count = 1_000_000
    passes = key
    parts = [passes * 256 * 8, -(-count // tile) * 256 * 4, count * key, count * value, passes * 4]
    assert sort_bytes(count, key, value, context(card)) == sum(-(-p // 256) * 256 for p in parts) + 255


def test_fewer_bits_need_fewer_passes():
    # 10 bits: two passes; 8 bits: one, which needs no second set
    assert sort_bytes(100_000, 8, 8, context(), bits=10) == 2 * 2048 + 27 * 1024 + 1_600_000 + 256 + 255
    assert sort_bytes(100_000, 8, 8, context(), bits=8) == 2048 + 27 * 1024 + 256 + 255


def test_halves_before_hopper_are_sorted_with_counts_for_every_block():
    # 108 SMs, four blocks of 512 threads each, five times over, 128 digits; a scan's tile of 512 x 11 on top
    spine = (108 * 4 * 5 * 128 + 5632) * 8
    expected = -(-spine // 256) * 256 + 200_192 + 800_000 + 255  # 100,000 halves: 781.25 x 256, rounded up
    assert sort_bytes(100_000, 2, 8, context()) == expected
    assert sort_error(100_000, 2, 8, context()) == (spine, spine // 2)


def test_error_bars_span_other_tiles():
    assert sort_error(100_000, 8, 8, context()) == (27 * 1024, 27 * 1024 // 2)
    assert sort_error(1000, 8, 8, context()) == (0, 0)


def test_segmented_sorts_keep_a_second_set():
    assert segmented_sort_bytes(1_000_000, 4, 8) == 4_000_000 + 8_000_000 + 255


def test_scans_keep_a_descriptor_a_tile():
    # 1,000,000 floats: tiles of 128 x 15 = 1920, 521 of them and 32 more, 8 bytes each: 4424, rounded to 4608,
    # plus 255 for alignment; that again rounded up to 4864, plus 255.
    assert scan_bytes(1_000_000, 4) == 4864 + 255
    # 8-byte numbers: 15 x 4 / 8 = 7 a thread; (1117 + 32) x 16 = 18,384, rounded to 18,432; 18,687 to 18,688
    assert scan_bytes(1_000_000, 8) == 18_688 + 255
    # bytes: at most 30 a thread, two bytes each: (261 + 32) x 2 = 586, rounded to 768; 1023 to 1024
    assert scan_bytes(1_000_000, 1) == 1024 + 255


def test_selections_keep_32_bit_counts():
    # int64 items: 40 / 8 = 5 a thread; (1563 + 32) x 8 = 12,760, rounded to 12,800; 13,055 to 13,056
    assert select_bytes(1_000_000, 8) == 13_056 + 255


def test_reductions_keep_a_result_of_every_block():
    # 108 SMs of 2048 / 256 = 8 blocks, five times over: 4320 x 4 = 17,280, rounded to 17,408
    assert reduce_bytes(1_000_000, 4, context()) == 17_408 + 255
    assert reduce_bytes(4096, 4, context()) == 1


@pytest.mark.parametrize(("count", "size"), [(4096, 1279), (8192, 1279), (65_536, 1279), (262_144, 2047)])
def test_recorded_selections_of_unique_tokens(count, size):
    # Gradients of embeddings in the recordings bert-base-fp16, gpt2-small-efficient and t5-base-bf16 of an H100.
    assert unique_by_key_bytes(count, 8, context("H100 SXM")) == size


def test_tiles_of_unique_keys_differ_between_cards():
    # 16 bytes a tile and 32 more, rounded up to 256 twice; tiles of 448 x 11, 192 x 7 and 64 x 5 keys
    for card, tile in (("H100 SXM", 4928), ("B200", 4928), ("A100 80GB", 1344), ("RTX 4090", 320)):
        tiles = -(-1_000_000 // tile) + 32
        assert unique_by_key_bytes(1_000_000, 8, context(card)) == -(-tiles * 16 // 256) * 256 + 256 + 255
    assert unique_by_key_bytes(0, 8, context()) == 0
