"""The shapes of the tensors among a call's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

_MOST = 8
"""Tensors of a first call whose shapes are kept."""


def shapes_of(tree: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes of the first tensors in lists, tuples and mappings."""
    return tuple(tuple(tensor.shape) for tensor in islice(_tensors(tree), _MOST))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _tensors(item)
