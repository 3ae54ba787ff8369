"""Storages that are born and die on a virtual card, placed by its allocator and written to the trace.

NOTE [How a storage is followed]
Every fake tensor owns (or views) an ``UntypedStorage`` on the meta device. torch keeps one Python object per C++
storage for as long as the storage lives, so a weak reference to it dies exactly when the last tensor, saved variable
or view lets go: that is the moment at which a card would return the block. The callback may run inside anything
(even inside the allocator, when the garbage collector strikes there), so it only queues the block; the queue is
emptied before the next request and before anyone looks at the figures. No request comes in between, so the order of
events, and with it every address, is the same.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.allocator import AllocatorEventKind, OutOfMemory
from vramfit.allocator.rounding import MIN_BLOCK
from vramfit.trace import Category, EventKind, Frame, OomReport, TraceBuilder
from vramfit.trace.frames import user_frame
from vramfit.virtual.assume import Extent, bounds
from vramfit.virtual.attribution import ModuleStack, Phase, PhaseTracker, StackInterner
from vramfit.virtual.expectations import NOTHING, Expectation, is_whole
from vramfit.virtual.kernels.context import EMPTY_CACHE, Spare
from vramfit.virtual.machine import Machine
from vramfit.virtual.resting import Numbers, Resting
from vramfit.virtual.subclasses import parts

_KIND = {kind: EventKind[kind.name] for kind in AllocatorEventKind}


class StorageRecord(weakref.ref[torch.UntypedStorage]):
    """What is known of one storage on a virtual card. The weak reference itself tells its death."""

    __slots__ = (
        "above",
        "address",
        "below",
        "category",
        "device",
        "expected",
        "extents",
        "graph",
        "key",
        "module",
        "nbytes",
        "phase",
        "row",
        "shape",
    )

    key: int
    device: int
    address: int
    nbytes: int
    row: int
    phase: int
    category: int
    graph: bool
    module: str | None
    extents: tuple[Extent, ...]  # assumed sizes on which it rests
    shape: tuple[int, ...]  # of the tensor that it was made for, where it rests on any
    below: int  # bytes by which it may be smaller
    above: int  # bytes by which it may be larger
    expected: Expectation | None


@dataclass(slots=True)
class Peaks:
    """Highest figures of a device since the start, in bytes, whatever the program resets.

    Attributes:
        allocated, reserved, active: as torch counts them.
        lowest: the highest sum of the least bytes that each allocation could be.
        highest: the highest sum of the most bytes that each could be.
        doubted: the op whose uncertain size was the last to count in `highest`.
    """

    allocated: int = 0
    reserved: int = 0
    active: int = 0
    lowest: int = 0
    highest: int = 0
    doubted: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A block that a kernel needs while it runs, and by how many bytes it may be smaller and larger than told."""

    address: int
    below: int
    above: int


@dataclass(slots=True)
class Doubt:
    """Bytes by which what is allocated on a device at this moment may be less, and more, than told."""

    below: int = 0
    above: int = 0
    op: str = ""


