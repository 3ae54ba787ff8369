"""What a second forward pass of a block has to find as it was: running statistics, random state, and caches.

NOTE [Caches of keys and values]: in training a block of transformers fills the cache that it is given, by default in
each step. A second run would fill it again and attend to everything twice. So each run gets a cache of its own, as it
was before the block, and the common one stays as it is: what the block would have put there is gone with its other
activations. transformers itself gives its checkpointed blocks no cache (``GradientCheckpointingLayer`` in
modeling_layers.py), but through a cache keys and values are laid out otherwise in memory, so that attention rounds
otherwise.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import get_device_states, set_device_states

from vramfit.errors import UsageError


@contextlib.contextmanager
def untouched_statistics(module: nn.Module) -> Iterator[None]:
    """While this is entered, norm layers in training update copies of their running statistics.

    Their outputs come from the batch alone. The statistics themselves are never written to, so that other calls whose
    backward pass is still to come find them as they saved them.
    """
    kept: list[tuple[nn.Module, str, torch.Tensor]] = []
    try:
        for norm in _norms_in_training(module):
            for name, buffer in norm.named_buffers(recurse=False):
                kept.append((norm, name, buffer))
                norm._buffers[name] = buffer.clone()
        yield
    finally:
        for norm, name, buffer in kept:
            norm._buffers[name] = buffer


def buffer_versions(module: nn.Module) -> dict[str, int]:
    """How often each buffer was changed in place, but for the running statistics of norm layers."""
    norms = {id(norm) for norm in module.modules() if isinstance(norm, _NormBase)}
    return {
        f"{path}.{name}" if path else name: buffer._version
        for path, inner in module.named_modules()
        if id(inner) not in norms
        for name, buffer in inner.named_buffers(recurse=False)
        if not buffer.is_inference()
    }


def refuse_changed_buffers(path: str, before: dict[str, int], after: dict[str, int]) -> None:
    """Compare the versions of buffers.

    Raises:
        UsageError: one has been changed.
    """
    for name, version in after.items():
        if before.get(name, version) != version:
            raise UsageError(
                f"{path} cannot be recomputed: its forward pass changes its buffer {name}",
                "Leave it out of the modules to recompute",
            )


def _norms_in_training(module: nn.Module) -> Iterator[nn.Module]:
    for inner in module.modules():
        if isinstance(inner, _NormBase) and inner.training and inner.track_running_stats:
            yield inner


# -- the state of random generators --------------------------------------------------------------------------------


class RandomState:
    """The state of the generators: the CPU's, and those of the devices that some tensors are on."""

    def __init__(self, cpu: torch.Tensor, devices: list[int], states: list[torch.Tensor], kind: str) -> None:
        self.cpu = cpu
        self.devices = devices
        self.states = states
        self.kind = kind

    @classmethod
    def now(cls, tensors: Iterable[torch.Tensor]) -> RandomState:
        """The present one."""
        tensors = list(tensors)
        kind = next((tensor.device.type for tensor in tensors if tensor.device.type != "cpu"), "cpu")
        devices, states = get_device_states(*tensors)
        return cls(torch.get_rng_state(), devices, states, kind)

    def set(self) -> None:
        """Make it the present one."""
        torch.set_rng_state(self.cpu)
        if self.kind != "cpu":
            set_device_states(self.devices, self.states, device_type=self.kind)

    def __eq__(self, other: object) -> bool:
        """Whether nothing was drawn between the two."""
        return (
            isinstance(other, RandomState)
            and self.devices == other.devices
            and torch.equal(self.cpu, other.cpu)
            and all(torch.equal(mine, its) for mine, its in zip(self.states, other.states, strict=True))
        )

    __hash__ = None  # type: ignore[assignment]  # states are compared, never looked up


Arguments = TypeVar("Arguments", tuple[Any, ...], dict[str, Any])


class _Cache:
    """A cache as it was before the block."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache


# -- caches of keys and values -------------------------------------------------------------------------------------


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
