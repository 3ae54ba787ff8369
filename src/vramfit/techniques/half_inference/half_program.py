"""A model cast to half precision in place, and the islands in it that stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.batch_norm_folding import FOLDED_MARK
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.forward_trace import tensors_in
from vramfit.techniques.core.surround import plain_class
from vramfit.techniques.support.casting import (
    HALVES,
    KEPT_BUFFERS,
    device_type_of,
    flatten_recurrent,
    map_tensors,
    put_values,
)
from vramfit.torch_internals.layers import BatchNorm

WIDER = frozenset({torch.float32, torch.float64})
_FLOAT32 = frozenset({torch.float32})
_WIDE = "_vramfit_wide"
"""The attribute of a tensor in half precision that holds the one it was cast from."""


class HalfRoot:
    """Casts what a model is called with to half precision, and its outputs to float32 where that is wanted.

    Inputs remember what they were cast from, so that an island which reads one directly (coordinates, times) gets all
    of its bits. The caller holds those anyway while the model runs.
    """

    def __init__(self, dtype: torch.dtype, *, float32_outputs: bool) -> None:
        self.dtype, self.float32_outputs = dtype, float32_outputs

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass."""
        args, kwargs = map_tensors((args, kwargs), self._halved)
        with torch.autocast(device_type_of(module, (args, kwargs)), enabled=False):
            outputs = forward(*args, **kwargs)
        return map_tensors(outputs, _widened) if self.float32_outputs else outputs

    def _halved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in WIDER:
            return tensor
        half = tensor.to(self.dtype)
        if not torch.compiler.is_compiling():
            setattr(half, _WIDE, tensor)
        return half


class Float32Part:
    """Runs a module on float32, and casts its outputs to half precision again.

    A batch norm is called as it is: its kernels take inputs of 16 bits with float32 parameters and statistics.

    Args:
        hands_on: whether outputs remember what they were cast from, for another island that gets them. What overflows
            half precision between two islands does not then. It costs the float32 form for as long.
    """

    def __init__(self, dtype: torch.dtype, *, hands_on: bool = False) -> None:
        self.dtype, self.hands_on = dtype, hands_on

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass."""
        if isinstance(module, BatchNorm):
            return forward(*args, **kwargs)
        args, kwargs = map_tensors((args, kwargs), _widened)
        return map_tensors(forward(*args, **kwargs), self._halved)

    def _halved(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _FLOAT32:
            return tensor
        half = tensor.to(self.dtype)
        if self.hands_on and not torch.compiler.is_compiling():
            setattr(half, _WIDE, tensor)
        if (norm := getattr(tensor, FOLDED_MARK, None)) is not None:
            setattr(half, FOLDED_MARK, norm)
        return half


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in HALVES:
        return tensor
    wide = getattr(tensor, _WIDE, None)
    return tensor.to(torch.float32) if wide is None else wide.to(torch.float32)


def make_half(
    live: AttachedProgram,
    dtype: torch.dtype,
    islands: Iterable[nn.Module],
    *,
    handing_on: Iterable[nn.Module] = (),
    float32_outputs: bool = True,
    restores: bool = True,
) -> None:
    """Cast a model in place and surround it and its islands, until the undo.

    Args:
        islands: modules that stay in float32, with all that is in them; batch norms always do.
        handing_on: those of them whose outputs other islands, or the model's caller, get in float32.
        restores: whether float32 values wait on the host for the undo; without, it widens those of half precision.

    Raises:
        UsageError: a tensor is shared between an island and what lies outside.
    """
    model = live.model
    chosen = list(islands)
    inside = {id(part) for island in chosen for part in island.modules()}
    chosen += [m for m in model.modules() if isinstance(m, BatchNorm) and id(m) not in inside]
    _check_shared(model, chosen)
    kept = {id(tensor) for island in chosen for tensor in (*island.parameters(), *island.buffers())}
    on = {id(module) for module in handing_on}
    for module in chosen:
        live.surround(module, Float32Part(dtype, hands_on=id(module) in on))
    live.surround(model, HalfRoot(dtype, float32_outputs=float32_outputs))
    cast: dict[torch.Tensor, torch.Tensor | None] = {}
    live.keep_pageable(lambda: [values for values in cast.values() if values is not None])

    def act() -> None:
        live.on_undo(lambda: _restore(model, cast))
        _cast(model, dtype, kept, cast, restores=restores)

    # After what else changes weights (folded batch norms), so that these are rounded once, and undone before them.
    live.after(AttachStage.MODEL, act)


def _cast(
    model: nn.Module,
    dtype: torch.dtype,
    kept: set[int],
    cast: dict[torch.Tensor, torch.Tensor | None],
    *,
    restores: bool,
) -> None:
    for tensor in float32_tensors(model):
        if id(tensor) not in kept:
            before = tensor.detach()
            cast[tensor] = before.cpu() if restores else None
            put_values(tensor, before.to(dtype))
    flatten_recurrent(model)


def _restore(model: nn.Module, cast: dict[torch.Tensor, torch.Tensor | None]) -> None:
    while cast:
        tensor, values = cast.popitem()
        put_values(tensor, tensor.detach().to(torch.float32) if values is None else values.to(tensor.device))
    flatten_recurrent(model)


def float32_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers that can be cast, once each."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if tensor.dtype is torch.float32 and name.rpartition(".")[2] not in KEPT_BUFFERS:
            yield tensor


def _check_shared(model: nn.Module, islands: Iterable[nn.Module]) -> None:
    """Make sure that a tensor has one dtype."""
    parts = {id(part) for island in islands for part in island.modules()}
    shared = {id(tensor) for island in islands for tensor in (*island.parameters(), *island.buffers())}
    for name, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in shared and id(module) not in parts:
                raise UsageError(
                    f"{name}.{own} is shared with an island of float32, and can have only one dtype",
                    f"Make {name or 'the model'}, a {plain_class(module).__name__}, an island too, or leave the other "
                    "out",
                )


def same_tensors(ones: Any, others: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Floating tensors of two results of the same structure, in pairs."""
    pairs = zip(tensors_in(ones), tensors_in(others), strict=True)
    return [(one, other) for one, other in pairs if one.is_floating_point() and other.is_floating_point()]
