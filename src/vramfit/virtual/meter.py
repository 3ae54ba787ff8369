"""The meter of the virtual GPU: storages of fake tensors, what kernels need, and how far sizes are in doubt."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from vramfit.allocator import OutOfMemory
from vramfit.allocator.core import MIN_BLOCK
from vramfit.capture.storages import LifetimePeaks, StorageMeter, StorageRecord
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import CardLimit, Category, DeadMemory, Estimate, EventKind, TraceBuilder
from vramfit.trace.outcome import GARBAGE_BYTES, GARBAGE_COLLECTED
from vramfit.virtual.data_dependent.assume import Extent, Numbers, Resting, bounds
from vramfit.virtual.data_dependent.expectations import NOTHING, Expectation, is_whole
from vramfit.virtual.machine import Machine
from vramfit.virtual.noted import Noted
from vramfit.virtual.op_call import EMPTY_CACHE, Alternatives, Spare
from vramfit.virtual.tensor_subclasses import parts

_ALLOC = int(EventKind.ALLOC)
_BEYOND = 64
"""A card's limit is lifted by this part of what was needed, so that garbage is not collected for every request."""

_PLACING = 3
"""Frames above `Meter.place` that are the mode's for certain: they need not be looked at when a stack is told."""


class VirtualRecord(StorageRecord):
    """The record of one storage on a virtual card."""

    __slots__ = ("above", "below", "expected", "extents", "shape")

    extents: tuple[Extent, ...]  # assumed sizes on which it rests
    shape: tuple[int, ...]  # of the tensor that it was made for, where it rests on any
    below: int  # bytes by which it may be smaller
    above: int  # bytes by which it may be larger
    expected: Expectation | None


