"""MemoryTrace, the record of what happened to memory: one column per property, and what its numbers mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from vramfit.units import counted
from vramfit.writing import StrPath

Segment: TypeAlias = Mapping[str, Any]
"""One segment as ``torch.cuda.memory._snapshot()["segments"]`` holds it."""


class EventKind(IntEnum):
    """The kind of an event; the numbers are those of the file format and never change.

    All below MARKER are actions of torch traces (c10/cuda/CUDACachingAllocator.h, ``TraceEntry::Action``).
    """

    ALLOC = 0
    """A block was handed out: ``size`` is what was asked for, ``block`` what it takes."""
    FREE_REQUESTED = 1
    """The program gave a block back; it no longer counts as allocated."""
    FREE_COMPLETED = 2
    """The block can be reused: every stream that used it has got past it."""
    SEGMENT_ALLOC = 3
    """cudaMalloc."""
    SEGMENT_FREE = 4
    """cudaFree."""
    SEGMENT_MAP = 5
    """Pages of an expandable segment were mapped."""
    SEGMENT_UNMAP = 6
    """Pages of an expandable segment were unmapped."""
    SNAPSHOT = 7
    """torch took a snapshot here; ``size`` is the active bytes at that moment."""
    OOM = 8
    """A request of ``size`` bytes failed; the address column holds the free bytes of the device."""
    MARKER = 9
    """Nothing happened to memory: a point in time. With an ``op`` a mark of that name; without, the beginning of a
    phase, or of one more call of an outermost module in it, whose path is in ``module``."""
    RECATEGORIZED = 10
    """Nothing happened to memory: from here on a block counts as another category. All columns are those of its ALLOC,
    but the category, the time and the phase."""


class Category(IntEnum):
    """What a block is for; the numbers are those of the file format and never change."""

    OTHER = 0
    PARAMETERS = 1
    GRADIENTS = 2
    OPTIMIZER_STATE = 3
    ACTIVATIONS = 4
    INPUTS = 5
    TEMPORARIES = 6
    WORKSPACES = 7
    COMMUNICATION_BUFFERS = 8
    """What collectives read and write beside the tensors of a program: DDP's buckets, what FSDP gathers into and
    reduces from, what stages of a pipeline receive into."""
    UNSHARDED_PARAMETERS = 9
    """Parameters that FSDP has gathered, with which modules compute."""
    PREFETCH = 10
    """What was gathered ahead of its use, until it is used."""


class Frame(NamedTuple):
    """One frame of a Python stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceDevice:
    """A device of a trace, and what its allocator held when the trace ended.

    Attributes:
        index: device index as the events name it.
        name: name of the card, empty if the source does not say.
        total_bytes: memory of the card as CUDA reports it, 0 if unknown.
        context_bytes: memory taken outside the allocator by the CUDA context, 0 if unknown.
        segments: the segments at the end of the trace, as torch's snapshots hold them.
    """

    index: int
    name: str = ""
    total_bytes: int = 0
    context_bytes: int = 0
    segments: Sequence[Segment] = ()


# -- The trace ----------------------------------------------------------------------------------------------


COLUMNS: Mapping[str, DTypeLike] = MappingProxyType(
    {
        "kind": np.uint8,
        "device": np.int16,
        "stream": np.int64,
        "address": np.uint64,
        "size": np.int64,
        "block": np.int64,
        "time_us": np.int64,
        "category": np.uint8,
        "op": np.int32,
        "stack": np.int32,
        "module": np.int32,
        "phase": np.int32,
        "tensor": np.int32,
    }
)
"""Name and type of every column, in the order of the file format."""

TEARDOWN = "teardown"
"""The phase of what a program frees when it has done its work."""

TABLES: Mapping[str, str] = MappingProxyType(
    {"op": "ops", "stack": "stacks", "module": "modules", "phase": "phases", "tensor": "tensors"}
)
"""Column -> the table that it indexes."""


