"""Temporary storage of CUB's device-wide algorithms, which torch takes from the caching allocator.

``CUB_WRAPPER`` in ATen/cuda/cub.cuh asks CUB for a size, allocates it and runs. CUB is open source: sizes follow
CCCL 3.0, which CUDA 13.0 brings. Its tiles depend on architecture and element size, hardly on the release; what
differs between releases is covered by the error bars.

Radix sort: cub/device/dispatch/dispatch_radix_sort.cuh (``InvokeOnesweep``, ``InvokeSingleTile``, ``InvokePasses``)
and tuning/tuning_radix_sort.cuh. torch passes the number of items as int64, which CUB takes as 64-bit offsets
(``choose_offset_t``). Scans and selections: one descriptor for each tile and for a warp of padding
(agent/single_pass_scan_operators.cuh, ``tile_state_allocation_size``). Every array starts at a multiple of 256 bytes
(util_temporary_storage.cuh, ``AliasTemporaries``).
"""

from __future__ import annotations

from vramfit.virtual.kernels.rules import ceil_div, round_up
from vramfit.virtual.op_call import KernelContext

_DIGITS = 256  # ONESWEEP_RADIX_BITS is 8 everywhere
_OFFSET = 8  # bytes of a 64-bit offset
_PORTION = (1 << 28) - 1  # keys that one launch of a pass handles, less what does not fill a tile
_SHARED = 48 * 1024  # max_smem_per_block
_PADDING = 32  # tile descriptors before the first: a warp
_OVERSUBSCRIPTION = 5  # subscription_factor

# Tiles of keys narrower than 4 bytes, as (key, value): (threads, items) with 64-bit offsets (sm90_small_key_tuning).
_SMALL_KEYS_90 = {
    (1, 0): (512, 19),
    (2, 0): (512, 19),
    (1, 1): (448, 16),
    (1, 2): (512, 14),
    (1, 4): (512, 14),
    (1, 8): (384, 18),
    (2, 1): (384, 16),
    (2, 2): (448, 16),
    (2, 4): (512, 12),
    (2, 8): (512, 23),
}
# Blackwell's own, for all keys (sm100_small_key_tuning replaces only keys narrower than 4 bytes).
_SMALL_KEYS_100 = {
    (2, 0): (384, 20),
    (1, 1): (384, 20),
    (1, 2): (256, 22),
    (1, 4): (384, 15),
    (1, 8): (384, 18),
    (2, 1): (384, 15),
    (2, 2): (576, 15),
    (2, 4): (512, 18),
    (2, 8): (512, 23),
}
# Elements of a tile of DeviceSelect::UniqueByKey by the size of keys and values (sm80_tuning, sm90_tuning).
_UNIQUE_80 = {4: 256 * 11, 8: 192 * 7}
_UNIQUE_90 = {4: 512 * 14, 8: 448 * 11}


def _storage(*parts: int) -> int:
    """One block for several arrays (``AliasTemporaries``)."""
    return sum(round_up(part, 256) for part in parts) + 255


