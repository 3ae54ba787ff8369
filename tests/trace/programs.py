"""Random programs on our own allocator, recorded as torch records them: what a replay has to find again."""

from __future__ import annotations

import random
from collections.abc import Sequence

from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.trace import EventKind, MemoryTrace, TraceBuilder, TraceDevice
from vramfit.units import GIB, KIB, MIB

SIZES = (4, 512, 1000, 20 * KIB, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB + 5, 11 * MIB, 25 * MIB, 70 * MIB)


class Recorder:
    """An allocator whose events go to a trace, and a program that uses it."""

    def __init__(
        self,
        *,
        conf: str = "",
        total_bytes: int = 64 * GIB,
        device: int = 0,
        builder: TraceBuilder | None = None,
    ) -> None:
        meta = {"source": "virtual", "alloc_conf": conf}
        self.builder = TraceBuilder(meta=meta) if builder is None else builder
        self.device = device
        self.total_bytes = total_bytes
        self.recording = True
        self.allocator = CachingAllocator(
            Driver(total_bytes), config=AllocatorConfig.parse(conf), device=device, on_event=self._record
        )
        self.live: list[int] = []
        self.waiting: list[int] = []
        self.clock = 0

    def _record(self, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        if not self.recording or kind == AllocatorEventKind.SNAPSHOT:
            return
        self.clock += 1
        block = self.allocator.block_size(address) if kind == AllocatorEventKind.ALLOC else 0
        self.builder.append(
            EventKind(int(kind)),
            device=self.device,
            address=address,
            size=size,
            block=block,
            stream=stream,
            time_us=self.clock,
        )

    def run(
        self,
        steps: int,
        seed: int,
        *,
        sizes: Sequence[int] = SIZES,
        streams: Sequence[int] = (0,),
        crossing: bool = False,
        empties: bool = False,
    ) -> None:
        """Take and give back blocks at random; ``crossing``: some are used by another stream too."""
        chance = random.Random(seed)
        for _ in range(steps):
            draw = chance.random()
            if draw < 0.55 or not self.live:
                try:
                    self.live.append(self.allocator.malloc(chance.choice(sizes), chance.choice(streams)))
                except OutOfMemory:
                    self.live_out_of_memory()
            elif empties and draw > 0.995:
                self.allocator.empty_cache()
            elif crossing and draw > 0.97:
                self.allocator.process_events()
            else:
                address = self.live.pop(chance.randrange(len(self.live)))
                if crossing and chance.random() < 0.2:
                    self.allocator.record_stream(address, 99)
                self.allocator.free(address)

    def live_out_of_memory(self) -> None:
        """What a program does that catches the error: it lets go of half of what it holds."""
        for address in self.live[::2]:
            self.allocator.free(address)
        del self.live[::2]

    def described(self) -> TraceDevice:
        self.recording = False
        return TraceDevice(
            index=self.device, total_bytes=self.total_bytes, segments=tuple(self.allocator.segments())
        )

    def finish(self) -> MemoryTrace:
        return self.builder.finish(devices=(self.described(),))
