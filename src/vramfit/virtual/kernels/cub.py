"""Temporary storage of CUB's device-wide algorithms, which torch takes from the caching allocator.

``CUB_WRAPPER`` in ATen/cuda/cub.cuh asks CUB for a size, allocates it and runs. CUB is open source, its tile
sizes depend on architecture and element size: cub/device/dispatch/dispatch_radix_sort.cuh
(``InvokeOnesweep``, ``InvokeSingleTile``) and tuning/tuning_radix_sort.cuh, dispatch_scan.cuh. Sizes here
follow them; what may differ between CUB releases (a tile's worth of bookkeeping) is covered by the error
bars of the rules.
"""

from __future__ import annotations

from vramfit.virtual.kernels.context import KernelContext, ceil_div, round_up

_DIGITS = 256  # 8 bits a pass


def sort_bytes(count: int, key: int, value: int, ctx: KernelContext, *, bits: int = 0) -> int:
    """Bytes that ``DeviceRadixSort::SortPairs`` (or ``SortKeys``, value 0) takes without double buffers.

    Args:
        count: elements.
        key: bytes of a key.
        value: bytes of a value, 0 to sort keys alone.
        ctx: the card.
        bits: how many bits of the key decide, 0 for all.
    """
    if not count:
        return 0
    widest = max(key, value, 4)
    if count <= 256 * max(1, 19 * 4 // widest):  # one block sorts it in shared memory
        return 1
    threads, nominal = (384, 21) if ctx.sm >= 80 else (256, 23)
    tile = threads * max(1, nominal * 4 // widest)
    passes = ceil_div(bits or 8 * key, 8)
    parts = [
        passes * _DIGITS * 4,  # histograms
        ceil_div(count, tile) * _DIGITS * 4,  # what earlier tiles counted
        count * key if passes > 1 else 0,
        count * value if passes > 1 else 0,
        passes * 4,
    ]
    return sum(round_up(part, 256) for part in parts) + 255


def scan_bytes(count: int, element: int) -> int:
    """Bytes that ``DeviceScan`` takes: a descriptor for each tile and for one warp of padding."""
    if not count:
        return 0
    tile = 128 * max(1, 15 * 4 // max(element, 4))
    descriptor = 8 if element <= 4 else 16
    return round_up((ceil_div(count, tile) + 32) * descriptor, 256) + 255


def sort_error(count: int, ctx: KernelContext) -> int:
    """How far :func:`sort_bytes` may be off: tiles half as large, and a page."""
    tile = 384 * 10 if ctx.sm >= 80 else 256 * 11
    return ceil_div(count, tile) * _DIGITS * 4 + 4096