class Meter:
    """Places storages through the allocators of a `Machine` and writes what happens to a `TraceBuilder`."""

    def __init__(self, machine: Machine, builder: TraceBuilder) -> None:
        self.machine = machine
        self.builder = builder
        self.stacks = StackInterner(builder)
        self.modules = ModuleStack(builder)
        self.phases = PhaseTracker(builder, self._mark_phase)
        self.ops = 0
        self.oom: OomReport | None = None
        self.lock = threading.RLock()
        self._records: dict[int, StorageRecord] = {}
        self._dead: deque[StorageRecord] = deque()
        self._backward_stack: tuple[int, ...] | None = None
        self._rows: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._peaks: defaultdict[int, Peaks] = defaultdict(Peaks)
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._doubts: defaultdict[int, Doubt] = defaultdict(Doubt)
        self.category: Category | None = None  # what is allocated now is for, where the moment does not tell
        self.assuming = False  # whether any size rests on an assumption so far
        self.numbers = Numbers()
        machine.on_event = self._on_event

    # -- storages ------------------------------------------------------------------------------------------------

    def record_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record behind a fake tensor, None when its storage is not on a virtual card."""
        self.collect()  # a new storage may lie where a dead one lay
        if tensor.layout is not torch.strided:
            return None
        return self._records.get(tensor.untyped_storage()._cdata)

    def adopt(
        self, tensor: torch.Tensor, op: str, category: int | None = None, extents: tuple[Extent, ...] = ()
    ) -> None:
        """Place the storage of a fake ``cuda`` tensor if it is new, or follow its change of size.

        Args:
            tensor: the tensor.
            op: what made it.
            category: what it is for; None tells it from the moment.
            extents: assumed sizes on which its shape rests.

        Raises:
            torch.OutOfMemoryError: the card is full; the message is like the card's.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.collect()
        record = self._records.get(key)
        if record is not None:
            if record.nbytes != storage.nbytes():
                self._resize(record, storage.nbytes(), op, tensor, extents)
            return
        record = StorageRecord(storage, self._dead.append)
        record.key = key
        record.device = tensor.device.index or 0
        record.nbytes = storage.nbytes()
        record.graph = torch.is_grad_enabled()
        record.module = None
        record.expected = None
        self._rest(record, tensor, extents, op)
        try:
            self._place(record, op, category, tensor)
        except torch.OutOfMemoryError:
            self.narrow(record.device, record.below, record.above)
            raise
        self._records[key] = record

    def _rest(
        self, record: StorageRecord, tensor: torch.Tensor | None, extents: tuple[Extent, ...], op: str
    ) -> None:
        """Note on which assumed sizes a storage rests, and count what that leaves open."""
        record.extents, record.shape, record.below, record.above = extents, (), 0, 0
        if tensor is None:
            return
        if not extents:
            self.numbers.see(tensor.shape)
            return
        record.shape = tuple(tensor.shape)
        low, high = bounds(record.nbytes, record.shape, extents, tensor.element_size())
        record.below, record.above = _apart(record.nbytes, low, high)
        self.widen(record.device, record.below, record.above, op)

    def resized(self, tensor_or_storage: torch.UntypedStorage, op: str) -> None:
        """Follow a storage whose size was changed from outside the dispatcher (``storage.resize_``)."""
        self.collect()
        record = self._records.get(tensor_or_storage._cdata)
        if record is not None and record.nbytes != tensor_or_storage.nbytes():
            self._resize(record, tensor_or_storage.nbytes(), op, None, ())

    def collect(self) -> None:
        """Return the blocks of all storages that have died since the last call."""
        if self._dead:
            with self.lock:
                while self._dead:
                    self._release(self._dead.popleft())

    def _place(
        self, record: StorageRecord, op: str, category: int | None, tensor: torch.Tensor | None
    ) -> None:
        record.phase = self.phases.index
        record.category = self._category_now() if category is None else category
        record.address, record.row = self.malloc(
            record.nbytes,
            record.device,
            op=op,
            category=record.category,
            tensor=None if tensor is None else describe(tensor),
        )

    def _resize(
        self,
        record: StorageRecord,
        nbytes: int,
        op: str,
        tensor: torch.Tensor | None,
        extents: tuple[Extent, ...],
    ) -> None:
        # aten/src/ATen/native/cuda/Resize.cpp resize_bytes_cuda: the new block is taken before the old one goes.
        old_address, old_device, row = record.address, record.device, record.row
        below, above = record.below, record.above
        record.nbytes = nbytes
        self._rest(record, tensor, extents, op)
        self._place(record, op, self._category_of(row), tensor)
        if old_address:
            self.free(old_address, old_device)
        self.narrow(old_device, below, above)

    def _category_of(self, row: int) -> int | None:
        """Category of an allocation row, None for row -1 (an empty storage)."""
        return None if row < 0 else self.builder.category(row)

    def _release(self, record: StorageRecord) -> None:
        if self._records.get(record.key) is record:
            del self._records[record.key]
        if record.below or record.above:
            self.narrow(record.device, record.below, record.above)
        if not record.address:
            return
        # What a forward pass made and dropped again before its backward began was a temporary all along.
        if (
            record.category == Category.ACTIVATIONS
            and record.graph
            and record.phase == self.phases.index
            and self.phases.phase is Phase.FORWARD
        ):
            self.builder.set_category(record.row, Category.TEMPORARIES)
        self.free(record.address, record.device)

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
                raise self._out_of_memory(error, device, nbytes, op) from None
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
            self._rows[device][address] = row
        return address, row

    def free(self, address: int, device: int) -> None:
        """Return a block to its allocator."""
        with self.lock:
            self._rows[device].pop(address, None)
            self.machine.devices[device].allocator.free(address)

    def temporary(
        self, sizes: Iterable[int], device: int, op: str, scale: tuple[float, float] = (1.0, 1.0)
    ) -> list[Held]:
        """Take blocks that a kernel needs while it runs; `give_back` returns them.

        Args:
            sizes: bytes of each; a negative entry -n gives back the n-th block taken; see `kernels.Extras` for the
                other entries.
            device: index of the card.
            op: what needs them.
            scale: least and most that each may be, as a multiple of what is told.

        Raises:
            torch.OutOfMemoryError: the card is full; no block is held then.
        """
        taken: list[Held | None] = []
        try:
            for size in sizes:
                if size == EMPTY_CACHE:
                    with self.lock:
                        self.machine.devices[device].allocator.empty_cache()
                elif size < 0:
                    if (gone := taken[-size - 1]) is not None:
                        self.give_back((gone,), device)
                    taken[-size - 1] = None
                else:
                    taken.append(self._hold(size, device, op, scale))
        except torch.OutOfMemoryError:
            # A program that catches the error goes on without them.
            self.give_back(filter(None, taken), device)
            raise
        return [held for held in taken if held is not None]

    def _hold(self, size: int, device: int, op: str, scale: tuple[float, float]) -> Held | None:
        """Take one block; None for an empty one, and for a `Spare` that does not fit: its kernel does without."""
        nbytes = int(size)  # figures are plain numbers
        below, above = _apart(nbytes, int(nbytes * scale[0]), int(nbytes * scale[1]))
        if below or above:
            self.widen(device, below, above, op)
        try:
            address = self.malloc(nbytes, device, op=op, category=Category.TEMPORARIES)[0]
        except torch.OutOfMemoryError:
            self.narrow(device, below, above)
            if type(size) is Spare:
                return None
            raise
        return Held(address, below, above) if address else None

    def give_back(self, held: Iterable[Held], device: int) -> None:
        """Return blocks that a kernel needed."""
        for block in held:
            self.free(block.address, device)
            self.narrow(device, block.below, block.above)

    def lifetime_peaks(self, device: int) -> Peaks:
        """Highest figures of a device since the start."""
        return self._peaks[device]

    def _note_peaks(self, device: int) -> None:
        allocator, peaks, doubt = (
            self.machine.devices[device].allocator,
            self._peaks[device],
            self._doubts[device],
        )
        allocated = allocator.allocated_bytes
        peaks.allocated = max(peaks.allocated, allocated)
        peaks.active = max(peaks.active, allocator.active_bytes)
        peaks.reserved = max(peaks.reserved, allocator.reserved_bytes)
        peaks.lowest = max(peaks.lowest, allocated - doubt.below)
        if allocated + doubt.above > peaks.highest:
            peaks.highest = allocated + doubt.above
            peaks.doubted = doubt.op if doubt.above else ""

    def widen(self, device: int, below: int, above: int, op: str) -> None:
        """Note that what is allocated from now on may be less or more than told; `narrow` ends it.

        Args:
            device: index of the card.
            below: bytes by which it may be less.
            above: bytes by which it may be more.
            op: which op's size is not known exactly.
        """
        doubt = self._doubts[device]
        doubt.below += below
        doubt.above += above
        doubt.op = op

    def narrow(self, device: int, below: int, above: int) -> None:
        """What was uncertain is gone."""
        doubt = self._doubts[device]
        doubt.below -= below
        doubt.above -= above

    def note_doubt(self, device: int) -> None:
        """Count what is uncertain at this moment, also if nothing was allocated since it became so."""
        self._note_peaks(device)

    def error_bar(self, device: int) -> tuple[int, int]:
        """By how many bytes the peak of allocated memory may be lower, and higher, than told."""
        peaks = self._peaks[device]
        return peaks.allocated - peaks.lowest, peaks.highest - peaks.allocated

    def expected(self, tensor: torch.Tensor) -> Expectation:
        """What is expected of the values of a tensor on a card."""
        record = self.record_of(tensor)
        if record is None or record.expected is None:
            return NOTHING
        found = record.expected
        if found.constant is None and (found.exact or found.total is not None) and not is_whole(tensor):
            return replace(found, exact=False, total=None)
        return found

    def expect(self, tensor: torch.Tensor, expected: Expectation | None) -> None:
        """Say what is expected of the values of a tensor on a card."""
        record = self.record_of(tensor)
        if record is not None:
            record.expected = expected

    def extents_of(self, tensor: torch.Tensor) -> tuple[Extent, ...]:
        """The assumed sizes on which a tensor rests, as its own shape shows them."""
        record = self.record_of(tensor)
        if record is None or not record.extents:
            return ()
        if tensor.shape == record.shape:
            return record.extents
        return Resting(record.extents, frozenset(record.shape)).of(tensor.shape)

    def note_count(self, extent: Extent) -> None:
        """Remember a guessed count that the program may read and make something of that size."""
        self.assuming |= self.numbers.assume(extent, count=True)

    # -- attribution ---------------------------------------------------------------------------------------------

    def tag(self, tensor: torch.Tensor, category: Category, module: str | None = None) -> None:
        """Say what a tensor is for, or those inside a wrapper; a later, better word replaces an earlier one."""
        if type(tensor) is not FakeTensor:
            for part in parts(tensor):
                self.tag(part, category, module)
            return
        record = self.record_of(tensor)
        if record is None or record.row < 0:
            return
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
        """Keep the stack that calls the autograd engine: its own threads have no frame of the program."""
        self._backward_stack = self.stacks.key()

    @property
    def backward_frames(self) -> tuple[Frame, ...]:
        """The frames that last called the autograd engine, innermost first."""
        return self.stacks.frames(self._backward_stack or ())

    def _category_now(self) -> int:
        if self.category is not None:
            return self.category
        phase = self.phases.phase
        if phase is Phase.FORWARD:
            return Category.ACTIVATIONS
        if phase is Phase.BACKWARD:
            # A recomputed forward inside the backward pass (checkpointing) records a graph again.
            return Category.ACTIVATIONS if torch.is_grad_enabled() else Category.TEMPORARIES
        if phase is Phase.OPTIMIZER:
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

    def unhandled_oom(self) -> OomReport | None:
        """The last out-of-memory, marked as one that the program did not catch."""
        return None if self.oom is None else replace(self.oom, handled=False)

    def _mark_phase(self, index: int) -> None:
        for device in self.machine.devices:
            self.builder.append(
                EventKind.MARKER, device=device.index, time_us=int(self.machine.clock_us), phase=index
            )

    def _out_of_memory(self, error: OutOfMemory, device: int, nbytes: int, op: str) -> torch.OutOfMemoryError:
        card = self.machine.devices[device]
        message = error.torch_message()
        index = self.stacks.current(self._backward_stack)
        stack: tuple[Frame, ...] = self.builder.frames_of(index)
        self.builder.append(
            EventKind.OOM,
            device=device,
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
        )
        self.machine.notify_oom(device, nbytes, card.allocator.allocated_bytes, card.driver.free_bytes)
        return torch.OutOfMemoryError(message)


def _apart(nbytes: int, low: int, high: int) -> tuple[int, int]:
    """By how many bytes a block may be smaller and larger, in steps in which the allocator hands them out."""
    shown, least, most = (-(-size // MIN_BLOCK) * MIN_BLOCK for size in (nbytes, low, high))
    return shown - least, most - shown


def describe(tensor: torch.Tensor) -> str:
    """``bfloat16[4, 1024, 768]``: dtype and shape as the trace names a tensor."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
