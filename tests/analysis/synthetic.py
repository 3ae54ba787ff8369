"""Traces and runs put together by hand, with figures that a reader can add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from vramfit.trace import (
    CardLimit,
    Category,
    DeadMemory,
    DeviceOutcome,
    EventKind,
    Frame,
    MemoryTrace,
    OomReport,
    Run,
    RunWarning,
    SecondRun,
    TraceBuilder,
    TraceDevice,
)
from vramfit.trace.outcome import GARBAGE_BYTES, GARBAGE_COLLECTED
from vramfit.units import GIB, MIB

TRAIN = "/home/ada/project/train.py"
MODEL = "/home/ada/project/nets/gpt.py"
TORCH_LINEAR = Frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
TRAINER = Frame("/venv/lib/python3.11/site-packages/transformers/trainer.py", 2500, "train")


@dataclass
class Recorder:
    """Writes a trace: blocks are laid one after the other into segments of 20 MiB or of their own size."""

    total_bytes: int = 24 * GIB
    context_bytes: int = 400 * MIB
    devices: int = 1
    clock: int = 0
    current_phase: int = -1
    cursor: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    blocks: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        described = tuple(
            TraceDevice(
                index=index,
                name="RTX 4090",
                total_bytes=self.total_bytes,
                context_bytes=self.context_bytes,
                segments=(),
            )
            for index in range(self.devices)
        )
        self.builder = TraceBuilder(devices=described, meta={"source": "virtual", "alloc_conf": ""})

    def phase(self, name: str | None) -> None:
        self.current_phase = -1 if name is None else self.builder.phase(name)

    def alloc(
        self,
        tensor: str,
        size: int,
        category: Category,
        *,
        op: str = "aten.empty.memory_format",
        module: str = "",
        stack: tuple[Frame, ...] = (),
        device: int = 0,
    ) -> int:
        """Allocate and give the address; a segment is taken where the last one has no room."""
        block = -(-size // 512) * 512
        start = self.cursor.get(device, 0)
        if start + block > self.ends.get(device, 0):
            segment = max(20 * MIB, -(-block // (2 * MIB)) * 2 * MIB)
            start = (0x7F0000000000 + (device << 44)) if device not in self.ends else self.ends[device]
            self._append(EventKind.SEGMENT_ALLOC, device, start, segment, 0)
            self.ends[device] = start + segment
        self.cursor[device] = start + block
        self.blocks[start] = (device, size, block)
        self._append(
            EventKind.ALLOC,
            device,
            start,
            size,
            block,
            category=category,
            op=self.builder.op(op),
            stack=self.builder.stack(stack) if stack else -1,
            module=self.builder.module(module) if module else -1,
            tensor=self.builder.tensor(tensor) if tensor else -1,
        )
        return start

    def free(self, address: int) -> None:
        device, size, block = self.blocks.pop(address)
        self._append(EventKind.FREE_REQUESTED, device, address, size, block)
        self._append(EventKind.FREE_COMPLETED, device, address, size, block)

    def oom(self, size: int, device: int = 0) -> None:
        self._append(EventKind.OOM, device, 0, size, 0)

    def mark(self, tag: str, device: int = 0) -> None:
        self._append(EventKind.MARKER, device, 0, 0, 0, op=self.builder.op(tag))

    def mark_phase(self, module: str = "", device: int = 0) -> None:
        """What a program's phase begins with, and each call of an outermost module in it."""
        path = self.builder.module(module) if module else -1
        self._append(EventKind.MARKER, device, 0, 0, 0, module=path)

    def finish(self) -> MemoryTrace:
        return self.builder.finish()

    def _append(
        self, kind: EventKind, device: int, address: int, size: int, block: int, **metadata: int
    ) -> None:
        self.clock += 1
        self.builder.append(
            kind,
            device=device,
            address=address,
            size=size,
            block=block,
            time_us=self.clock * 100,
            phase=self.current_phase,
            **metadata,
        )