def _tile(threads: int, nominal: int, widest: int) -> int:
    """Elements of a tile whose items are scaled to the widest of key and value (``RegBoundScaling``)."""
    items = max(1, nominal * 4 // max(4, widest))
    return items * min(threads, round_up(ceil_div(_SHARED, widest * items), 32))


def _onesweep_tile(key: int, value: int, ctx: KernelContext, floating: bool) -> int:
    """Elements of a tile of the one-sweep passes; 0 where an older algorithm sorts such keys."""
    widest = max(key, value)
    if ctx.sm >= 90:
        if key < 4:
            table = _SMALL_KEYS_100 if ctx.sm >= 100 else _SMALL_KEYS_90
            threads, nominal = table.get((key, value)) or _SMALL_KEYS_90.get((key, value), (384, 23))
        elif key == 4:
            threads, nominal = 384, (19 - floating) if not value else (17 if value < 8 else 29)
        else:
            threads, nominal = 384, 30 if value < 8 else 24
        return _tile(threads, nominal, widest)
    if key < 4:
        return 0
    if ctx.sm >= 80:
        return _tile(384, 17 if key == 4 and value else 21, widest)
    return _tile(256, 46 if key == value == 4 else 23, widest)


def sort_bytes(
    count: int, key: int, value: int, ctx: KernelContext, *, bits: int = 0, floating: bool = False
) -> int:
    """Bytes that ``DeviceRadixSort::SortPairs`` (or ``SortKeys``, value 0) takes without double buffers.

    Args:
        key: bytes of a key.
        value: bytes of a value, 0 to sort keys alone.
        bits: how many bits of the key decide, 0 for all.
        floating: the keys are floating-point numbers.
    """
    if not count:
        return 0
    if count <= _tile(256, 19, max(key, value)):  # one block sorts it in shared memory
        return 1
    tile = _onesweep_tile(key, value, ctx, floating)
    if not tile:
        return _storage(_spine(key, ctx), count * key, count * value)
    passes = ceil_div(bits or 8 * key, 8)
    portion = _PORTION // tile * tile
    portions = ceil_div(count, portion)
    again = passes > 1  # a second set of keys and values, to go back and forth between
    return _storage(
        portions * passes * _DIGITS * _OFFSET,  # histograms
        ceil_div(min(count, portion), tile) * _DIGITS * 4,  # what earlier tiles counted
        count * key if again else 0,
        count * value if again else 0,
        portions * passes * 4,
    )


def _spine(key: int, ctx: KernelContext) -> int:
    """Digit counts of every block, where keys narrower than 4 bytes are sorted in two kernels a pass.

    It grows with how many blocks of 512 threads fit a multiprocessor, which the compiler decides: four of them.
    """
    blocks = ctx.spec.sm_count * max(1, ctx.spec.max_threads_per_sm // 512) * _OVERSUBSCRIPTION
    return (blocks * (128 if key > 1 else 32) + 512 * 11) * _OFFSET


def segmented_sort_bytes(count: int, key: int, value: int) -> int:
    """Bytes that ``DeviceSegmentedRadixSort::SortPairs`` takes: a second set of keys and values."""
    return _storage(count * key, count * value) if count else 0


def sort_error(count: int, key: int, value: int, ctx: KernelContext) -> tuple[int, int]:
    """How far :func:`sort_bytes` may be off upwards and downwards, in bytes.

    Other CUB releases have other tiles: half as large to twice as large. 0 for what one block sorts.
    """
    if sort_bytes(count, key, value, ctx) <= 1:
        return 0, 0
    tile = _onesweep_tile(key, value, ctx, False)
    if not tile:
        spine = _spine(key, ctx)
        return spine, spine // 2
    counts = ceil_div(min(count, _PORTION), tile) * _DIGITS * 4
    return counts, counts // 2


def scan_bytes(count: int, element: int, *, threads: int = 128, items: int = 15) -> int:
    """Bytes that ``DeviceScan`` takes for an operator of torch's own (tuning_scan.cuh, ``DefaultPolicy``).

    Args:
        element: bytes of an accumulator; its tile descriptor holds it and a status of the same size.
        threads: of a block.
        items: 4-byte elements of a thread.
    """
    if not count:
        return 0
    tile = threads * max(1, min(items * 4 // element, items * 2))
    return _storage_of_scan(_storage((ceil_div(count, tile) + _PADDING) * 2 * element))


def _storage_of_scan(states: int) -> int:
    """Tile states come aligned themselves, inside a storage that is aligned again."""
    return round_up(states, 256) + 255


def select_bytes(count: int, element: int) -> int:
    """Bytes of ``DeviceSelect`` (flagged, unique, unique by key): 32-bit positions, tiles of 128 x 10 x 4 bytes.

    tuning_select_if.cuh, ``DefaultPolicy``; newer cards have tiles up to twice as large (see :func:`scan_error`).
    """
    if not count:
        return 0
    tile = 128 * max(1, min(40 // element, 10))
    return _storage_of_scan(_storage((ceil_div(count, tile) + _PADDING) * 8))


def unique_by_key_bytes(count: int, key: int, ctx: KernelContext) -> int:
    """Bytes of ``DeviceSelect::UniqueByKey`` with values as wide as the keys and int64 positions.

    tuning_unique_by_key.cuh: tiles of Ampere (8.0) and Hopper, ``DefaultPolicy`` elsewhere. A descriptor holds a
    position and a status of the same size. Recordings of an H100 have it for 4,096 to 262,144 keys of 8 bytes.
    """
    if not count:
        return 0
    if ctx.sm >= 90:
        tile = _UNIQUE_90.get(key, 0)
    else:
        tile = _UNIQUE_80.get(key, 0) if 80 <= ctx.sm < 86 else 0
    tile = tile or 64 * max(1, min(11 * 4 // key, 11))
    return _storage_of_scan(_storage((ceil_div(count, tile) + _PADDING) * 2 * _OFFSET))


def encode_bytes(count: int) -> int:
    """Bytes of ``DeviceRunLengthEncode::Encode`` with int64 lengths (tuning_run_length_encode.cuh, 128 x 6)."""
    if not count:
        return 0
    states = ceil_div(count, 128 * 6) + _PADDING
    return _storage_of_scan(_storage(states * 4, states * 16, states * 16))


def scan_error(size: int) -> tuple[int, int]:
    """How far sizes of tile descriptors may be off upwards and downwards: tiles differ between cards and releases."""
    return size, size // 2


def reduce_bytes(count: int, accumulator: int, ctx: KernelContext) -> int:
    """Bytes of ``DeviceReduce``: a partial result of every block that fits the card, five times over.

    dispatch_reduce.cuh ``InvokePasses``; blocks of 256 threads, 16 values of 4 bytes each.
    """
    if count <= 256 * max(1, min(16 * 4 // accumulator, 32)):
        return 1 if count else 0
    blocks = ctx.spec.sm_count * (ctx.spec.max_threads_per_sm // 256) * _OVERSUBSCRIPTION
    return _storage(blocks * accumulator)
