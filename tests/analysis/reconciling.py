"""Programs as lists of requests, predicted and recorded: both are served by our allocator, one with all that a virtual
run knows of a request, the other with what a torch snapshot holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analysis.synthetic import MODEL, TORCH_LINEAR, TRAIN, virtual_run
from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver
from vramfit.trace import (
    Actual,
    Category,
    DeviceOutcome,
    EventKind,
    Frame,
    MemoryTrace,
    Run,
    TraceBuilder,
    TraceDevice,
    snapshot_from_trace,
    trace_from_snapshot,
)
from vramfit.trace.model import COLUMNS
from vramfit.units import GIB, MIB

MAIN = Frame(TRAIN, 33, "main")
WORKSPACE = 8_519_680
CONTEXT = 400 * MIB


@dataclass(frozen=True)
class Take:
    """A request for ``size`` bytes that the program calls ``name``."""

    name: str
    size: int
    category: Category = Category.ACTIVATIONS
    op: str = "aten.mm.default"
    line: Frame = MAIN


@dataclass(frozen=True)
class Give:
    """The block of that name is given back."""

    name: str


Program = list[Take | Give]


def training(layers: int = 6, steps: int = 3) -> Program:
    """Parameters, then steps of forward, backward and an optimizer; every layer has sizes like every other."""
    program: Program = []
    sizes = {"up": 12 * MIB + 700, "down": 12 * MIB, "norm": 3000}
    for layer in range(layers):
        for kind, size in sizes.items():
            line = Frame(MODEL, 10 + len(kind), "__init__")
            program.append(Take(f"p{layer}{kind}", size, Category.PARAMETERS, "aten._to_copy.default", line))
    for step in range(steps):
        for layer in range(layers):
            for number, (op, size) in enumerate(
                (("mm", 5 * MIB + 100), ("gelu", 5 * MIB + 100), ("native_layer_norm", 9000), ("mm", 2 * MIB))
            ):
                line = Frame(MODEL, 30 + number, "forward")
                program.append(Take(f"a{step}.{layer}.{number}", size, op=f"aten.{op}.default", line=line))
                if step == layer == number == 0:
                    program.append(Take("w0", WORKSPACE, Category.WORKSPACES, "cublas workspace", line))
        for layer in reversed(range(layers)):
            for kind, size in sizes.items():
                backward = Frame(TRAIN, 34, "main")
                program.append(Take(f"g{step}{layer}{kind}", size, Category.GRADIENTS, line=backward))
                if step == 0 and layer == layers - 1 and kind == "up":
                    program.append(Take("w1", WORKSPACE, Category.WORKSPACES, "cublas workspace", backward))
            program += [Give(f"a{step}.{layer}.{number}") for number in range(4)]
        for layer in range(layers):
            for kind, size in sizes.items():
                line = Frame(TRAIN, 35, "main")
                if step == 0:
                    state = Take(
                        f"s{layer}{kind}", size, Category.OPTIMIZER_STATE, "aten.zeros.default", line
                    )
                    program.append(state)
                temporary = Take("t", size, Category.TEMPORARIES, "aten.sqrt.default", line)
                program += [temporary, Give("t")]
        program += [Give(f"g{step}{layer}{kind}") for layer in range(layers) for kind in sizes]
    return program


def serve(program: Program, *, conf: str = "", named: bool = True, device: int = 0) -> MemoryTrace:
    """The trace of a program; ``named``: with operators, lines and categories, as a virtual run has them."""
    builder = TraceBuilder(meta={"source": "virtual", "alloc_conf": conf})
    blocks: dict[int, int] = {}
    now: list[Take] = []

    def note(kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        block = 0
        known: dict[str, int] = {}
        if kind == AllocatorEventKind.ALLOC:
            block = blocks[address] = allocator.block_size(address)
            if named:
                take = now[-1]
                known = {
                    "category": take.category,
                    "op": builder.op(take.op),
                    "stack": builder.stack((TORCH_LINEAR, take.line)),
                }
        elif kind in (AllocatorEventKind.FREE_REQUESTED, AllocatorEventKind.FREE_COMPLETED):
            block = blocks[address]
        builder.append(
            EventKind(int(kind)),
            device=device,
            address=address,
            size=size,
            block=block,
            stream=stream,
            **known,
        )

    allocator = CachingAllocator(
        Driver(24 * GIB), config=AllocatorConfig.parse(conf), device=device, on_event=note
    )
    held: dict[str, int] = {}
    for step in program:
        if isinstance(step, Take):
            now.append(step)
            held[step.name] = allocator.malloc(step.size)
        else:
            allocator.free(held.pop(step.name))
    described = TraceDevice(
        index=device,
        name="RTX 4090" if named else "",
        total_bytes=24 * GIB if named else 0,
        context_bytes=CONTEXT if named else 0,
        segments=tuple(allocator.segments()),
    )
    return builder.finish(devices=(described,))


def outcome_of(trace: MemoryTrace, *, device: int = 0, **changes: Any) -> DeviceOutcome:
    """What a virtual run would say of a device at its end."""
    from vramfit.analysis import Measure, curves, lifetimes

    found = curves(trace, lifetimes(trace, device))
    peaks = {measure: found.peak(measure) for measure in Measure}
    values: dict[str, Any] = {
        "index": device,
        "gpu": "RTX 4090",
        "total_bytes": 24 * GIB,
        "context_bytes": CONTEXT,
        "stats": {
            "allocated_bytes.all.peak": peaks[Measure.ALLOCATED],
            "reserved_bytes.all.peak": peaks[Measure.RESERVED],
        },
        "peak_allocated_bytes": peaks[Measure.ALLOCATED],
        "peak_reserved_bytes": peaks[Measure.RESERVED],
        "peak_active_bytes": peaks[Measure.ACTIVE],
    }
    return DeviceOutcome(**{**values, **changes})


def predicted(program: Program, *, conf: str = "") -> Run:
    """A virtual run of a program."""
    trace = serve(program, conf=conf)
    return virtual_run(trace, devices=(outcome_of(trace),))


def recorded(program: Program, *, conf: str = "", stacks: bool = False, name: str = "card.pickle") -> Actual:
    """A snapshot of the same on a card; ``stacks``: with the lines, but not the operators."""
    trace = serve(program, conf=conf, named=stacks)
    whole = snapshot_from_trace(trace)
    for entries in whole["device_traces"]:
        for entry in entries:
            entry.pop("category", None)
            entry.pop("user_metadata", None)
    return Actual(name=name, trace=trace_from_snapshot(whole))


def late(actual: Actual, start: int) -> Actual:
    """The same, recorded from an event on: what was there before shows only in the final segments and in returns."""
    trace = actual.trace
    assert trace is not None
    columns: dict[str, Any] = {name: getattr(trace, name)[start:] for name in COLUMNS}
    return replace(actual, trace=replace(trace, **columns))


def without_history(actual: Actual) -> Actual:
    """The same as a snapshot of a program that recorded nothing: the final segments alone."""
    trace = actual.trace
    assert trace is not None
    columns: dict[str, Any] = {name: np.zeros(0, dtype=dtype) for name, dtype in COLUMNS.items()}
    return replace(actual, trace=replace(trace, **columns, stacks=(), frames=()))
