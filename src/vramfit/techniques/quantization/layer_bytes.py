"""Measures what linear layers take in each format: the model runs once in each, watched call by call, on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vramfit.techniques.quantization.byte_program import FormatTable, LayerBytes, LayerCall
from vramfit.techniques.quantization.weight_formats import (
    WeightFormat,
    packed_through,
    quantisable,
    shared_weights,
    why_not,
)

_BLOCK = 512
"""kMinBlockSize in CUDACachingAllocator.cpp."""


@dataclass(kw_only=True, slots=True)
class WatchedRun:
    """A run of a model on a card, with its linear layers watched.

    Attributes:
        calls: of layers in their order: name, bytes held when it began, and at its own peak.
        outside: most bytes between calls.
    """

    calls: list[tuple[str, int, int]] = field(default_factory=list)
    outside: int = 0


@contextmanager
def watched(model: nn.Module, names: Sequence[str]) -> Iterator[WatchedRun]:
    """Watch the calls of layers of a model on a card inside the block."""
    run = WatchedRun()
    layers = [model.get_submodule(name) for name in names]
    began = [0]

    def before(_module: nn.Module, _args: Any) -> None:
        run.outside = max(run.outside, torch.cuda.max_memory_allocated())
        began[0] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def after(name: str) -> Callable[..., None]:
        def noted(_module: nn.Module, _args: Any, _result: Any) -> None:
            run.calls.append((name, began[0], torch.cuda.max_memory_allocated()))
            torch.cuda.reset_peak_memory_stats()

        return noted

    torch.cuda.reset_peak_memory_stats()
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after(name)) for name, layer in zip(names, layers, strict=True)]
    try:
        yield run
        run.outside = max(run.outside, torch.cuda.max_memory_allocated())
    finally:
        for hook in hooks:
            hook.remove()


def stored_bytes(weight: torch.Tensor) -> int:
    """Bytes that a weight takes of the allocator, its scales among them; each part is rounded to whole blocks."""
    plain = weight.detach()
    flatten = getattr(plain, "__tensor_flatten__", None)
    if flatten is None:
        return -(-plain.nbytes // _BLOCK) * _BLOCK
    return sum(stored_bytes(getattr(plain, name)) for name in flatten()[0])


def weight_bytes(
    model: nn.Module, formats: Sequence[WeightFormat], device: torch.device
) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Bytes of each layer's weight in the formats that it can have, and those to pack it, measured on a device.

    Args:
        device: a card with nothing on it; weights of one shape are packed once.
    """
    known: dict[tuple[Any, ...], tuple[dict[str, int], dict[str, int]]] = {}
    found = {}
    shared = shared_weights(model)
    for name, layer in quantisable(model).items():
        key = (tuple(layer.weight.shape), layer.weight.dtype)
        if key not in known:
            known[key] = _packed_bytes(layer, formats, device)
        weight, packing = known[key]
        if id(layer.weight) in shared:  # others keep it, so that a packed one comes on top
            weight = {**weight, WeightFormat.NONE.value: 0}
        found[name] = (weight, packing)
    return found


def _packed_bytes(
    layer: nn.Linear, formats: Sequence[WeightFormat], device: torch.device
) -> tuple[dict[str, int], dict[str, int]]:
    weight = {WeightFormat.NONE.value: stored_bytes(layer.weight)}
    packing = {WeightFormat.NONE.value: 0}
    for one in formats:
        if one is WeightFormat.NONE or why_not(layer, one):
            continue
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        packed = packed_through(layer.weight, one, device)
        weight[one.value] = stored_bytes(packed)
        packing[one.value] = torch.cuda.max_memory_allocated() - before
        del packed
    return weight, packing


def table_of(
    weights: Mapping[str, tuple[Mapping[str, int], Mapping[str, int]]],
    runs: Mapping[WeightFormat, WatchedRun],
    uniform: Mapping[str, int],
) -> FormatTable:
    """What runs in each format come to.

    Args:
        weights: by layer, as of `weight_bytes`.
        runs: with all layers that can have it in a format; that without any is among them.
        uniform: peaks of reserved memory of these runs, by format.
    """
    plain = runs[WeightFormat.NONE]
    sums = {
        one: sum(sizes.get(one.value, sizes[WeightFormat.NONE.value]) for sizes, _ in weights.values())
        for one in runs
    }
    calls: dict[str, list[LayerCall]] = {name: [] for name in weights}
    for number, (name, _, _) in enumerate(plain.calls):
        level = max(run.calls[number][1] - sums[one] for one, run in runs.items())
        takes = {
            one.value: run.calls[number][2] - run.calls[number][1]
            for one, run in runs.items()
            if one.value in weights[name][0]
        }
        calls[name].append(LayerCall(level=level, takes=takes))
    return FormatTable(
        layers=tuple(
            LayerBytes(
                name=name, weight=dict(sizes), packing=dict(packing), calls=tuple(_highest(calls[name]))
            )
            for name, (sizes, packing) in weights.items()
        ),
        outside=max(run.outside - sums[one] for one, run in runs.items()),
        uniform=dict(uniform),
    )


def _highest(calls: Sequence[LayerCall]) -> list[LayerCall]:
    """Those calls that may be the peak: of those that take the same, the one that begins highest."""
    best: dict[tuple[tuple[str, int], ...], LayerCall] = {}
    for call in calls:
        key = tuple(sorted(call.takes.items()))
        if key not in best or best[key].level < call.level:
            best[key] = call
    kept = list(best.values())
    return [
        call
        for call in kept
        if not any(
            other is not call
            and all(other.level + other.takes[f] >= call.level + call.takes[f] for f in call.takes)
            and any(other.level + other.takes[f] > call.level + call.takes[f] for f in call.takes)
            for other in kept
        )
    ]
