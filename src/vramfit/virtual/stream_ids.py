"""Ids and handles of CUDA streams, numbered as torch numbers them."""

from __future__ import annotations

import threading
from collections import Counter

# c10/cuda/CUDAStream.cpp: a pool of 2^5 streams per priority and device, handed out in turn. A stream's id is
# (number in the pool << 5) | (type << 1) | 1, where the type is 1 + |priority|; 0 is the default stream, and
# an id whose lowest bit is clear is the address of a stream made outside torch.
STREAMS_PER_POOL = 32
LOWEST_PRIORITY = 0
HIGHEST_PRIORITY = -3  # c10/cuda/CUDAStream.h: max_compile_time_stream_priorities is 4
_TYPE_BITS = 4
_HANDLE_BASE = 0x5581_0000_0000
_HANDLE_STRIDE = 0x2A0


class StreamTable:
    """The streams of a machine, by device."""

    def __init__(self) -> None:
        self._next: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def new(self, device: int, priority: int = 0) -> int:
        """Id of the next stream of the pool; priorities outside the range are moved into it."""
        level = min(max(-priority, -LOWEST_PRIORITY), -HIGHEST_PRIORITY)
        with self._lock:
            number = self._next[device, level] % STREAMS_PER_POOL
            self._next[device, level] += 1
        return number << (_TYPE_BITS + 1) | (level + 1) << 1 | 1


def is_external(stream: int) -> bool:
    """Whether the id is the address of a stream that was made outside torch."""
    return stream != 0 and stream & 1 == 0


def priority_of(stream: int) -> int:
    """Priority of a stream; the default stream and external ones have 0."""
    if stream == 0 or is_external(stream):
        return 0
    return -((stream >> 1 & (1 << _TYPE_BITS) - 1) - 1)


def handle_of(stream: int, device: int) -> int:
    """The ``cudaStream_t`` of a stream, a made-up address; 0 for the default stream."""
    if stream == 0 or is_external(stream):
        return stream
    return _HANDLE_BASE + (device << 24) + (stream >> 1) * _HANDLE_STRIDE


def stream_of(handle: int, device: int) -> int:
    """The id of the stream with this ``cudaStream_t``: the inverse of `handle_of`."""
    relative = handle - _HANDLE_BASE - (device << 24)
    if 0 < relative < STREAMS_PER_POOL << (_TYPE_BITS + 1) << 10 and relative % _HANDLE_STRIDE == 0:
        return relative // _HANDLE_STRIDE << 1 | 1
    return handle