def gpt_training(recorder: Recorder, *, layers: int = 12, iterations: int = 3, hidden: int = 768) -> None:
    """A transformer trained with AdamW, batch 4 x 1024: float32 parameters, bfloat16 activations."""
    root = "GPT"
    build = (TORCH_LINEAR, Frame(MODEL, 12, "__init__"), Frame(TRAIN, 20, "main"))
    call = (TORCH_LINEAR, Frame(MODEL, 40, "forward"), TRAINER, Frame(TRAIN, 33, "main"))
    names = ["attn.qkv", "attn.out", "mlp.up", "mlp.down"]
    widths = {"attn.qkv": 3, "attn.out": 1, "mlp.up": 4, "mlp.down": 4}
    modules = [(f"{root}.h.{layer}.{name}", widths[name]) for layer in range(layers) for name in names]
    recorder.phase(None)
    shapes = [(f"{root}.wte", f"float32[50257, {hidden}]", 50257 * hidden * 4)]
    shapes += [
        (name, f"float32[{width * hidden}, {hidden}]", width * hidden * hidden * 4) for name, width in modules
    ]
    for name, shape, size in shapes:
        recorder.alloc(shape, size, Category.PARAMETERS, op="aten._to_copy.default", module=name, stack=build)
    gradients: list[int] = []
    for iteration in range(iterations):
        recorder.phase(f"step {iteration}/forward")
        batch = recorder.alloc("int64[4, 1024]", 32768, Category.INPUTS, stack=(Frame(TRAIN, 31, "main"),))
        saved = []
        for name, width in modules:
            shape = f"bfloat16[4, 1024, {width * hidden}]"
            size = 4096 * width * hidden * 2
            saved.append(
                recorder.alloc(
                    shape, size, Category.ACTIVATIONS, op="aten.addmm.default", module=name, stack=call
                )
            )
        logits = recorder.alloc(
            "float32[4096, 50257]",
            4096 * 50257 * 4,
            Category.ACTIVATIONS,
            op="aten._to_copy.default",
            module=f"{root}.lm_head",
            stack=call,
        )
        recorder.phase(f"step {iteration}/backward")
        backward = (Frame(TRAIN, 34, "main"),)
        if iteration == 0:
            recorder.alloc("", 8519680, Category.WORKSPACES, op="cublas", stack=backward)
        for name, shape, size in shapes:
            gradients.append(
                recorder.alloc(
                    shape, size, Category.GRADIENTS, op="aten.mm.default", module=name, stack=backward
                )
            )
            if saved:
                recorder.free(saved.pop())
        recorder.free(logits)
        recorder.phase(f"step {iteration}/step")
        step = (Frame(TRAIN, 35, "main"),)
        if iteration == 0:
            for _ in range(2):
                for name, shape, size in shapes:
                    recorder.alloc(
                        shape,
                        size,
                        Category.OPTIMIZER_STATE,
                        op="aten.zeros_like.default",
                        module=name,
                        stack=step,
                    )
        for address in gradients:
            recorder.free(address)
        gradients.clear()
        recorder.free(batch)


def outcome(
    trace: MemoryTrace,
    *,
    device: int = 0,
    total: int = 24 * GIB,
    context: int = 400 * MIB,
    gpu: str = "RTX 4090",
) -> DeviceOutcome:
    """What the machine would say at exit, recounted from the trace event by event."""
    allocated = reserved = peak_allocated = peak_reserved = 0
    blocks: dict[int, int] = {}
    for kind, where, address, size, block in zip(
        trace.kind.tolist(),
        trace.device.tolist(),
        trace.address.tolist(),
        trace.size.tolist(),
        trace.block.tolist(),
        strict=True,
    ):
        if where != device:
            continue
        if kind == EventKind.ALLOC:
            blocks[address] = block
            allocated += block
        elif kind == EventKind.FREE_REQUESTED:
            allocated -= blocks.pop(address)
        elif kind == EventKind.SEGMENT_ALLOC:
            reserved += size
        elif kind == EventKind.SEGMENT_FREE:
            reserved -= size
        peak_allocated = max(peak_allocated, allocated)
        peak_reserved = max(peak_reserved, reserved)
    return DeviceOutcome(
        index=device,
        gpu=gpu,
        total_bytes=total,
        context_bytes=context,
        stats={"num_ooms": 0},
        peak_allocated_bytes=peak_allocated,
        peak_reserved_bytes=peak_reserved,
        peak_active_bytes=peak_allocated,
    )


