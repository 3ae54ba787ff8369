"""Small programs whose memory is fragmented for a known reason, written down as their allocator served them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vramfit.allocator import AllocatorConfig, AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.analysis._causes import CauseKind
from vramfit.analysis.remedies import RemedyKind
from vramfit.trace import Category, Frame, MemoryTrace, TraceBuilder, TraceDevice
from vramfit.units import GIB, KIB, MIB


class Program:
    """Allocates and frees on a replica of the allocator; everything ends up in a trace."""

    def __init__(self, conf: str = "", total: int = 80 * GIB) -> None:
        self.total = total
        self.builder = TraceBuilder(meta={"alloc_conf": conf, "source": "virtual", "torch_version": "2.13.0"})
        self.allocator = CachingAllocator(
            Driver(total), config=AllocatorConfig.parse(conf), on_event=self._note
        )
        self.phase_id = -1
        self.facts: dict[str, int] = {}
        self.clock = 0
        self.sizes: dict[int, tuple[int, int]] = {}

    def phase(self, name: str) -> None:
        self.phase_id = self.builder.phase(name)

    def take(
        self,
        size: float,
        name: str = "temporary",
        *,
        stream: int = 0,
        category: Category = Category.TEMPORARIES,
        line: int = 1,
    ) -> int:
        self.facts = {
            "tensor": self.builder.tensor(name),
            "op": self.builder.op("aten.empty.memory_format"),
            "category": int(category),
            "stack": self.builder.stack((Frame("/home/ada/train.py", line, "main"),)),
        }
        try:
            return self.allocator.malloc(int(size), stream)
        finally:
            self.facts = {}

    def keep(self, size: float, name: str = "kept", *, stream: int = 0, line: int = 2) -> int:
        return self.take(size, name, stream=stream, category=Category.OPTIMIZER_STATE, line=line)

    def free(self, *addresses: int) -> None:
        for address in addresses:
            self.allocator.free(address)

    def _note(self, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        self.clock += 1
        block = 0
        if kind == AllocatorEventKind.ALLOC:
            block = self.allocator.block_size(address)
            self.sizes[address] = (size, block)
        elif kind in (AllocatorEventKind.FREE_REQUESTED, AllocatorEventKind.FREE_COMPLETED):
            block = self.sizes[address][1]
        facts = self.facts if kind == AllocatorEventKind.ALLOC else {}
        self.builder.append(
            int(kind),
            device=0,
            address=address,
            size=size,
            block=block,
            stream=stream,
            time_us=self.clock * 100,
            phase=self.phase_id,
            **facts,
        )

    def finish(self) -> MemoryTrace:
        device = TraceDevice(
            index=0, name="card", total_bytes=self.total, segments=tuple(self.allocator.segments())
        )
        return self.builder.finish((device,))


def interleaved(*, cured: bool = False) -> MemoryTrace:
    """Kept and temporary blocks alternate; the gaps are too small for what comes next."""
    program = Program()
    program.phase("build")
    if cured:
        for _ in range(50):
            program.keep(4 * MIB)
    temporaries = []
    for _ in range(50):
        temporaries.append(program.take(4 * MIB))
        if not cured:
            program.keep(4 * MIB)
    program.free(*temporaries)
    program.phase("step 0/forward")
    for _ in range(10):
        program.take(16 * MIB, "activation")
    return program.finish()


def growing_sequences(*, cured: bool = False) -> MemoryTrace:
    """Each batch is longer than the one before."""
    program = Program()
    lengths = list(range(10, 50, 2))
    if cured:
        lengths.insert(0, 48)
    for step, length in enumerate(lengths):
        program.phase(f"step {step}/forward")
        program.free(*(program.take(length * width * MIB, "activation") for width in (2, 3, 4)))
    return program.finish()


def checkpoint_in_a_step(*, cured: bool = False) -> MemoryTrace:
    """In the middle of a step, a copy of the weights is put where activations lay."""
    program = Program()
    program.phase("build")
    for _ in range(20):
        program.keep(12 * MIB, "weight")
    if cured:
        for _ in range(20):
            program.keep(12 * MIB, "copy of weight", line=30)
    for step in range(3):
        program.phase(f"step {step}/forward")
        saved = [program.take(40 * MIB, "activation") for _ in range(20)]
        if step == 1:
            program.phase("step 1/checkpoint")
            program.free(*saved)
            saved = []
            if not cured:
                for _ in range(20):
                    program.keep(12 * MIB, "copy of weight", line=30)
        program.free(*saved)
    return program.finish()


def many_sizes(*, cured: bool = False) -> MemoryTrace:
    """No two requests are of the same size."""
    program = Program()
    sizes = [30 + (7 * number) % 40 for number in range(40)]
    for step in range(40):
        program.phase(f"step {step}/forward")
        held = [program.take(70 * MIB if cured else sizes[(step + k * 13) % 40] * MIB) for k in range(5)]
        program.free(*held)
    return program.finish()


def other_stream(*, cured: bool = False) -> MemoryTrace:
    """What a side stream has freed is of no use to the main one."""
    program = Program()
    program.phase("step 0/copy")
    program.free(*[program.take(100 * MIB, stream=0 if cured else 7) for _ in range(8)])
    program.phase("step 0/forward")
    for _ in range(8):
        program.take(100 * MIB, "activation")
    return program.finish()


def small_pool(*, cured: bool = False) -> MemoryTrace:
    """Hundreds of small blocks are gone, and their segments serve no large one."""
    program = Program()
    program.phase("build")
    if cured:
        packed = program.take(400 * MIB, "one buffer")
        program.free(packed)
    else:
        program.free(*[program.take(512 * KIB, "small") for _ in range(800)])
    program.phase("step 0/forward")
    program.take(300 * MIB, "activation")
    return program.finish()


def tiny_tensors(*, cured: bool = False) -> MemoryTrace:
    """Scalars, each of which takes 512 bytes."""
    program = Program()
    program.phase("build")
    if cured:
        program.keep(20_000 * 4, "float32[20000]")
    else:
        for _ in range(20_000):
            program.keep(4, "float32[]")
    return program.finish()


def rounded_up() -> MemoryTrace:
    """Requests a little above a power of two, rounded up to a half of it."""
    program = Program("roundup_power2_divisions:2")
    program.phase("build")
    for _ in range(10):
        program.keep(66 * MIB)
    return program.finish()


def oversize_cached() -> MemoryTrace:
    """Large cached blocks are kept from smaller requests by max_split_size_mb."""
    program = Program("max_split_size_mb:128")
    program.phase("step 0/forward")
    program.free(*[program.take(200 * MIB) for _ in range(5)])
    program.phase("step 1/forward")
    for _ in range(10):
        program.take(90 * MIB, "activation")
    return program.finish()


def page_edges() -> MemoryTrace:
    """Small kept blocks hold on to pages of 20 MiB each."""
    program = Program("expandable_segments:True")
    program.phase("build")
    temporaries = []
    for _ in range(12):
        temporaries.append(program.take(38 * MIB))
        program.keep(2 * MIB)
    program.free(*temporaries)
    program.phase("step 0/forward")
    program.allocator.empty_cache()
    for _ in range(6):
        program.take(60 * MIB, "activation")
    return program.finish()


def growing_trap(cycles: int = 101, *, total: int = 16 * GIB) -> MemoryTrace:
    """The program of pytorch/pytorch#193400: a small block after two large ones stays, again and again."""
    program = Program("max_split_size_mb:128,expandable_segments:True", total=total)
    program.keep(64 * MIB, "canary")
    for step in range(cycles):
        program.phase(f"step {step}/forward")
        large = (program.take(91 * MIB), program.take(45.5 * MIB))
        program.keep(2 * MIB)
        program.free(*large)
    return program.finish()


