"""Who holds the bytes: groups of blocks that are alike, and the tree of modules with repeated layers folded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from vramfit.analysis._lifetimes import Flags, Ints, Lifetimes, born_column
from vramfit.trace import Category, Frame, MemoryTrace
from vramfit.trace.frames import Origin, innermost, user_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNode:
    """A module with everything below it.

    Attributes:
        name: the last part of the path; ``*`` for repeated layers that were folded.
        path: the dotted path from the root module's class; empty for the node above all roots.
        own_bytes: bytes of blocks that belong to this very module.
        total_bytes: own bytes and those of all children.
        categories: the total by category, without zeros.
        children: sorted by total, largest first.
        count: how many modules this node stands for; their bytes are summed.
    """

    name: str
    path: str
    own_bytes: int
    total_bytes: int
    categories: Mapping[Category, int]
    children: tuple[ModuleNode, ...] = ()
    count: int = 1


class _Draft:
    """A node while the tree is being built."""

    def __init__(self) -> None:
        self.own: dict[Category, int] = {}
        self.children: dict[str, _Draft] = {}


def module_tree(amounts: Iterable[tuple[str, Category, int]]) -> ModuleNode:
    """Build the tree from (dotted path, category, bytes); an empty path is what no module owns.

    Returns:
        The node above all root modules; its own bytes are those without a module.
    """
    root = _Draft()
    for path, category, amount in amounts:
        draft = root
        for part in path.split(".") if path else ():
            draft = draft.children.setdefault(part, _Draft())
        draft.own[category] = draft.own.get(category, 0) + amount
    return _finished("", "", root)


def _finished(name: str, path: str, draft: _Draft) -> ModuleNode:
    children = [
        _finished(part, f"{path}.{part}" if path else part, child) for part, child in draft.children.items()
    ]
    return _node(name, path, draft.own, children)


def _node(
    name: str, path: str, own: Mapping[Category, int], children: Iterable[ModuleNode], count: int = 1
) -> ModuleNode:
    """Total what belongs to the node and to its children."""
    ordered = tuple(sorted(children, key=lambda child: (-child.total_bytes, child.name)))
    totals = dict(own)
    for child in ordered:
        for category, amount in child.categories.items():
            totals[category] = totals.get(category, 0) + amount
    return ModuleNode(
        name=name,
        path=path,
        own_bytes=sum(own.values()),
        total_bytes=sum(totals.values()),
        categories={category: totals[category] for category in sorted(totals) if totals[category]},
        children=ordered,
        count=count,
    )


def fold_layers(node: ModuleNode) -> ModuleNode:
    """Join numbered siblings of like structure (``h.0`` ... ``h.11``) into one node ``*`` with their sum.

    Numbered children are alike when they have a child name in common; numbered leaves (an ``nn.Sequential``
    of different layers) stay apart, for nothing says that they are the same kind of layer.
    """
    numbered = [child for child in node.children if child.name.isdigit()]
    names = [{grandchild.name for grandchild in child.children} for child in numbered]
    if len(numbered) >= 2 and set.intersection(*names):
        others = [child for child in node.children if not child.name.isdigit()]
        children = [*others, _joined("*", f"{node.path}.*", numbered, sum(child.count for child in numbered))]
    else:
        children = list(node.children)
    folded = [fold_layers(child) for child in children]
    return _node(node.name, node.path, _own_categories(node), folded, node.count)


def _joined(name: str, path: str, nodes: list[ModuleNode], count: int) -> ModuleNode:
    """One node in place of several, child by child."""
    by_name: dict[str, list[ModuleNode]] = {}
    for node in nodes:
        for child in node.children:
            by_name.setdefault(child.name, []).append(child)
    children = [
        _joined(child_name, f"{path}.{child_name}", alike, sum(child.count for child in alike))
        for child_name, alike in by_name.items()
    ]
    own: dict[Category, int] = {}
    for node in nodes:
        for category, amount in _own_categories(node).items():
            own[category] = own.get(category, 0) + amount
    return _node(name, path, own, children, count)


def _own_categories(node: ModuleNode) -> dict[Category, int]:
    """What remains of a node's total without its children."""
    own = dict(node.categories)
    for child in node.children:
        for category, amount in child.categories.items():
            own[category] -= amount
    return {category: amount for category, amount in own.items() if amount}


def fold_path(path: str) -> str:
    """A module's path with its layer numbers replaced by ``*``: ``GPT2.h.*.attn``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


Lines = tuple[Frame | None, Frame | None]
_Seen = TypeVar("_Seen", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Blocks of the same shape, made by the same op on the same line for like modules.

    Attributes:
        tensor: dtype and shape, ``"bfloat16[4, 1024, 768]"``; empty for a block that is no tensor or unknown.
        op: the operator that made it.
        module: dotted path with layer numbers replaced by ``*``.
        line: the user's line that made it.
        library_line: the innermost line outside torch, where that is in another package than the user's.
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
        lines, line_of = _distinct(lives.stack[blocks], lambda stack: lines_of(stack_frames(trace, stack)))
        modules, module_of = _distinct(
            born_column(trace.module, born), lambda module: fold_path(entry(trace.modules, module))
        )
        keys = np.stack(
            [
                born_column(trace.tensor, born),
                born_column(trace.op, born),
                lives.category[blocks],
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


def lines_of(frames: Sequence[Frame]) -> Lines:
    """The user's line, and the innermost one outside torch where that is in another package."""
    line, library = user_frame(frames), innermost(frames, Origin.LIBRARY)
    return line, library if library != line else None


def _distinct(column: Ints, seen: Callable[[int], _Seen]) -> tuple[list[_Seen], Ints]:
    """What a reader sees of the values of a column, each once, and for each element its index among these."""
    used, inverse = np.unique(column, return_inverse=True)
    index: dict[_Seen, int] = {}
    of_used = [index.setdefault(seen(value), len(index)) for value in used.tolist()]
    return list(index), np.array(of_used, dtype=np.int64)[inverse]