@dataclass(slots=True)
class DoubtedPeaks(LifetimePeaks):
    """Highest figures of a device since the start, and how uncertain they are.

    Attributes:
        lowest: the highest sum of the least bytes that each allocation could be.
        highest: the highest sum of the most bytes that each could be.
        doubted: the op whose uncertain size was the last to count in `highest`.
    """

    lowest: int = 0
    highest: int = 0
    doubted: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A block that a kernel needs while it runs.

    Attributes:
        address: where it lies.
        row: of its request in the trace.
        size: bytes asked for.
        below, above: bytes by which it may be smaller and larger than `size`.
        spare: the kernel does without the block where it does not fit.
    """

    address: int
    row: int
    size: int
    below: int
    above: int
    spare: bool


@dataclass(slots=True)
class Doubt:
    """Bytes by which the sum allocated on a device now may be lower, and higher, than the figure given."""

    below: int = 0
    above: int = 0
    op: str = ""


class Meter(StorageMeter[VirtualRecord]):
    """Places the storages of fake tensors. See NOTE [How a storage is followed] in capture/storages.py."""

    machine: Machine

    def __init__(self, machine: Machine, builder: TraceBuilder) -> None:
        super().__init__(machine, builder)
        self._peaks: defaultdict[int, DoubtedPeaks] = defaultdict(DoubtedPeaks)
        self._doubts: defaultdict[int, Doubt] = defaultdict(Doubt)
        self.assuming = False  # whether any size rests on an assumption so far
        self.numbers = Numbers()
        self.assumed_sizes: set[int] = set()  # as the program sees them
        self.estimates: list[Estimate] = []
        self._kinds: dict[tuple[object, ...], int] = {}  # of estimates
        self._on_host: Noted[Expectation] = Noted()
        self._sparing = False  # whether a kernel asks that can do without

    # -- storages ------------------------------------------------------------------------------------------------

    def adopt(
        self, tensor: torch.Tensor, op: str, category: int | None = None, extents: tuple[Extent, ...] = ()
    ) -> None:
        """Place the storage of a fake ``cuda`` tensor if it is new, or follow its change of size.

        Args:
            tensor: the tensor.
            op: the name of the op that made it.
            category: what it is for; None takes that from the phase of the program.
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
        record = VirtualRecord(storage, self._dead.append)
        record.key = key
        record.device = tensor.device.index or 0
        record.nbytes = storage.nbytes()
        record.graph = torch.is_grad_enabled()
        record.used = self.passes
        record.module = None
        record.expected = None
        # A program that catches the error may drop the storage before this record.
        record.address, record.row = 0, -1
        self._rest(record, tensor, extents, op)
        try:
            self._place(record, op, category, tensor)
        except torch.OutOfMemoryError:
            self.narrow(record.device, record.below, record.above)
            record.below = record.above = 0
            raise
        self._note_estimate(record, op)
        self._records[key] = record

    repeats = True
    """Whether what is placed again may go through `place`, which calls neither `malloc` nor `adopt`."""

    def place(
        self,
        tensor: torch.Tensor,
        nbytes: int,
        device: int,
        name: str,
        op: int,
        described: int,
        category: int | None,
    ) -> None:
        """`adopt` for a fresh tensor like one that was placed before, whose size rests on nothing assumed.

        `op` and `described` are indices in the trace: of the op's `name`, and of the tensor's dtype and shape.

        Raises:
            torch.OutOfMemoryError: as `adopt`.
        """
        if self._dead:
            self.collect()
        storage, phases = tensor.untyped_storage(), self.phases
        record = VirtualRecord(storage, self._dead.append)
        record.key = storage._cdata
        record.device = device
        record.nbytes = nbytes
        record.graph = torch.is_grad_enabled()
        record.used = self.passes
        record.module = record.expected = None
        record.extents = record.shape = ()
        record.below = record.above = 0
        record.address, record.row = 0, -1
        record.phase = phases.index
        record.category = kind = self._category_now() if category is None else category
        if nbytes:
            machine = self.machine
            stream = machine.current_stream(device)
            with self.lock:
                allocator = machine.devices[device].allocator
                try:
                    address = allocator.malloc(nbytes, stream)
                except OutOfMemory as error:
                    served = self._served_after_all(device, nbytes, stream)
                    if served is None:
                        raise self._out_of_memory(error, device, nbytes, name) from None
                    address = served
                self._note_peaks(device)
                record.address = address
                record.row = self.builder.add(
                    _ALLOC,
                    device,
                    stream,
                    address,
                    nbytes,
                    allocator.block_size(address),
                    int(machine.clock.now_us),
                    kind,
                    op,
                    self.stacks.current(self._backward_stack, _PLACING),
                    self.modules.current(),
                    phases.index,
                    described,
                )
        self._records[record.key] = record

    def _served_after_all(self, device: int, nbytes: int, stream: int) -> int | None:
        """With `CardLimit.COLLECTED`: collect garbage, and lift the limit a little where that is not enough."""
        machine = self.machine
        if machine.limit is not CardLimit.COLLECTED or self._sparing:
            return None
        card = machine.devices[device]
        before = card.allocator.allocated_bytes
        gc.collect()
        self.collect()
        meta, freed = self.builder.meta, before - card.allocator.allocated_bytes
        meta[GARBAGE_BYTES] = max(freed, int(meta.get(GARBAGE_BYTES, 0)))
        meta[GARBAGE_COLLECTED] = int(meta.get(GARBAGE_COLLECTED, 0)) + 1
        try:
            return card.allocator.malloc(nbytes, stream)
        except OutOfMemory as error:
            lacking = card.driver.process_bytes + error.segment_bytes
            card.driver.ceiling = lacking + lacking // _BEYOND
            return card.allocator.malloc(nbytes, stream)

    def _dead_memory(self, device: int) -> DeadMemory | None:
        """As of every meter, where a program runs out: not where a kernel goes on without the memory."""
        return None if self._sparing else super()._dead_memory(device)

    def _rest(
        self, record: VirtualRecord, tensor: torch.Tensor | None, extents: tuple[Extent, ...], op: str
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

    def _note_estimate(self, record: VirtualRecord, op: str) -> None:
        """Note the request of a storage that rests on assumed sizes; even an empty one may turn out to take a block."""
        if record.below or record.above:
            kind = (op, record.nbytes, record.below, record.above)
            self._estimate(record.row, record.device, record.below, record.above, kind)

    def in_doubt(self, tensor: torch.Tensor, below: int, above: int, op: str) -> None:
        """Note that the size of a kept tensor is an estimate: it may be `below` bytes smaller or `above` larger."""
        record = self.record_of(tensor)
        assert record is not None
        record.below, record.above = below, above
        self.widen(record.device, below, above, op)
        self.note_doubt(record.device)
        self._note_estimate(record, op)

    def resized(self, tensor_or_storage: torch.UntypedStorage, op: str) -> None:
        """Follow a storage whose size was changed from outside the dispatcher (``storage.resize_``)."""
        self.collect()
        record = self._records.get(tensor_or_storage._cdata)
        if record is not None and record.nbytes != tensor_or_storage.nbytes():
            self._resize(record, tensor_or_storage.nbytes(), op, None, ())

    def _resize(
        self,
        record: VirtualRecord,
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
        self._place(record, op, self._category_again(record, row), tensor)
        self._note_estimate(record, op)
        if old_address:
            self.free(old_address, old_device)
        self.narrow(old_device, below, above)

    def _release(self, record: VirtualRecord) -> None:
        if record.below or record.above:
            self.narrow(record.device, record.below, record.above)
        super()._release(record)

    def _inside(self, tensor: torch.Tensor) -> Iterable[torch.Tensor] | None:
        return None if type(tensor) is FakeTensor else parts(tensor)

    # -- raw blocks ----------------------------------------------------------------------------------------------

    def temporary(
        self,
        sizes: Iterable[int],
        device: int,
        op: str,
        scale: tuple[float, float] = (1.0, 1.0),
        *,
        category: Category = Category.TEMPORARIES,
    ) -> list[Held]:
        """Take blocks that a kernel needs while it runs; `give_back` returns them.

        Args:
            sizes: bytes of each; a negative entry -n gives back the n-th block taken; see `kernels.Extras` for the
                other entries.
            device: index of the card.
            op: what needs them.
            scale: least and most that each may be, as multiples of its size.
            category: what they are for.

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
                    taken.append(self._hold(size, device, op, scale, category))
        except torch.OutOfMemoryError:
            # A program that catches the error goes on without them.
            self.give_back(filter(None, taken), device)
            raise
        return [held for held in taken if held is not None]

    def _hold(
        self,
        size: int,
        device: int,
        op: str,
        scale: tuple[float, float],
        category: Category = Category.TEMPORARIES,
    ) -> Held | None:
        """Take one block; None for an empty one, and for a `Spare` that does not fit: its kernel does without."""
        if isinstance(size, Alternatives):
            return self._hold_one_of(size, device, op, scale)
        nbytes = int(size)  # figures are plain numbers
        below, above = _apart(nbytes, int(nbytes * scale[0]), int(nbytes * scale[1]))
        if below or above:
            self.widen(device, below, above, op)
        spare = self._sparing = isinstance(size, Spare)
        try:
            address, row = self.malloc(nbytes, device, op=op, category=category)
        except torch.OutOfMemoryError:
            self.narrow(device, below, above)
            if spare:
                return None
            raise
        finally:
            self._sparing = False
        if below or above:
            self._estimate(row, device, below, above, (op, nbytes, below, above), spare=spare)
        return Held(address, row, nbytes, below, above, spare) if address else None

    def _hold_one_of(
        self, size: Alternatives, device: int, op: str, scale: tuple[float, float]
    ) -> Held | None:
        """Take the first that fits; None for one that takes nothing, and where none fits."""
        failed = set()
        for one in size.tries():
            if one in failed:
                continue
            held = self._hold(Spare(one), device, op, scale) if one else None
            if held is not None or not one:
                return held
            failed.add(one)
        return None

    def estimate(
        self,
        held: Iterable[Held],
        device: int,
        error: tuple[int, int],
        op: str,
        part: int = 0,
        choice: str = "",
    ) -> None:
        """Note that the sum of a kernel's blocks is an estimate; the trace is where a further block would be taken.

        The estimate is noted at the block of a library's choice, which its kernel can spare, else at the largest one;
        where there is none, the kernel may take one all the same.

        Args:
            held: its blocks.
            device: index of the card.
            error: bytes by which their sum may be lower, and higher.
            op: what needs them.
            part: for which of its results.
            choice: what decides it together with others, which are then off the same way; empty for none.
        """
        below, above = error
        block = max(held, key=lambda block: (block.spare, block.size), default=None)
        if block is None:
            self._estimate(-1, device, 0, above, (op, part, above, choice), spare=True, choice=choice)
        else:
            below = min(below, block.size)
            kind = (op, part, block.size, below, above, choice)
            self._estimate(block.row, device, below, above, kind, spare=block.spare, choice=choice)

    def _estimate(
        self,
        row: int,
        device: int,
        below: int,
        above: int,
        kind: tuple[object, ...],
        *,
        spare: bool = False,
        choice: str = "",
    ) -> None:
        """Note a request as an estimate, or, for row -1, one that was not made and may turn out to be."""
        number = self._kinds.setdefault(kind, len(self._kinds))
        if row >= 0:
            self.estimates.append(Estimate(row, device, below, above, number, spare, choice=choice))
        elif above:
            row = len(self.builder)
            self.estimates.append(Estimate(row, device, 0, above, number, spare, taken=False, choice=choice))

    def give_back(self, held: Iterable[Held], device: int) -> None:
        """Return blocks that a kernel needed."""
        for block in held:
            self.free(block.address, device)
            self.narrow(device, block.below, block.above)

    def lifetime_peaks(self, device: int) -> DoubtedPeaks:
        """Highest figures of a device since the start."""
        return self._peaks[device]

    def _note_peaks(self, device: int) -> None:
        peaks, doubt = self._peaks[device], self._doubts[device]
        allocated, active, reserved = self.machine.devices[device].allocator.figures()
        if allocated > peaks.allocated:
            peaks.allocated = allocated
        if active > peaks.active:
            peaks.active = active
        if reserved > peaks.reserved:
            peaks.reserved = reserved
        if allocated - doubt.below > peaks.lowest:
            peaks.lowest = allocated - doubt.below
        if allocated + doubt.above > peaks.highest:
            peaks.highest = allocated + doubt.above
            peaks.doubted = doubt.op if doubt.above else ""

    def widen(self, device: int, below: int, above: int, op: str) -> None:
        """Note that, by an op's size, the sum allocated from now on may be `below` bytes lower or `above` higher.

        `narrow` ends that.
        """
        doubt = self._doubts[device]
        doubt.below += below
        doubt.above += above
        doubt.op = op

    def narrow(self, device: int, below: int, above: int) -> None:
        """End an uncertainty that `widen` noted."""
        doubt = self._doubts[device]
        doubt.below -= below
        doubt.above -= above

    def note_doubt(self, device: int) -> None:
        """Let the present uncertainty count in the peaks, even if nothing was allocated since it arose."""
        self._note_peaks(device)

    def error_bar(self, device: int) -> tuple[int, int]:
        """Bytes by which the peak of allocated memory may be lower, and higher, than the figure given."""
        peaks = self._peaks[device]
        return peaks.allocated - peaks.lowest, peaks.highest - peaks.allocated

    def expected(self, tensor: torch.Tensor) -> Expectation:
        """What is expected of the values of a fake tensor."""
        record = self.record_of(tensor)
        found = self._on_host.find(tensor) if record is None else record.expected
        if found is None:
            return NOTHING
        if found.columns and tensor.dim() == 1 and tensor.shape[0] and found.constant is None:
            column, within = divmod(int(tensor.storage_offset()), tensor.shape[0])
            if not within and tensor.stride(0) == 1 and column < len(found.columns):
                return Expectation(values=max(1, found.columns[column]))
        if found.most is not None and 0 in tensor.stride():
            found = replace(found, most=None)  # its elements are there more often than once
        if found.constant is None and (found.exact or found.total is not None) and not is_whole(tensor):
            return replace(found, exact=False, total=None)
        return found

    def expect(self, tensor: torch.Tensor, expected: Expectation | None) -> None:
        """Note what is expected of the values of a fake tensor."""
        record = self.record_of(tensor)
        if record is not None:
            record.expected = expected
        elif expected is None:
            self._on_host.forget(tensor)
        elif type(tensor) is FakeTensor and tensor.fake_device.type == "cpu":
            self._on_host.set(tensor, expected)

    def extents_of(self, tensor: torch.Tensor) -> tuple[Extent, ...]:
        """The assumed sizes on which a tensor rests, as its own shape shows them."""
        record = self.record_of(tensor)
        if record is None or not record.extents:
            return ()
        if tensor.shape == record.shape:
            return record.extents
        return Resting(record.extents, frozenset(record.shape)).of(tensor.shape)

    def note_count(self, extent: Extent) -> None:
        """Remember a guessed count, which the program may read and use as a size."""
        self.assuming |= self.numbers.assume(extent, count=True)


def _apart(nbytes: int, low: int, high: int) -> tuple[int, int]:
    """Bytes by which a block may be smaller and larger, in steps in which the allocator hands them out."""
    shown, least, most = (-(-size // MIN_BLOCK) * MIN_BLOCK for size in (nbytes, low, high))
    return shown - least, most - shown