def waiting_for_a_stream(*, cured: bool = False) -> MemoryTrace:
    """Freed blocks are still in use on another stream when new ones are wanted."""
    program = Program()
    for step in range(2):
        program.phase(f"step {step}/forward")
        for _ in range(5):
            block = program.take(50 * MIB, "sent")
            program.allocator.record_stream(block, 3)
            program.free(block)
            if cured:
                program.allocator.process_events()
    program.allocator.process_events()
    return program.finish()


def private_pools(*, shared: bool = False) -> MemoryTrace:
    """Two graphs, each with a pool of its own."""
    program = Program()
    for graph in range(2):
        pool = (0, 1 if shared else 1 + graph)
        program.phase(f"capture {graph}")
        program.allocator.begin_pool(pool)
        program.free(*[program.take(60 * MIB) for _ in range(4)])
        program.allocator.end_pool(pool)
    return program.finish()


def unsplit_slack() -> MemoryTrace:
    """Requests that leave almost 1 MiB of their segments."""
    program = Program()
    for _ in range(30):
        program.keep(21.05 * MIB)
    return program.finish()


def equal_segments(*, cured: bool = False) -> MemoryTrace:
    """Segments of 20 MiB are free, and the next request is larger than that."""
    program = Program()
    program.phase("step 0/backward")
    program.free(*[program.take(9 * MIB, "gradient") for _ in range(100)])
    program.phase("step 0/optimizer")
    if cured:
        program.allocator.empty_cache()
    for _ in range(10):
        program.take(90 * MIB, "state")
    return program.finish()


def two_streams_with_gaps() -> MemoryTrace:
    """Gaps of 8 MiB between blocks 'side' on stream 7, and of 4 MiB between blocks 'main' on stream 0."""
    program = Program()
    program.phase("build")
    for name, kept, size, stream in (("side", 2 * MIB, 8 * MIB, 7), ("main", 4 * MIB, 4 * MIB, 0)):
        temporaries = []
        for _ in range(10):
            temporaries.append(program.take(size, stream=stream))
            program.keep(kept, name, stream=stream)
        program.free(*temporaries)
    program.take(60 * MIB, "activation")
    return program.finish()


def run_out(steps: Callable[[Program], None], *, conf: str = "", total: int) -> MemoryTrace:
    """A program that ends by running out of memory."""
    program = Program(conf, total=total)
    try:
        steps(program)
    except OutOfMemory:
        return program.finish()
    raise AssertionError("it did not run out")