def virtual_run(
    trace: MemoryTrace,
    *,
    devices: tuple[DeviceOutcome, ...] | None = None,
    oom: OomReport | None = None,
    warnings: tuple[RunWarning, ...] = (),
    exit_code: int = 0,
    error: str | None = None,
) -> Run:
    """A run with that trace."""
    return Run(
        trace=trace,
        devices=devices if devices is not None else (outcome(trace),),
        oom=oom,
        warnings=warnings,
        ops=12345,
        seconds_simulated=math.pi,
        seconds_wall=1.25,
        exit_code=exit_code,
        error=error,
        program=("train.py", "--epochs", "1"),
        torch_version="2.13.0",
        platform="linux",
    )


def quick_run() -> Run:
    """A small training that fits, for what replays it again and again."""
    recorder = Recorder()
    gpt_training(recorder, layers=1)
    return virtual_run(recorder.finish())


def fitting_run() -> Run:
    """GPT training that fits, with two warnings."""
    recorder = Recorder()
    gpt_training(recorder)
    warnings = (
        RunWarning(
            code="compile", message="torch.compile runs eagerly: fusion may use less", location=None, count=1
        ),
        RunWarning(
            code="guess",
            message="a value that only the card would know was guessed",
            location=f"{TRAIN}:50",
            count=7,
        ),
    )
    return virtual_run(recorder.finish(), warnings=warnings)


def oom_run(*, handled: bool = False, exit_code: int = 1) -> Run:
    """A larger GPT that runs out on a card of 14 GiB when its optimizer has made its state."""
    total = 14 * GIB
    recorder = Recorder(total_bytes=total)
    gpt_training(recorder, layers=24, iterations=1, hidden=1280)
    recorder.phase("step 0/step")
    request = 512 * MIB
    recorder.oom(request)
    trace = recorder.finish()
    found = outcome(trace, total=total, gpu="Example 14GB")
    user_line = Frame(TRAIN, 35, "main")
    report = OomReport(
        device=0,
        requested_bytes=request,
        stack=(TORCH_LINEAR, user_line),
        user_line=user_line,
        op="aten._foreach_sqrt.default",
        message="CUDA out of memory. Tried to allocate 512.00 MiB.",
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        free_bytes=total - found.context_bytes - found.peak_reserved_bytes,
        total_bytes=total,
        handled=handled,
    )
    return virtual_run(trace, devices=(found,), oom=report, exit_code=exit_code, error="OutOfMemoryError")


def needing(*, garbage: bool = False, error: str = "") -> Run:
    """A run that ran out, with what came of a second one."""
    second = fitting_run()
    meta = {**second.trace.meta, GARBAGE_COLLECTED: 3, GARBAGE_BYTES: 5 * GIB} if garbage else {}
    limit = CardLimit.COLLECTED if garbage else CardLimit.SERVED
    device = replace(second.devices[0], peak_allocated_bytes=20 * GIB - 7 * MIB, peak_reserved_bytes=20 * GIB)
    if garbage:
        device = replace(device, peak_allocated_bytes=9 * GIB, peak_reserved_bytes=9 * GIB)
    second = replace(
        second,
        trace=replace(second.trace, meta=meta),
        devices=(device,),
        exit_code=int(bool(error)),
        error=error or None,
    )
    run = oom_run()
    assert run.oom is not None
    dead = DeadMemory(categories={"parameters": 2 * GIB}) if garbage else None
    return replace(run, oom=replace(run.oom, dead=dead), again=SecondRun(run=second, limit=limit))


def no_room_run(*, asked: bool = True, handled: bool = False) -> Run:
    """On a card of 100 MiB, less than the CUDA context, a request of 1 MiB fails; or nothing is asked for."""
    total = 100 * MIB
    recorder = Recorder(total_bytes=total)
    if asked:
        recorder.oom(1 * MIB)
    trace = recorder.finish()
    report = OomReport(
        device=0,
        requested_bytes=1 * MIB,
        stack=(),
        user_line=Frame(TRAIN, 35, "main"),
        op="aten.empty.memory_format",
        message="CUDA out of memory. Tried to allocate 2.00 MiB.",
        allocated_bytes=0,
        reserved_bytes=0,
        free_bytes=0,
        total_bytes=total,
        handled=handled,
    )
    ended = asked and not handled
    return virtual_run(
        trace,
        devices=(outcome(trace, total=total, gpu="Example 100MB"),),
        oom=report if asked else None,
        exit_code=int(ended),
        error="OutOfMemoryError" if ended else None,
    )
