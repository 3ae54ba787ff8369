"""Key-value caches of transformers among the arguments of a block.

In training a block of transformers fills the cache that it is given, by default in each step. A second run would fill
it again and attend to everything twice. So each run gets a cache of its own, as it was before the block, and the common
one stays as it is: what the block would have put there is gone with its other activations. transformers itself gives
its checkpointed blocks no cache (``GradientCheckpointingLayer`` in modeling_layers.py), but through a cache keys and
values are laid out otherwise in memory, so that attention rounds otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

Arguments = TypeVar("Arguments", tuple[Any, ...], dict[str, Any])


class _Cache:
    """A cache as it was before the block."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache


def own_caches(arguments: Arguments) -> Arguments:
    """A block's arguments with its caches set aside."""
    return _changed(arguments, lambda value: _Cache(_copied(value)) if _is_cache(value) else value)


def with_own_caches(arguments: Arguments) -> Arguments:
    """A block's arguments for one run."""
    return _changed(arguments, lambda value: _copied(value.cache) if isinstance(value, _Cache) else value)


def _changed(arguments: Arguments, change: Callable[[Any], Any]) -> Arguments:
    if isinstance(arguments, dict):
        return {name: change(value) for name, value in arguments.items()}
    return tuple(change(value) for value in arguments)


def _is_cache(value: Any) -> bool:
    """Whether it is a cache, or the part of one that belongs to a layer."""
    return hasattr(value, "get_seq_length") and hasattr(value, "__dict__")


def _copied(value: Any) -> Any:
    """A copy of a cache with the same tensors; blocks put others in their place, and do not write into them."""
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if not _is_cache(value):
        return value
    made = copy.copy(value)
    vars(made).update({name: _copied(item) for name, item in vars(value).items()})
    return made
