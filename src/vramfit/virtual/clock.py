"""Simulated time: streams that run beside each other, engines that do one thing at a time, and a host that waits.

A card computes on one stream while its copy engines carry bytes of others to the host and from it (CUDA C++
Programming Guide, "Overlap of Data Transfer and Kernel Execution"; asyncEngineCount is 2 or more on every card of the
catalogue). Work begins when its stream is done with what it was given before, when the host has got that far, and when
its engine is free. Kernels of several streams and cards follow one another: how far they share a card, or whether one
reads what another writes, is not known. The host itself takes no time; it only waits.
"""

from __future__ import annotations

import threading
from enum import Enum


class Engine(Enum):
    """What does the work: the cards' processors, one of a card's copy engines, or nothing (an event is recorded)."""

    COMPUTE = "compute"
    UPWARDS = "host to card"
    DOWNWARDS = "card to host"
    NONE = "none"


class Clock:
    """Until when streams, engines and the host are busy, in microseconds since the start.

    Attributes:
        now_us: when all work so far is done.
    """

    def __init__(self) -> None:
        self.now_us = 0.0
        self._host = 0.0
        self._streams: dict[tuple[int, int], float] = {}
        self._processors = 0.0  # of all cards
        self._engines: dict[tuple[Engine, int], float] = {}
        self._lock = threading.Lock()

    def work(self, microseconds: float, device: int, stream: int, engine: Engine = Engine.COMPUTE) -> None:
        """Give a stream something to do."""
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
            if end > self.now_us:
                self.now_us = end

    def reached(self, device: int, stream: int) -> float:
        """When a stream is done with all that it was given."""
        return max(self._host, self._streams.get((device, stream), 0.0))

    def hold(self, device: int, stream: int, until: float) -> None:
        """Let what a stream is given from now on begin no earlier."""
        key = (device, stream)
        with self._lock:
            self._streams[key] = max(self._streams.get(key, 0.0), until)

    def work_host(self, microseconds: float) -> None:
        """Let the host itself work, while streams go on with what they were given."""
        self.hold_host(self._host + microseconds)

    def hold_host(self, until: float) -> None:
        """Let the host, and all that it asks for from now on, go on no earlier."""
        with self._lock:
            self._host = max(self._host, until)
            self.now_us = max(self.now_us, until)
