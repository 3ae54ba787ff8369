"""Groups of like blocks: same tensor, operator, category, layer and source line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vramfit.analysis._curves import block_categories
from vramfit.analysis._lifetimes import Flags, Ints, Lifetimes
from vramfit.analysis._module_tree import fold_path
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.trace.frames import Origin, innermost, user_frame

Lines = tuple[Frame | None, Frame | None]


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
class Grouping:
    """Which of some blocks are alike.

    Attributes:
        trace: where they come from.
        blocks: indices into the device's `Lifetimes`.
        keys: array of shape [6, len(blocks)]: what makes blocks alike, one column for each block.
        modules: folded paths that the keys refer to.
        lines: source lines that the keys refer to.
    """

    trace: MemoryTrace
    blocks: Ints
    keys: Ints
    modules: Sequence[str]
    lines: Sequence[Lines]

    @staticmethod
    def of(trace: MemoryTrace, lives: Lifetimes, blocks: Ints) -> Grouping:
        """Group the given blocks of a device by all that a reader would see of them."""
        born = lives.born[blocks]
        lines, line_of = _lines(trace, born_column(trace.stack, born))
        modules, module_of = _folded_modules(trace, born_column(trace.module, born))
        keys = np.stack(
            [
                born_column(trace.tensor, born),
                born_column(trace.op, born),
                block_categories(trace, lives)[blocks],
                module_of,
                line_of,
                lives.block[blocks],
            ]
        )
        return Grouping(trace=trace, blocks=blocks, keys=keys, modules=modules, lines=lines)

    def groups(self, chosen: Flags | None = None) -> list[TensorGroup]:
        """The groups, largest total first.

        Args:
            chosen: which of the blocks to count; None means all.
        """
        return [group for group, _ in self.with_members(chosen)]

    def with_members(self, chosen: Flags | None = None) -> list[tuple[TensorGroup, Ints]]:
        """The groups, largest total first, each with the key that its blocks share.

        Args:
            chosen: which of the blocks to count; None means all.
        """
        keys = self.keys if chosen is None else self.keys[:, chosen]
        if not keys.shape[1]:
            return []
        keys = keys[:, np.lexsort(keys)]
        starts = np.flatnonzero(np.concatenate([[True], (keys[:, 1:] != keys[:, :-1]).any(axis=0)]))
        counts = np.diff(np.append(starts, keys.shape[1])).tolist()
        found = [(self._group(key, count), key) for key, count in zip(keys[:, starts].T, counts, strict=True)]
        found.sort(key=lambda one: _order(one[0]))
        return found

    def alike(self, key: Ints) -> Flags:
        """Which of the blocks have this key."""
        same: Flags = (self.keys == key[:, np.newaxis]).all(axis=0)
        return same

    def _group(self, key: Ints, count: int) -> TensorGroup:
        tensor, op, kind, module, line, size = key.tolist()
        return TensorGroup(
            tensor=entry(self.trace.tensors, tensor),
            op=entry(self.trace.ops, op),
            category=Category(kind),
            module=self.modules[module],
            line=self.lines[line][0],
            library_line=self.lines[line][1],
            block_bytes=size,
            count=count,
            total_bytes=size * count,
        )


def _order(group: TensorGroup) -> tuple[int, int, str, str, str]:
    return (-group.total_bytes, -group.block_bytes, group.tensor, group.op, group.module)


def stack_frames(trace: MemoryTrace, stack: int) -> tuple[Frame, ...]:
    """The frames of a stack of the trace's table, innermost first; empty for -1."""
    if stack < 0:
        return ()
    return tuple(trace.frames[frame] for frame in trace.stacks[stack])


def entry(table: Sequence[str], index: int) -> str:
    """An entry of a trace's table; empty for -1."""
    return table[index] if index >= 0 else ""


def born_column(column: NDArray[np.int32], born: Ints) -> Ints:
    """A metadata column at the rows of allocation; -1 for blocks from before the trace."""
    if not len(column):
        return np.full(len(born), -1, dtype=np.int64)
    return np.where(born >= 0, column[born], -1).astype(np.int64)


def _lines(trace: MemoryTrace, stack: Ints) -> tuple[list[Lines], Ints]:
    """The distinct (user's line, library's line) of the stacks, and each stack's index among them."""
    used, inverse = np.unique(stack, return_inverse=True)
    index: dict[Lines, int] = {}
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
    of_used = [index.setdefault(fold_path(entry(trace.modules, one)), len(index)) for one in used.tolist()]
    return list(index), np.array(of_used, dtype=np.int64)[inverse]
