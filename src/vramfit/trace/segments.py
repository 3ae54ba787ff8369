"""Segments as torch's snapshots hold them: checked, with the keys that older versions left out."""

from __future__ import annotations

from typing import Any, NoReturn

from vramfit.errors import TraceFormatError
from vramfit.units import MIB

SMALL_SEGMENT = 2 * MIB
"""Bytes of a segment for small blocks (c10/cuda/CUDACachingAllocator.cpp, kSmallBuffer)."""

ALLOCATED = "active_allocated"
PENDING = "active_pending_free"
INACTIVE = "inactive"

_STATES = {
    ALLOCATED: ALLOCATED,
    PENDING: PENDING,
    "active_awaiting_free": PENDING,  # the name in torch's documentation of the snapshot
    INACTIVE: INACTIVE,
}
_MAX_SIZE = 1 << 62


def check_segment(raw: object, where: str, seen: set[int] | None = None) -> dict[str, Any]:
    """A segment with all keys of today's snapshots, from one of any version of torch.

    Frames are kept as they are. What older versions left out is filled in: the addresses of blocks (they lie
    one after the other), requested sizes (from ``history``, or the block's size), the kind of segment (by its
    size).

    Args:
        seen: identities of the lists of frames that were checked before; pickles share them among blocks.

    Raises:
        TraceFormatError: a key is missing that cannot be filled in, a value has the wrong type or range, or
            the blocks do not fill the segment.
    """
    segment = _dictionary(raw, where)
    seen = set() if seen is None else seen
    address = _natural(segment, "address", where)
    total = _natural(segment, "total_size", where)
    blocks: list[dict[str, Any]] = []
    cursor = address
    for number, entry in enumerate(_list(segment.get("blocks", []), f"{where}.blocks")):
        block = _block(entry, cursor, f"{where}.blocks[{number}]", seen)
        cursor += block["size"]
        blocks.append(block)
    if cursor != address + total:
        _fail(where, f"has blocks of {cursor - address} bytes in {total}")
    allocated = sum(block["size"] for block in blocks if block["state"] == ALLOCATED)
    active = sum(block["size"] for block in blocks if block["state"] != INACTIVE)
    requested = sum(block["requested_size"] for block in blocks if block["state"] != INACTIVE)
    kind = segment.get("segment_type", "small" if total == SMALL_SEGMENT else "large")
    if kind not in ("small", "large"):
        _fail(where, f"has segment_type {kind!r}")
    checked: dict[str, Any] = {
        "device": _natural(segment, "device", where, 0),
        "address": address,
        "total_size": total,
        "allocated_size": _natural(segment, "allocated_size", where, allocated),
        "active_size": _natural(segment, "active_size", where, active),
        "requested_size": _natural(segment, "requested_size", where, requested),
        "stream": _natural(segment, "stream", where, 0),
        "segment_type": kind,
        "segment_pool_id": _pool(segment.get("segment_pool_id", (0, 0)), where),
        "is_expandable": bool(segment.get("is_expandable", False)),
        "blocks": blocks,
    }
    if "frames" in segment:
        checked["frames"] = check_frames(segment["frames"], where, seen)
    return checked


def check_frames(raw: object, where: str, seen: set[int]) -> list[dict[str, Any]]:
    """A list of frames; each is a dictionary with ``filename``, ``line`` and ``name``.

    Raises:
        TraceFormatError: it is something else.
    """
    frames = _list(raw, f"{where}.frames")
    if id(frames) in seen:
        return frames
    seen.add(id(frames))
    for frame in frames:
        if (
            not isinstance(frame, dict)
            or type(frame.get("filename")) is not str
            or type(frame.get("line")) is not int
            or type(frame.get("name")) is not str
        ):
            _fail(where, "has a frame without filename, line and name")
    return frames


def _block(raw: object, address: int, where: str, seen: set[int]) -> dict[str, Any]:
    block = _dictionary(raw, where)
    size = _natural(block, "size", where)
    state = _STATES.get(str(block.get("state")))
    if state is None:
        _fail(where, f"has state {block.get('state')!r}")
    if _natural(block, "address", where, address) != address:
        _fail(where, f"is not where the block before it ends, at {address}")
    frames = block.get("frames")
    requested = size if state != INACTIVE else 0
    history = block.get("history")
    if isinstance(history, list) and history:  # torch before 2.1
        newest = _dictionary(history[0], f"{where}.history[0]")
        requested = _natural(newest, "real_size", where, requested)
        frames = newest.get("frames", frames)
    checked: dict[str, Any] = {
        "address": address,
        "size": size,
        "requested_size": _natural(block, "requested_size", where, requested),
        "state": state,
    }
    if frames is not None:
        checked["frames"] = check_frames(frames, where, seen)
    return checked


def _pool(raw: object, where: str) -> tuple[int, int]:
    if isinstance(raw, tuple | list) and len(raw) == 2 and all(type(part) is int for part in raw):
        return (raw[0], raw[1])
    return _fail(where, f"has segment_pool_id {raw!r:.40}")


def _natural(entry: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if value is None:
        _fail(where, f"has no {key}")
    if type(value) is not int or not 0 <= value < _MAX_SIZE:
        _fail(where, f"has {key} {value!r:.40}, not a natural number")
    return value


def _dictionary(raw: object, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        _fail(where, f"is a {type(raw).__name__}, not a dictionary")
    return raw


def _list(raw: object, where: str) -> list[Any]:
    if not isinstance(raw, list):
        _fail(where, f"is a {type(raw).__name__}, not a list")
    return raw


def _fail(where: str, what: str) -> NoReturn:
    raise TraceFormatError(f"{where} {what}", "Give a file that torch.cuda.memory._dump_snapshot wrote")
