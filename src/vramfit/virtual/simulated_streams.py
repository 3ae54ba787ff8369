"""Streams without a card: ids and handles, numbered as torch numbers them, and the time at which each is done.

NOTE [Simulated time]
A card computes on one stream while its copy engines carry bytes of others to the host and from it (CUDA C++
Programming Guide, "Overlap of Data Transfer and Kernel Execution"; asyncEngineCount is 2 or more on every card of the
catalogue). Work begins when its stream is done with what it was given before, when the host has got that far, and when
its engine is free. Kernels of several streams and cards follow one another: how far they share a card, or whether one
reads what another writes, is not known. The host itself takes no time; it only waits: for a value, for a stream, and
where _QUEUED launches are under way, for the oldest of them.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from enum import Enum

# c10/cuda/CUDAStream.cpp: a pool of 2^5 streams per priority and device, handed out in turn. A stream's id is
# (number in the pool << 5) | (type << 1) | 1, where the type is 1 + |priority|; 0 is the default stream, and
# an id whose lowest bit is clear is the address of a stream made outside torch.
STREAMS_PER_POOL = 32
LOWEST_PRIORITY = 0
HIGHEST_PRIORITY = -3  # c10/cuda/CUDAStream.h: max_compile_time_stream_priorities is 4
_TYPE_BITS = 4
_QUEUED = 1024
"""Launches that a card accepts ahead of their execution; the next one waits in the driver."""

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


# -- Time --------------------------------------------------------------------------------------------------------


class Engine(Enum):
    """What does the work: processors, a card's copy engines or links to others, or nothing (an event is recorded)."""

    COMPUTE = "compute"
    UPWARDS = "host to card"
    DOWNWARDS = "card to host"
    LINK = "card to card"
    NONE = "none"


class Clock:
    """Until when streams, engines and the host are busy, in microseconds since the start. See NOTE [Simulated time].

    Attributes:
        now_us: when all work so far is done.
    """

    def __init__(self) -> None:
        self.now_us = 0.0
        self._host = 0.0
        self._streams: dict[tuple[int, int], float] = {}
        self._processors = 0.0  # of all cards
        self._engines: dict[tuple[Engine, int], float] = {}
        self._queue: deque[float] = deque(maxlen=_QUEUED)
        self._lock = threading.Lock()

    def work(self, microseconds: float, device: int, stream: int, engine: Engine = Engine.COMPUTE) -> None:
        """Give a stream work."""
        key = device, stream
        with self._lock:
            begin = self._streams.get(key, 0.0)
            if begin < self._host:
                begin = self._host
            if engine is Engine.COMPUTE:
                if begin < self._processors:
                    begin = self._processors
                self._processors = end = begin + microseconds
            elif engine is Engine.NONE:
                end = begin + microseconds
            else:
                by = engine, device
                begin = max(begin, self._engines.get(by, 0.0))
                self._engines[by] = end = begin + microseconds
            self._streams[key] = end
            if engine is not Engine.NONE:
                queue = self._queue
                if len(queue) == _QUEUED and queue[0] > self._host:
                    self._host = queue[0]  # the oldest launch has to be done before one more is accepted
                queue.append(end)
            if end > self.now_us:
                self.now_us = end

    def reached(self, device: int, stream: int) -> float:
        """When a stream is done with all its work."""
        return max(self._host, self._streams.get((device, stream), 0.0))

    def hold(self, device: int, stream: int, until: float) -> None:
        """Let work given to a stream from now on begin no earlier."""
        key = (device, stream)
        with self._lock:
            self._streams[key] = max(self._streams.get(key, 0.0), until)

    @property
    def host_us(self) -> float:
        """How far the host has come, in microseconds."""
        return self._host

    def work_host(self, microseconds: float) -> None:
        """Let the host itself work, while streams go on with the work that they have."""
        self.hold_host(self._host + microseconds)

    def hold_host(self, until: float) -> None:
        """Let the host, and all work that it gives from now on, go on no earlier."""
        with self._lock:
            self._host = max(self._host, until)
            self.now_us = max(self.now_us, until)


class BlockEvents:
    """The events for which the allocator lets freed blocks wait: one on each other stream that used a block.

    Args:
        clock: of the machine.
        device: whose allocator asks.
    """

    def __init__(self, clock: Clock, device: int) -> None:
        self._clock, self._device = clock, device
        self._times: dict[tuple[int, int], float] = {}

    def record(self, stream: int, address: int) -> None:
        """Note how far a stream has to come before it is done with a block."""
        self._times[stream, address] = self._clock.reached(self._device, stream)

    def passed(self, stream: int, address: int) -> bool:
        """Whether the stream is that far, as the host sees it now."""
        if self._times[stream, address] > self._clock.host_us:
            return False
        del self._times[stream, address]
        return True
