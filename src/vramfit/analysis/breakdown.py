"""What is alive at one moment, usually the peak: by category, module and tensor, with the user's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramfit.analysis.curves import Curves, Measure, block_categories, curves
from vramfit.analysis.fragmentation import Fragmentation, fragmentation
from vramfit.analysis.lifetimes import Ints, Lifetimes, lifetimes
from vramfit.analysis.modules import ModuleNode, fold_path, module_tree
from vramfit.trace import Category, EventKind, Frame, MemoryTrace
from vramfit.trace.frames import Origin, innermost, user_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An event of a trace and what the program was doing then.

    Attributes:
        row: the event; values hold right after it. -1 is the state before the first event.
        time_us: its time.
        phase: name of the phase, empty if none.
        op: the operator, empty if unknown.
        line: the user's line.
    """

    row: int
    time_us: int
    phase: str
    op: str
    line: Frame | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Blocks of the same shape, made by the same op on the same line for like modules.

    Attributes:
        tensor: dtype and shape, ``"bfloat16[4, 1024, 768]"``; empty for a block that is no tensor or unknown.
        op: the operator that made it.
        category: what it is used for.
        module: dotted path with layer numbers replaced by ``*``.
        line: the user's line that made it.
        library_line: the innermost line outside torch, where that is in another package than the user's.
        block_bytes: bytes of one block.
        count: how many there are.
        total_bytes: bytes of all of them.
    """

    tensor: str
    op: str
    category: Category
    module: str
    line: Frame | None
    library_line: Frame | None
    block_bytes: int
    count: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """The allocated memory of one device at one moment. Bytes are those of blocks, as torch counts them.

    Attributes:
        device: index of the device.
        moment: when this is.
        allocated: bytes allocated; the sum of ``categories``, and the total of ``modules``.
        active: allocated, and given back but still awaited by a stream.
        categories: bytes by category; every category is present.
        modules: the tree of modules; the root's own bytes belong to no module.
        tensors: groups of like tensors, largest total first.
        tensors_omitted: groups that were left off, and their bytes: (count, bytes).
        fragmentation: how the reserved memory is used.
        slack: bytes of allocated blocks that nobody asked for.
    """

    device: int
    moment: Moment
    allocated: int
    active: int
    categories: Mapping[Category, int]
    modules: ModuleNode
    tensors: tuple[TensorGroup, ...]
    tensors_omitted: tuple[int, int]
    fragmentation: Fragmentation
    slack: int

    @property
    def reserved(self) -> int:
        """Bytes held from the driver at that moment."""
        return self.fragmentation.reserved


def peak(
    trace: MemoryTrace, device: int = 0, *, by: Measure = Measure.ALLOCATED, tensors: int = 100
) -> Breakdown:
    """The breakdown at the moment when ``by`` was highest.

    Where it was equally high several times, the moment with the most allocated bytes among them, the first
    of those.

    Args:
        trace: what happened.
        device: index of the device.
        by: which figure has its peak there.
        tensors: keep at most so many groups of tensors.
    """
    lives = lifetimes(trace, device)
    bytes_over = curves(trace, lives)
    return at(trace, peak_row(bytes_over, by), device, tensors=tensors, lives=lives)


def at(
    trace: MemoryTrace,
    row: int,
    device: int = 0,
    *,
    tensors: int = 100,
    lives: Lifetimes | None = None,
) -> Breakdown:
    """The breakdown right after event ``row``; -1 is before the first event.

    Raises:
        IndexError: the trace has no such event.
    """
    if not -1 <= row < len(trace):
        raise IndexError(f"the trace has no event {row}: it has {len(trace)}")
    lives = lives or lifetimes(trace, device)
    alive = lives.alive(row)
    category = block_categories(trace, lives)[alive]
    by_category = np.zeros(len(Category), dtype=np.int64)
    np.add.at(by_category, category, lives.block[alive])
    groups = _tensor_groups(trace, lives, alive, category)
    omitted = groups[tensors:]
    return Breakdown(
        device=device,
        moment=moment(trace, row),
        allocated=int(by_category.sum()),
        active=int(lives.block[lives.active(row)].sum()),
        categories={kind: int(by_category[kind]) for kind in Category},
        modules=_modules(trace, lives, alive, category),
        tensors=tuple(groups[:tensors]),
        tensors_omitted=(len(omitted), sum(group.total_bytes for group in omitted)),
        fragmentation=fragmentation(trace, lives, row),
        slack=int((lives.block[alive] - lives.size[alive]).sum()),
    )


def peak_row(bytes_over: Curves, by: Measure) -> int:
    """The event at which ``by`` is highest (see `peak`); -1 if it was never as high as before the first."""
    curve = bytes_over.of(by)
    if not len(curve) or int(curve.max()) < bytes_over.start[by]:
        return -1
    highest = np.flatnonzero(curve == curve.max())
    return int(highest[np.argmax(bytes_over.allocated[highest])])


def oom_row(trace: MemoryTrace, device: int) -> int | None:
    """The last event at which ``device`` ran out of memory, if it did."""
    rows = np.flatnonzero((trace.device == device) & (trace.kind == EventKind.OOM))
    return int(rows[-1]) if len(rows) else None


def moment(trace: MemoryTrace, row: int) -> Moment:
    """What the program was doing at event ``row``."""
    if row < 0:
        return Moment(row=-1, time_us=0, phase="", op="", line=None)
    return Moment(
        row=row,
        time_us=int(trace.time_us[row]),
        phase=_entry(trace.phases, int(trace.phase[row])),
        op=_entry(trace.ops, int(trace.op[row])),
        line=user_frame(stack_frames(trace, int(trace.stack[row]))),
    )


def stack_frames(trace: MemoryTrace, stack: int) -> tuple[Frame, ...]:
    """The frames of a stack of the trace's table, innermost first; empty for -1."""
    if stack < 0:
        return ()
    return tuple(trace.frames[frame] for frame in trace.stacks[stack])


