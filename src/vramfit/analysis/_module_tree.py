"""Bytes by module: the tree of dotted paths with nested totals, and its folding of repeated layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vramfit.trace import Category


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
