"""Running statistics of norm layers, which a second forward pass must not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

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
