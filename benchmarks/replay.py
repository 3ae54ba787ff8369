"""How fast replay is: events per second, on recordings and on a long synthetic trace.

    python benchmarks/replay.py [--events 1000000] [--recordings tests/data/traces]

One event is one row of a trace: an allocation, a free that is asked for, a free that completes, a segment. The
time is that of `vramfit.trace.replay` alone, rewinding and comparing included; reading the file has a column of
its own. The synthetic trace is a training loop of a transformer: activations taken in the forward pass and given
back in the backward pass, temporaries in between, gradients and optimizer state that stay.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from vramfit.allocator import AllocatorEventKind, CachingAllocator, Driver
from vramfit.trace import EventKind, MemoryTrace, TraceBuilder, TraceDevice, read_any, replay
from vramfit.units import GIB, KIB, MIB

GOAL = 500_000
"""Events per second that replay is meant to reach."""


class Program:
    """Asks a virtual card for memory as a training loop does, and records what happens."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.builder = TraceBuilder(meta={"source": "virtual", "alloc_conf": "", "torch_version": "2.13"})
        self.allocator = CachingAllocator(Driver(400 * GIB), on_event=self.record)
        self.clock = 0

    def record(self, kind: AllocatorEventKind, address: int, size: int, _stream: int) -> None:
        if kind != AllocatorEventKind.SNAPSHOT:
            self.clock += 7
            block = self.allocator.block_size(address) if kind == AllocatorEventKind.ALLOC else 0
            self.builder.append(
                EventKind(int(kind)), device=0, address=address, size=size, block=block, time_us=self.clock
            )

    def size(self) -> int:
        """Bytes of a tensor: mostly activations of some megabytes, many small statistics, few large ones."""
        draw = self.random.random()
        if draw < 0.35:
            return self.random.choice((4, 8, 512, 3072, 16 * KIB, 64 * KIB, 256 * KIB))
        if draw < 0.9:
            return self.random.choice((1, 2, 3, 4, 6, 8, 12, 16, 24)) * MIB + self.random.choice((0, 0, 768))
        return self.random.choice((32, 48, 100, 192)) * MIB

    def step(self, layers: int) -> None:
        allocator = self.allocator
        saved: list[list[int]] = []
        for _ in range(layers):
            sizes = [self.size() for _ in range(9)]
            kept = []
            for size in sizes:
                kept.append(allocator.malloc(size))
                temporary = allocator.malloc(self.size())
                allocator.free(temporary)
            saved.append(kept)
        gradients = []
        for kept in reversed(saved):
            for address in reversed(kept):
                temporary = allocator.malloc(self.size())
                allocator.free(address)
                allocator.free(temporary)
            gradients.append(allocator.malloc(12 * MIB))
        for address in gradients:
            allocator.free(address)

    def run(self, events: int) -> MemoryTrace:
        for _ in range(200):
            self.allocator.malloc(self.size())
        while len(self.builder) < events:
            self.step(layers=48)
        device = TraceDevice(
            index=0, name="synthetic", total_bytes=400 * GIB, segments=tuple(self.allocator.segments())
        )
        return self.builder.finish(devices=(device,))


def measure(name: str, trace: MemoryTrace, read_seconds: float | None, repeats: int) -> tuple[str, ...]:
    """The best of some replays, since other work on the machine only ever slows one down.

    Seconds are of processor time: on a shared machine the clock on the wall measures the neighbours too.
    """
    reports, seconds = [], []
    for _ in range(repeats):
        began = time.process_time()
        reports.append(replay(trace))
        seconds.append(time.process_time() - began)
    best = min(seconds)
    wall = min(report.seconds for report in reports)
    exact = "exact" if all(report.exact for report in reports) else "DIFFERS"
    read = "" if read_seconds is None else f"{read_seconds:.3f}"
    return (name, f"{len(trace):,}", exact, read, f"{wall:.3f}", f"{best:.3f}", f"{len(trace) / best:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=1_000_000, help="length of the synthetic trace")
    parser.add_argument("--recordings", type=Path, default=Path(__file__).parents[1] / "tests/data/traces")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    rows = []
    for path in sorted(arguments.recordings.glob("*.json.gz")):
        began = time.perf_counter()
        trace = read_any(path)
        read_seconds = time.perf_counter() - began
        rows.append(measure(path.name.removesuffix(".json.gz"), trace, read_seconds, arguments.repeats))
    trace = Program().run(arguments.events)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "synthetic.vft"
        began = time.perf_counter()
        trace.save(path)
        saved = time.perf_counter() - began
        file_bytes = path.stat().st_size
        began = time.perf_counter()
        trace = MemoryTrace.load(path)
        loaded = time.perf_counter() - began
    row = measure("synthetic training loop", trace, loaded, arguments.repeats)
    rows.append(row)

    head = ("trace", "events", "result", "read s", "replay s", "CPU s", "events/CPU s")
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    for line in (head, *rows):
        cells = [f"{line[0]:<{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(line[1:], widths[1:], strict=True))]
        print("  ".join(cells))
    size = f"{file_bytes / MIB:.1f} MiB"
    print(f"\n{len(trace):,} events: saved in {saved:.2f} s ({size}), loaded in {loaded:.2f} s")
    rate = float(row[-1].replace(",", ""))
    print(
        f"synthetic: {rate:,.0f} events per second, {'at least' if rate >= GOAL else 'below'} the goal of {GOAL:,}"
    )


if __name__ == "__main__":
    main()
