"""Gives layers of a model their formats, in place, with the undo; and puts the model where it computes.

NOTE [Order]: a weight is brought to the card some rows at a time, packed there and sent back; when all are packed,
the model is moved. So the card never holds the whole model in floating point, nor pieces of what packing took between
the packed weights: a segment of the allocator stays as long as one block in it is in use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.quantization.weight_formats import (
    ROUNDED,
    Float8Inputs,
    WeightFormat,
    check_card,
    has_equivalent,
    packed_through,
    quantisable,
    rounded_weight,
    shared_weights,
    why_not,
)


def quantise_layers(
    live: AttachedProgram,
    formats: Mapping[str, WeightFormat],
    device: torch.device,
) -> None:
    """Give layers their formats and bring them to a device; the rest of the model stays where it is.

    Args:
        formats: of layers, by name; those with `WeightFormat.NONE` stay as they are.
        device: where the model computes; on the CPU int4 and fp8 are replaced by equivalents of the same values.

    The weights of before wait on the host for the undo.

    Raises:
        UsageError: a layer is not there, cannot have its format, or the card has no such format.
    """
    chosen = {name: one for name, one in formats.items() if one is not WeightFormat.NONE}
    layers = quantisable(live.model)
    for name, one in chosen.items():
        _check(live.model, layers, name, one)
    if device.type == "cuda" and chosen:
        check_card(
            dict.fromkeys(chosen.values()),
            torch.cuda.get_device_capability(device),
            torch.cuda.get_device_name(device),
        )
    shared = shared_weights(live.model)
    before: dict[str, torch.Tensor] = {}
    live.keep_pageable(before.values)
    homes: dict[str, torch.device] = {}
    try:
        # The largest first, while the card holds the least.
        for name in sorted(chosen, key=lambda name: -layers[name].weight.numel()):
            before[name], homes[name] = layers[name].weight, layers[name].weight.device
            _quantise(live, layers[name], chosen[name], device, alone=id(before[name]) not in shared)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            for name in chosen:
                layers[name].weight = _moved(layers[name].weight, device)
    except BaseException:
        for name, own in before.items():
            layers[name].weight = own  # all packed ones go first, for the sake of their memory
        for name, own in before.items():
            if own.device != homes[name]:
                own.data = own.data.to(homes[name])
        raise


def _check(model: nn.Module, layers: Mapping[str, nn.Linear], name: str, one: WeightFormat) -> None:
    if name not in layers:
        there = name in dict(model.named_modules())
        raise UsageError(
            f"{name} is no plain linear layer" if there else f"the model has no layer {name!r}",
            "Name linear layers whose weights are in floating point",
        )
    if why := why_not(layers[name], one):
        raise UsageError(f"{name} cannot be in {one.value}: {why}", "Leave it out, or give it another format")


def _quantise(
    live: AttachedProgram,
    layer: nn.Linear,
    one: WeightFormat,
    device: torch.device,
    *,
    alone: bool,
) -> None:
    """Pack one weight.

    Args:
        alone: whether no other module holds it: a tied one stays where the others use it.
    """
    own = layer.weight
    if device.type == "cpu" and has_equivalent(one):
        packed = nn.Parameter(rounded_weight(own.detach(), one), requires_grad=False)
        setattr(packed, ROUNDED, True)
        if one is WeightFormat.FP8:
            live.surround(layer, Float8Inputs())
    else:
        packed = nn.Parameter(packed_through(own, one, device), requires_grad=False)
    if alone and own.device.type == "cuda":
        own.data = own.data.cpu()
    layer.weight = packed

    def put_back() -> None:
        where = layer.weight.device
        layer.weight = own  # first: where the card has no room for it, it is on the host
        if own.device != where:
            own.data = own.data.to(where)

    live.on_undo(put_back)


def _moved(weight: torch.Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(device), requires_grad=False)
