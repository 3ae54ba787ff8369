"""Storages that are born and die, placed by an allocator and written to the trace: virtual ones, and metered real ones.

NOTE [How a storage is followed]
Every tensor owns (or views) an ``UntypedStorage``; that of a fake one is on the meta device. torch keeps one
Python object per C++ storage for as long as the storage lives, so a weak reference to it dies exactly when the last
tensor, saved variable or view lets go: that is the moment at which a card would return the block. The callback may
run inside anything (even inside the allocator, when the garbage collector strikes there), so it only queues the block;
the queue is emptied before the next request and before anyone looks at the figures. No request comes in between, so
the order of events, and with it every address, is the same.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import torch

from vramfit.allocator import AllocatorEventKind, CachingAllocator, Driver, OutOfMemory
from vramfit.capture.attribution import ModuleStack, PhaseTracker, ProgramPhase, StackInterner
from vramfit.capture.dead_memory import DeadSearch
from vramfit.capture.still_to_come import still_to_come
from vramfit.gpus import GpuSpec
from vramfit.trace import Category, DeadMemory, EventKind, Frame, OomReport, StillToCome, TraceBuilder
from vramfit.trace.frames import user_frame

_STRIDED = torch.strided
_KIND = {kind: EventKind[kind.name] for kind in AllocatorEventKind}

SHARED_OUT = frozenset({Category.COMMUNICATION_BUFFERS, Category.UNSHARDED_PARAMETERS, Category.PREFETCH})
"""What a rank of several holds beside its own part: it stays what it is though a parameter is a view of it."""
_RETURNING = SHARED_OUT | {Category.PARAMETERS}
"""What gave its memory back (FSDP, offloading) is the same again when it takes it."""


class StorageRecord(weakref.ref[torch.UntypedStorage]):
    """What is known of one storage. The weak reference itself is called when the storage dies."""

    __slots__ = ("address", "category", "device", "graph", "key", "module", "nbytes", "phase", "row", "used")

    key: int
    device: int
    address: int
    nbytes: int
    row: int
    phase: int
    category: int
    graph: bool
    module: str | None
    used: int  # the pass of the program in which an op last had it, see `StorageMeter.passes`


RecordT = TypeVar("RecordT", bound=StorageRecord)


@dataclass(slots=True)
class LifetimePeaks:
    """Highest figures of a device since the start, in bytes, whatever the program resets: as torch counts them."""

    allocated: int = 0
    reserved: int = 0
    active: int = 0


EventHook = Callable[[int, AllocatorEventKind, int, int, int], None]
FreedHook = Callable[[int, int, int, int], None]


class MeteredDevice(Protocol):
    """A device in whose memory storages are placed."""

    @property
    def index(self) -> int:
        """Its number."""

    @property
    def spec(self) -> GpuSpec:
        """What it is."""

    @property
    def driver(self) -> Driver:
        """Its memory as a whole."""

    @property
    def allocator(self) -> CachingAllocator:
        """Its caching allocator."""


class MeteredMachine(Protocol):
    """Devices, and what they have in common: `vramfit.virtual.machine.Machine` is one.

    Attributes:
        on_event: called with (device, kind, address, size, stream) on each event of an allocator.
        on_freed: called with (device, address, size, stream) instead of both events of a block that is free as soon as
            it is given back.
    """

    on_event: EventHook | None
    on_freed: FreedHook | None

    @property
    def devices(self) -> Sequence[MeteredDevice]:
        """The devices, by their numbers."""

    @property
    def clock_us(self) -> float:
        """The time, in microseconds."""

    def current_stream(self, device: int) -> int:
        """The stream on which a device works now."""

    def notify_oom(self, device: int, requested: int, allocated: int, free: int) -> None:
        """Hear that a request did not fit, with figures in bytes."""


class StorageMeter(Generic[RecordT]):
    """What all meters share: storages go through a machine's allocators, and events to a `TraceBuilder`.

    Attributes:
        builder: where the events go.
        stacks, modules, phases: who allocates.
        ops: how many operators were counted.
        oom: the last request that did not fit.
        lock: held while the allocators and the trace change.
        category: of what is allocated now, where it does not follow from the phase.
        dead_search: finds what only reference cycles hold where a request fails.
        passes: outermost calls of modules so far; counted by who wants to know what was used when (`KeptWatch`).
        follows_use: whether ops are to note what they use.
        on_oom: called where a request has failed, before the program hears of it.
    """

    follows_use = False

    def __init__(self, machine: MeteredMachine, builder: TraceBuilder) -> None:
        self.machine = machine
        self.builder = builder
        self.stacks = StackInterner(builder)
        self.modules = ModuleStack(builder)
        self.phases = PhaseTracker(builder, self._mark_phase)
        self.phases.on_rest = self._note_rest
        self.ops = 0
        self.oom: OomReport | None = None
        self.lock = threading.RLock()
        self.category: Category | None = None
        self.dead_search = DeadSearch()
        self.passes = 0
        self.on_oom: Callable[[], object] | None = None
        self._records: dict[int, RecordT] = {}
        self._dead: deque[RecordT] = deque()
        self._backward_stack: tuple[int, ...] | None = None
        self._lifetime: defaultdict[int, LifetimePeaks] = defaultdict(LifetimePeaks)
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        machine.on_event = self._on_event
        machine.on_freed = self._on_freed

    # -- storages ------------------------------------------------------------------------------------------------

    def record_of(self, tensor: torch.Tensor) -> RecordT | None:
        """The record behind a tensor, None when its storage is not followed."""
        if tensor.layout is not torch.strided:
            return None
        return self.record_of_storage(tensor.untyped_storage())

    def record_of_storage(self, storage: torch.UntypedStorage) -> RecordT | None:
        """The record of a storage, None when it is not followed."""
        self.collect()  # a new storage may lie where a dead one lay
        return self._records.get(storage._cdata)

    def use(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that an op works on these tensors."""
        records, now = self._records, self.passes
        for tensor in tensors:
            if tensor.layout is _STRIDED and (record := records.get(tensor.untyped_storage()._cdata)):
                record.used = now

    def records(self) -> list[RecordT]:
        """The records of all storages that hold memory now."""
        self.collect()
        with self.lock:
            return [record for record in self._records.values() if record.row >= 0 and record.address]

    def collect(self) -> None:
        """Return the blocks of all storages that have died since the last call."""
        if self._dead:
            with self.lock:
                while self._dead:
                    self._release(self._dead.popleft())

    def _place(self, record: RecordT, op: str, category: int | None, tensor: torch.Tensor | None) -> None:
        record.phase = self.phases.index
        record.category = self._category_now() if category is None else category
        record.address, record.row = self.malloc(
            record.nbytes,
            record.device,
            op=op,
            category=record.category,
            tensor=None if tensor is None else describe(tensor),
        )

    def _category_of(self, row: int) -> int | None:
        """Category of an allocation row, None for row -1 (an empty storage)."""
        return None if row < 0 else self.builder.category(row)

    def _category_again(self, record: RecordT, row: int) -> int | None:
        """Category of a storage that takes another size; None where that follows from the phase.

        Args:
            record: of the storage.
            row: of its allocation so far.
        """
        if self.category in SHARED_OUT:
            return self.category
        return record.category if record.category in _RETURNING else self._category_of(row)

    def _keeps_category(self, record: RecordT, category: Category) -> bool:
        """Whether a storage is not what a tensor over it is tagged as: what was gathered is no parameter of its own."""
        return category is Category.PARAMETERS and record.category in SHARED_OUT

    def _release(self, record: RecordT) -> None:
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if not record.address:
            return
        self._demote(record)
        self.free(record.address, record.device)

    def _demote(self, record: RecordT) -> None:
        """Count as temporary what a forward pass made and dropped again before its backward pass began."""
        if (
            record.category == Category.ACTIVATIONS
            and record.graph
            and record.phase == self.phases.index
            and self.phases.phase is ProgramPhase.FORWARD
        ):
            self.builder.set_category(record.row, Category.TEMPORARIES)

    # -- raw blocks ----------------------------------------------------------------------------------------------

    def malloc(
        self,
        nbytes: int,
        device: int,
        *,
        op: str,
        category: int,
        tensor: str | None = None,
        stream: int | None = None,
    ) -> tuple[int, int]:
        """Take a block on the current stream of a device; returns its address and its row in the trace.

        Raises:
            torch.OutOfMemoryError: the card is full.
        """
        if nbytes == 0:
            return 0, -1
        machine, builder = self.machine, self.builder
        card = machine.devices[device]
        if stream is None:
            stream = machine.current_stream(device)
        with self.lock:
            self.collect()
            try:
                address = card.allocator.malloc(nbytes, stream)
            except OutOfMemory as error:
                served = self._served_after_all(device, nbytes, stream)
                if served is None:
                    raise self._out_of_memory(error, device, nbytes, op) from None
                address = served
            self._note_peaks(device)
            row = builder.append(
                EventKind.ALLOC,
                device=device,
                address=address,
                size=nbytes,
                block=card.allocator.block_size(address),
                stream=stream,
                time_us=int(machine.clock_us),
                category=category,
                op=builder.op(op),
                stack=self.stacks.current(self._backward_stack),
                module=self.modules.current(),
                phase=self.phases.index,
                tensor=-1 if tensor is None else builder.tensor(tensor),
            )
        return address, row

    def _served_after_all(self, device: int, nbytes: int, stream: int) -> int | None:
        """The address of a request for which there was no room; None where it fails, as it does on a card."""
        del device, nbytes, stream
        return None

    def free(self, address: int, device: int) -> None:
        """Return a block to its allocator."""
        with self.lock:
            self.machine.devices[device].allocator.free(address)

    def lifetime_peaks(self, device: int) -> LifetimePeaks:
        """Highest figures of a device since the start."""
        return self._lifetime[device]

    def _note_peaks(self, device: int) -> None:
        allocator, peaks = self.machine.devices[device].allocator, self._lifetime[device]
        peaks.allocated = max(peaks.allocated, allocator.allocated_bytes)
        peaks.active = max(peaks.active, allocator.active_bytes)
        peaks.reserved = max(peaks.reserved, allocator.reserved_bytes)

    # -- attribution ---------------------------------------------------------------------------------------------

    @contextmanager
    def allocating(self, category: Category) -> Iterator[None]:
        """Let all that is allocated in the block be for something, where its op does not say what for."""
        before, self.category = self.category, category
        try:
            yield
        finally:
            self.category = before

    def turn(self, tensor: torch.Tensor, before: Category, after: Category) -> None:
        """Let what a tensor holds count as another category from now on, if it did as `before` until now."""
        record = self.record_of(tensor)
        if record is None or record.row < 0 or record.category != before:
            return
        with self.lock:
            record.category = after
            record.row = self.builder.recategorize(
                record.row, after, int(self.machine.clock_us), self.phases.index
            )

    def tag(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Note what a tensor is for, or those inside a wrapper; a later, better category replaces an earlier one."""
        inside = self._inside(tensor)
        if inside is not None:
            for part in inside:
                self.tag(part, category, module)
            return
        record = self.record_of(tensor)
        if record is None or record.row < 0:
            return
        if not self._keeps_category(record, category):
            record.category = category
            self.builder.set_category(record.row, category)
        if module is not None:
            record.module = module
            self.builder.set_module(record.row, self.builder.module(module))
        if category is Category.PARAMETERS and tensor.requires_grad:
            self._parameters[id(tensor)] = weakref.ref(tensor)

    def parameters(self) -> list[torch.Tensor]:
        """Every trainable parameter that is alive."""
        alive: list[torch.Tensor] = []
        for key, reference in list(self._parameters.items()):
            parameter = reference()
            if parameter is None:
                del self._parameters[key]
            else:
                alive.append(parameter)
        return alive

    def remember_backward(self) -> None:
        """Keep the stack that calls the autograd engine: the engine's own threads have no frame of the program."""
        self._backward_stack = self.stacks.key()

    @property
    def backward_frames(self) -> tuple[Frame, ...]:
        """The frames that last called the autograd engine, innermost first."""
        return self.stacks.frames(self._backward_stack or ())

    def _inside(self, tensor: torch.Tensor) -> Iterable[torch.Tensor] | None:
        """The tensors inside a wrapper; None for one that holds its memory itself."""
        raise NotImplementedError

    def _category_now(self) -> int:
        if self.category is not None:
            return self.category
        phase = self.phases.phase
        if phase is ProgramPhase.FORWARD:
            return Category.ACTIVATIONS
        if phase is ProgramPhase.BACKWARD:
            # A recomputed forward inside the backward pass (checkpointing) records a graph again.
            return Category.ACTIVATIONS if torch.is_grad_enabled() else Category.TEMPORARIES
        if phase is ProgramPhase.OPTIMIZER:
            return Category.TEMPORARIES
        return Category.OTHER

    # -- events --------------------------------------------------------------------------------------------------

    def _on_event(self, device: int, kind: AllocatorEventKind, address: int, size: int, stream: int) -> None:
        if kind is AllocatorEventKind.ALLOC or kind is AllocatorEventKind.OOM:
            return  # written where the request is made, with its metadata
        self.builder.append(
            _KIND[kind],
            device=device,
            address=address,
            size=size,
            stream=stream,
            time_us=int(self.machine.clock_us),
            phase=self.phases.index,
        )

    def _on_freed(self, device: int, address: int, size: int, stream: int) -> None:
        self.builder.freed(device, stream, address, size, int(self.machine.clock_us), self.phases.index)

    def unhandled_oom(self) -> OomReport | None:
        """The last out-of-memory, marked as one that the program did not catch."""
        return None if self.oom is None else replace(self.oom, handled=False)

    def mark(self, tag: str) -> None:
        """Put a named point in time into the trace of every device."""
        builder = self.builder
        with self.lock:
            self.collect()
            op, stack = builder.op(tag), self.stacks.current()
            for device in self.machine.devices:
                builder.append(
                    EventKind.MARKER,
                    device=device.index,
                    time_us=int(self.machine.clock_us),
                    op=op,
                    stack=stack,
                    phase=self.phases.index,
                )

    def _note_rest(self) -> None:
        """Note that the program is between two of its works: see `TraceBuilder.rest`."""
        with self.lock:
            self.collect()
            self.builder.rest()

    def _mark_phase(self, index: int) -> None:
        """Mark the beginning of a phase, and of each forward pass with the module that is called."""
        module = self.modules.current()
        for device in self.machine.devices:
            self.builder.append(
                EventKind.MARKER,
                device=device.index,
                time_us=int(self.machine.clock_us),
                phase=index,
                module=module,
            )

    def _out_of_memory(self, error: OutOfMemory, device: int, nbytes: int, op: str) -> torch.OutOfMemoryError:
        message = error.torch_message()
        self.note_oom(message, device, nbytes, op)
        return torch.OutOfMemoryError(message)

    def note_oom(self, message: str, device: int, nbytes: int, op: str) -> None:
        """Note that a card is full: for torch's allocator, or for a library that takes memory beside it."""
        # First of all: what is made here may set off Python's collector, which would leave nothing to find.
        dead = self._dead_memory(device)
        card = self.machine.devices[device]
        index = self.stacks.current(self._backward_stack)
        stack: tuple[Frame, ...] = self.builder.frames_of(index)
        self.builder.append(
            EventKind.OOM,
            device=device,
            address=card.driver.free_bytes,  # see EventKind.OOM
            size=nbytes,
            stream=self.machine.current_stream(device),
            time_us=int(self.machine.clock_us),
            op=self.builder.op(op),
            stack=index,
            module=self.modules.current(),
            phase=self.phases.index,
        )
        self.oom = OomReport(
            device=device,
            requested_bytes=nbytes,
            stack=stack,
            user_line=user_frame(stack),
            op=op,
            message=message,
            allocated_bytes=card.allocator.allocated_bytes,
            reserved_bytes=card.allocator.reserved_bytes,
            free_bytes=card.driver.free_bytes,
            total_bytes=card.spec.total_bytes,
            handled=True,
            to_come=self._still_to_come(device),
            dead=dead,
        )
        self.machine.notify_oom(device, nbytes, card.allocator.allocated_bytes, card.driver.free_bytes)
        if self.on_oom is not None:
            self.on_oom()

    def _dead_memory(self, device: int) -> DeadMemory | None:
        """What only reference cycles hold on a device; None where it takes too long to see."""
        storages = self.dead_search.storages()
        if storages is None:
            return None
        categories: Counter[str] = Counter()
        for category, block in self._blocks_of(storages.addresses, device):
            categories[category.name.lower()] += block
        graphs = sum(block for _, block in self._blocks_of(storages.saved, device))
        return DeadMemory(categories=dict(categories), graphs_bytes=graphs)

    def _blocks_of(self, storages: Iterable[int], device: int) -> Iterator[tuple[Category, int]]:
        """What the storages at some addresses of torch's are for, and the bytes of their blocks on a device."""
        allocator = self.machine.devices[device].allocator
        for address in storages:
            record = self._records.get(address)
            if record is not None and record.device == device and record.address:
                yield Category(self.builder.category(record.row)), allocator.block_size(record.address)

    def _still_to_come(self, device: int) -> StillToCome:
        def here(tensor: torch.Tensor) -> bool:
            record = self.record_of(tensor)
            return record is not None and record.row >= 0 and record.device == device

        return still_to_come(here, self.parameters(), self.tag)


def describe(tensor: torch.Tensor) -> str:
    """``bfloat16[4, 1024, 768]``: dtype and shape as the trace names a tensor."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