def _holes(program: Program) -> None:
    """Free memory in pieces: two thirds of each segment of 60 MiB, where nothing of 45 MiB fits."""
    held = [program.take(60 * MIB) for _ in range(10)]
    program.free(*held)
    for _ in range(10):
        program.keep(20 * MIB)
    for _ in range(10):
        program.take(45 * MIB, "activation")


def oom_of_holes() -> MemoryTrace:
    """Served with expandable segments."""
    return run_out(_holes, total=700 * MIB)


def _alternating(program: Program) -> None:
    temporaries = []
    for _ in range(40):
        temporaries.append(program.take(5 * MIB))
        program.keep(5 * MIB)
    program.free(*temporaries)
    program.take(100 * MIB, "activation")


def oom_of_alternating_blocks() -> MemoryTrace:
    """No setting moves live blocks together."""
    return run_out(_alternating, total=420 * MIB)


def _too_much(program: Program) -> None:
    while True:
        program.keep(100 * MIB)


def oom_of_live_memory() -> MemoryTrace:
    """Everything is in use."""
    return run_out(_too_much, total=2 * GIB)


def _a_little_above(program: Program) -> None:
    for _ in range(10):
        program.keep(66 * MIB)


def oom_of_rounding() -> MemoryTrace:
    """Only the rounding stands in the way: ten requests of 66 MiB become 960 MiB."""
    return run_out(_a_little_above, conf="roundup_power2_divisions:2", total=700 * MIB)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, the cause that has to be found, and the remedy that has to be named first."""

    name: str
    make: Callable[[], MemoryTrace]
    cause: CauseKind
    remedy: RemedyKind
    cured: Callable[[], MemoryTrace] | None = None
    """The same program with the remedy, where it is no setting."""


CASES = (
    Case(
        name="interleaved",
        make=interleaved,
        cause=CauseKind.INTERLEAVED,
        remedy=RemedyKind.ALLOCATE_EARLIER,
        cured=lambda: interleaved(cured=True),
    ),
    Case(
        name="growing sequences",
        make=growing_sequences,
        cause=CauseKind.GROWING_SIZES,
        remedy=RemedyKind.EXPANDABLE_SEGMENTS,
        cured=lambda: growing_sequences(cured=True),
    ),
    Case(
        name="checkpoint in a step",
        make=checkpoint_in_a_step,
        cause=CauseKind.LONG_LIVED_IN_HOLE,
        remedy=RemedyKind.EXPANDABLE_SEGMENTS,
        cured=lambda: checkpoint_in_a_step(cured=True),
    ),
    Case(
        name="many sizes",
        make=many_sizes,
        cause=CauseKind.VARYING_SIZES,
        remedy=RemedyKind.EXPANDABLE_SEGMENTS,
        cured=lambda: many_sizes(cured=True),
    ),
    Case(
        name="other stream",
        make=other_stream,
        cause=CauseKind.OTHER_STREAM,
        remedy=RemedyKind.ONE_STREAM,
        cured=lambda: other_stream(cured=True),
    ),
    Case(
        name="small pool",
        make=small_pool,
        cause=CauseKind.OTHER_POOL,
        remedy=RemedyKind.PACK_SMALL,
        cured=lambda: small_pool(cured=True),
    ),
    Case(
        name="tiny tensors",
        make=tiny_tensors,
        cause=CauseKind.ROUNDING,
        remedy=RemedyKind.PACK_SMALL,
        cured=lambda: tiny_tensors(cured=True),
    ),
    Case(name="rounded up", make=rounded_up, cause=CauseKind.ROUNDING, remedy=RemedyKind.LESS_ROUNDING),
    Case(
        name="oversize cached",
        make=oversize_cached,
        cause=CauseKind.OVERSIZE_CACHED,
        remedy=RemedyKind.NO_MAX_SPLIT,
    ),
    Case(name="page edges", make=page_edges, cause=CauseKind.PAGE_EDGES, remedy=RemedyKind.SMALLER_PAGES),
    Case(
        name="growing trap",
        make=growing_trap,
        cause=CauseKind.MAX_SPLIT_EXPANDABLE,
        remedy=RemedyKind.NO_MAX_SPLIT,
    ),
    Case(
        name="waiting for a stream",
        make=waiting_for_a_stream,
        cause=CauseKind.PENDING_FREE,
        remedy=RemedyKind.WAIT_EARLIER,
        cured=lambda: waiting_for_a_stream(cured=True),
    ),
    Case(
        name="private pools",
        make=private_pools,
        cause=CauseKind.PRIVATE_POOL,
        remedy=RemedyKind.SHARE_POOL,
        cured=lambda: private_pools(shared=True),
    ),
    Case(
        name="unsplit slack",
        make=unsplit_slack,
        cause=CauseKind.UNSPLIT_SLACK,
        remedy=RemedyKind.EXPANDABLE_SEGMENTS,
    ),
    Case(
        name="equal segments",
        make=equal_segments,
        cause=CauseKind.SMALLER_SEGMENTS,
        remedy=RemedyKind.EXPANDABLE_SEGMENTS,
        cured=lambda: equal_segments(cured=True),
    ),
)
