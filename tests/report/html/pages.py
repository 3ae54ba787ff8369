"""Runs and recordings whose pages the tests look at."""

from dataclasses import replace
from pathlib import Path

from analysis.synthetic import TRAIN, Recorder, gpt_training, outcome, virtual_run
from vramfit.trace import (
    Category,
    EventKind,
    Frame,
    MemoryTrace,
    Run,
    RunWarning,
    TraceBuilder,
    TraceDevice,
    read_any,
)
from vramfit.units import GIB, MIB

EVIL = "</script><img src=x onerror=alert(1)>"
"""A name that would be markup, were it not escaped."""
RECORDINGS = Path(__file__).parents[2] / "data/traces"


def recording(name: str) -> MemoryTrace:
    return read_any(RECORDINGS / f"{name}.json.gz")


def training() -> Run:
    recorder = Recorder()
    gpt_training(recorder, layers=4, iterations=3)
    return virtual_run(recorder.finish())


def two_cards() -> Run:
    recorder = Recorder(devices=2)
    recorder.phase("inference")
    recorder.alloc("float32[1024, 1024, 64]", 256 * MIB, Category.PARAMETERS, module="Net.a", device=0)
    for layer in range(6):
        recorder.alloc(
            "float32[1024, 1024, 128]", 512 * MIB, Category.ACTIVATIONS, module=f"Net.b.{layer}", device=1
        )
    trace = recorder.finish()
    return virtual_run(trace, devices=(outcome(trace, device=0), outcome(trace, device=1)))


def evil() -> Run:
    """Every name is an attempt to leave the page."""
    recorder = Recorder()
    recorder.phase(EVIL)
    stack = (Frame(f"/home/ada/{EVIL}.py", 7, EVIL),)
    for category in Category:
        recorder.alloc(EVIL, 2 * GIB + int(category), category, op=EVIL, module=EVIL, stack=stack)
    warning = RunWarning(code=EVIL, message=EVIL, location=f"{EVIL}:1", count=1)
    return replace(virtual_run(recorder.finish(), warnings=(warning,)), program=(EVIL,))


def simple() -> MemoryTrace:
    """Three blocks with stacks of their own, the second given back."""
    recorder = Recorder()
    addresses = []
    for number, size in enumerate((8 * MIB, 6 * MIB, 4 * MIB)):
        recorder.phase(f"step {number}/forward")
        stack = (
            Frame("/venv/lib/python3.11/site-packages/torch/nn/functional.py", 1000 + number, "linear"),
            Frame(TRAIN, 10 + number, f"function_{number}"),
        )
        addresses.append(
            recorder.alloc(
                f"float32[{size // 4}]",
                size,
                Category.ACTIVATIONS,
                op="aten.mm.default",
                module=f"Net.layer{number}",
                stack=stack,
            )
        )
    recorder.free(addresses[1])
    return recorder.finish()


def waiting() -> MemoryTrace:
    """Two segments: one with a live block, a gap and a block that a stream still uses; one wholly free."""
    builder = TraceBuilder(devices=[TraceDevice(index=0)])
    base, block = 0x7F0000000000, 4 * MIB

    def event(kind: EventKind, address: int, size: int, stream: int = 0) -> None:
        wide = size if kind <= EventKind.FREE_COMPLETED else 0
        builder.append(kind, device=0, address=base + address, size=size, block=wide, stream=stream)

    event(EventKind.SEGMENT_ALLOC, 0, 20 * MIB)
    event(EventKind.ALLOC, 0, block)
    event(EventKind.ALLOC, 4 * MIB, block)
    event(EventKind.ALLOC, 8 * MIB, block, 7)
    event(EventKind.SEGMENT_ALLOC, 64 * MIB, 20 * MIB)
    event(EventKind.FREE_REQUESTED, 4 * MIB, block)
    event(EventKind.FREE_COMPLETED, 4 * MIB, block)
    event(EventKind.FREE_REQUESTED, 8 * MIB, block, 7)
    return builder.finish()


def leaking() -> MemoryTrace:
    """A program that keeps one activation of every step."""
    recorder = Recorder()
    for step in range(14):
        recorder.phase(f"step {step}/forward")
        recorder.alloc(
            "float32[262144]", MIB, Category.ACTIVATIONS, op="aten.cat.default", module="Net.memory"
        )
        recorder.free(recorder.alloc("float32[524288]", 2 * MIB, Category.TEMPORARIES))
    return recorder.finish()


def crowded() -> Run:
    """A card of 8 GiB filled to the last MiB, with a failed request and marks right at the peak."""
    recorder = Recorder(total_bytes=8 * GIB)
    recorder.phase("setup")
    for layer in range(31):
        recorder.alloc(
            "float32[8192, 8192]", 256 * MIB, Category.PARAMETERS, module=f"Net.{layer}", op="aten.mm.default"
        )
    for number in range(6):
        recorder.mark(f"mark number {number}")
    recorder.oom(512 * MIB)
    trace = recorder.finish()
    found = outcome(trace, total=8 * GIB)
    return virtual_run(trace, devices=(replace(found, context_bytes=0),), exit_code=1)