_WITHOUT_OTHERS = frozenset({"virtual", "cpu"})
"""Sources whose devices hold nothing that the trace does not name: 0 bytes outside torch are known to be 0."""


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True, eq=False)
class MemoryTrace:
    """An ordered record of allocations and frees. Columns have one element per event and are read-only.

    >>> with vramfit.track(device="cpu") as track:
    ...     batch = torch.ones(1024, 1024)
    >>> trace = track.trace
    >>> trace.ops, trace.tensors
    (('aten.ones.default',), ('float32[1024, 1024]',))
    >>> trace.size[trace.kind == vramfit.trace.EventKind.ALLOC]
    array([4194304])

    Attributes:
        kind: `EventKind` of the event.
        device: index of the device it happened on.
        stream: id of the CUDA stream; 0 is the default stream.
        address: where the block or segment lies.
        size: bytes that were asked for; for segments the bytes of the segment or of the pages.
        block: bytes of the block with its rounding and slack; 0 where it is not known.
        time_us: microseconds on the source's own clock; 0 where it is not known.
        category: `Category`; like op, stack, module and tensor it is meant for ALLOC and RECATEGORIZED events.
        op, stack, module, phase, tensor: index into the table of the plural name, -1 for none. ``phase`` is
            set on every event.
        ops: operators, such as ``aten.addmm.default``.
        modules: dotted paths below the class of the root module: ``GPT2LMHeadModel.transformer.h.0.attn``.
        phases: names such as ``step 1/forward``, steps counted from 1; `TEARDOWN` for what a program frees at its end.
        tensors: dtype and shape: ``bfloat16[4, 1024, 768]``.
        frames: all distinct stack frames.
        stacks: each a tuple of indices into ``frames``, innermost first.
        devices: the devices, with their final segments.
        meta: where the trace comes from: ``torch_version``, ``alloc_conf``, ``source``, ``program``.

    Raises:
        ValueError: columns differ in length.
    """

    kind: NDArray[np.uint8]
    device: NDArray[np.int16]
    stream: NDArray[np.int64]
    address: NDArray[np.uint64]
    size: NDArray[np.int64]
    block: NDArray[np.int64]
    time_us: NDArray[np.int64]
    category: NDArray[np.uint8]
    op: NDArray[np.int32]
    stack: NDArray[np.int32]
    module: NDArray[np.int32]
    phase: NDArray[np.int32]
    tensor: NDArray[np.int32]
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()
    devices: tuple[TraceDevice, ...] = ()
    meta: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give every column its type and make it read-only."""
        length = len(self.kind)
        for name, dtype in COLUMNS.items():
            column = np.ascontiguousarray(getattr(self, name), dtype=dtype).view()
            if column.shape != (length,):
                raise ValueError(f"column {name} has shape {column.shape}, not ({length},)")
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __repr__(self) -> str:
        where = ", ".join(device.name or f"GPU {device.index}" for device in self.devices)
        return f"<MemoryTrace: {counted(len(self), 'event')}{f' on {where}' if where else ''}>"

    def __len__(self) -> int:
        """Number of events."""
        return len(self.kind)

    @property
    def known_devices(self) -> tuple[int, ...]:
        """Indices of the devices that the trace is of, used or not.

        A device counts where it has events about memory or segments, and where it has a name: the program could have
        used it. Of the others torch's snapshots list all that the machine has.
        """
        about = (self.kind != EventKind.MARKER) & (self.kind != EventKind.SNAPSHOT)
        named = {device.index for device in self.devices if device.name or device.segments}
        return tuple(sorted(named | set(np.unique(self.device[about]).tolist())))

    def is_state(self, device: int) -> bool:
        """Whether all that is known of a device is what it held when its snapshot was dumped: nothing was recorded."""
        held = any(found.index == device and found.segments for found in self.devices)
        about = (self.kind != EventKind.MARKER) & (self.kind != EventKind.SNAPSHOT)
        return held and not bool((about & (self.device == device)).any())

    def outside_bytes(self, device: int) -> int | None:
        """Memory of a device outside torch's allocator; None where the trace does not give it."""
        described = next((found for found in self.devices if found.index == device), None)
        known = 0 if described is None else described.context_bytes
        return known if known or self.meta.get("source") in _WITHOUT_OTHERS else None

    def equals(self, other: object) -> bool:
        """Whether both hold the same events, tables, devices and meta, element by element."""
        if not isinstance(other, MemoryTrace) or len(self) != len(other):
            return False
        if not all(np.array_equal(getattr(self, name), getattr(other, name)) for name in COLUMNS):
            return False
        tables = (*TABLES.values(), "frames")
        return (
            all(getattr(self, name) == getattr(other, name) for name in tables)
            and dict(self.meta) == dict(other.meta)
            and len(self.devices) == len(other.devices)
            and all(map(_same_device, self.devices, other.devices))
        )

    def for_device(self, index: int) -> MemoryTrace:
        """The events of one device; the tables are kept whole, so that indices stay valid."""
        rows = np.flatnonzero(self.device == index)
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        return replace(self, **columns, devices=tuple(d for d in self.devices if d.index == index))

    def save(self, path: StrPath) -> None:
        """Write the trace to a file (``.vft`` by custom): beside it first, then renamed into place.

        Raises:
            UsageError: the ending is that of another form, such as ``.json``; `vramfit export` writes those.
            WriteError: no space, no permission, no such folder; nothing half-written is left.
        """
        from vramfit.trace.fileformat import save_trace

        save_trace(self, path)

    @staticmethod
    def load(path: StrPath) -> MemoryTrace:
        """Read a file that `save` wrote.

        Raises:
            TraceFormatError: not such a file, damaged, or of a newer version.
        """
        from vramfit.trace.fileformat import load_trace

        return load_trace(path)


def _same_device(one: TraceDevice, two: TraceDevice) -> bool:
    figures = ("index", "name", "total_bytes", "context_bytes")
    return all(getattr(one, name) == getattr(two, name) for name in figures) and list(one.segments) == list(
        two.segments
    )