def _entry(table: tuple[str, ...], index: int) -> str:
    return table[index] if index >= 0 else ""


def _born_column(column: NDArray[np.int32], born: Ints) -> Ints:
    """A metadata column at the rows of allocation; -1 for blocks from before the trace."""
    if not len(column):
        return np.full(len(born), -1, dtype=np.int64)
    return np.where(born >= 0, column[born], -1).astype(np.int64)


def _modules(trace: MemoryTrace, lives: Lifetimes, alive: Ints, category: Ints) -> ModuleNode:
    module = _born_column(trace.module, lives.born[alive])
    sums = np.zeros((len(trace.modules) + 1, len(Category)), dtype=np.int64)
    np.add.at(sums, (module + 1, category), lives.block[alive])
    return module_tree(
        (trace.modules[owner - 1] if owner else "", Category(kind), int(sums[owner, kind]))
        for owner, kind in np.argwhere(sums).tolist()
    )


def _tensor_groups(trace: MemoryTrace, lives: Lifetimes, alive: Ints, category: Ints) -> list[TensorGroup]:
    """Group the live blocks by all that a reader would see of them."""
    if not len(alive):
        return []
    born = lives.born[alive]
    lines, line_of = _lines(trace, _born_column(trace.stack, born))
    modules, module_of = _folded_modules(trace, _born_column(trace.module, born))
    block = lives.block[alive]
    keys = np.stack(
        [
            _born_column(trace.tensor, born),
            _born_column(trace.op, born),
            category,
            module_of,
            line_of,
            block,
        ]
    )
    order = np.lexsort(keys)
    keys = keys[:, order]
    starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
    counts = np.diff(np.append(starts, keys.shape[1]))
    groups = [
        TensorGroup(
            tensor=_entry(trace.tensors, tensor),
            op=_entry(trace.ops, op),
            category=Category(kind),
            module=modules[module],
            line=lines[line][0],
            library_line=lines[line][1],
            block_bytes=size,
            count=count,
            total_bytes=size * count,
        )
        for (tensor, op, kind, module, line, size), count in zip(
            keys[:, starts].T.tolist(), counts.tolist(), strict=True
        )
    ]
    groups.sort(
        key=lambda group: (-group.total_bytes, -group.block_bytes, group.tensor, group.op, group.module)
    )
    return groups


def _lines(trace: MemoryTrace, stack: Ints) -> tuple[list[tuple[Frame | None, Frame | None]], Ints]:
    """The distinct (user's line, library's line) of the stacks, and each stack's index among them."""
    used, inverse = np.unique(stack, return_inverse=True)
    index: dict[tuple[Frame | None, Frame | None], int] = {}
    of_used = []
    for one in used.tolist():
        frames = stack_frames(trace, one)
        line, library = user_frame(frames), innermost(frames, Origin.LIBRARY)
        of_used.append(index.setdefault((line, library if library != line else None), len(index)))
    return list(index), np.array(of_used, dtype=np.int64)[inverse]


def _folded_modules(trace: MemoryTrace, module: Ints) -> tuple[list[str], Ints]:
    """The distinct folded paths of the modules, and each module's index among them."""
    used, inverse = np.unique(module, return_inverse=True)
    index: dict[str, int] = {}
    of_used = [index.setdefault(fold_path(_entry(trace.modules, one)), len(index)) for one in used.tolist()]
    return list(index), np.array(of_used, dtype=np.int64)[inverse]
