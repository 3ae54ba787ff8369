"""Experts of a mixture that are fused in one parameter, as linear layers: so they are given formats like others.

NOTE [Fused experts]: transformers 5 keeps a projection of all experts as one parameter ``[experts, out, in]``, and its
plain loop takes ``F.linear(x, self.down_proj[expert])``. A row has its own scales in every format, so that all experts
one below the other, ``[experts * out, in]``, are packed as each by itself. The parameter gives way to a module with
that weight, whose ``[expert]`` is the expert's part; the loop does the rest. Other implementations (grouped products)
read the parameter whole, so that the loop is chosen. A layout ``[experts, in, out]`` (GPT-OSS) stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vramfit.techniques.core.attached_program import AttachedProgram

_DIMENSIONS = 3
_SECOND = ("scale_and_zero",)
"""Parts of packed weights whose rows are their second dimension (torchao, int4_tile_packed_to_4d_tensor.py)."""


class FusedExperts(nn.Linear):
    """A projection of all experts, one below the other, over the memory of the fused parameter.

    Args:
        fused: ``[experts, out, in]``.
    """

    def __init__(self, fused: torch.Tensor) -> None:
        experts, out, inside = fused.shape
        super().__init__(inside, experts * out, bias=False, device="meta")
        self.experts = experts
        self.weight = nn.Parameter(fused.detach().view(experts * out, inside), requires_grad=False)

    def __len__(self) -> int:
        return self.experts

    def __getitem__(self, expert: Any) -> torch.Tensor:
        """An expert's weight ``[out, in]``, packed where all of it is."""
        return _rows(self.weight, int(expert), self.experts)


def fused_projections(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that hold fused experts, each with the name of a parameter."""
    for module in model.modules():
        experts = getattr(module, "num_experts", None)
        looped = hasattr(type(module).forward, "__wrapped__")  # transformers, integrations/moe.py
        if not isinstance(experts, int) or not looped or getattr(module, "is_transposed", True):
            continue
        for name, parameter in module._parameters.items():
            if (
                parameter is not None
                and parameter.dim() == _DIMENSIONS
                and parameter.shape[0] == experts
                and parameter.is_floating_point()
                and parameter.is_contiguous()
            ):
                yield module, name


def split_experts(live: AttachedProgram) -> int:
    """Put modules in the place of fused parameters, with the undo; how many there were."""
    found = list(fused_projections(live.model))
    for module, name in found:
        live.set(module.config, "_experts_implementation", "eager")
        _replace(live, module, name)
    return len(found)


def _replace(live: AttachedProgram, module: nn.Module, name: str) -> None:
    fused = module._parameters[name]
    assert fused is not None
    shape, order = fused.shape, list(module._parameters)
    layer = FusedExperts(fused)
    del module._parameters[name]
    module._modules[name] = layer
    fused.data = fused.data.new_empty(0)  # its memory is the layer's now, which may go to another device

    def put_back() -> None:
        del module._modules[name]
        fused.data = layer.weight.detach().view(shape)
        known = {**module._parameters, name: fused}
        module._parameters.clear()
        module._parameters.update({one: known[one] for one in order if one in known})

    live.on_undo(put_back)


def _rows(weight: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """One of equal parts of a weight's rows; of a packed one with its scales."""
    flatten = getattr(weight.detach(), "__tensor_flatten__", None)
    if type(weight.detach()) is torch.Tensor or flatten is None or not hasattr(weight.detach(), "qdata"):
        count = weight.shape[0] // parts
        return weight.narrow(0, part * count, count)
    packed: Any = weight.detach()
    names, attributes = packed.__tensor_flatten__()
    tensors = {}
    for name in names:
        tensor = getattr(packed, name)
        dim = 1 if name in _SECOND else 0
        count = tensor.shape[dim] // parts if tensor.dim() > dim else 0
        tensors[name] = (
            tensor.narrow(dim, part * count, count) if count else tensor
        )  # one scale for all stays
    shape = torch.Size((weight.shape[0] // parts, *weight.shape[1:]))
    if "shape" in attributes:
        attributes = {**attributes, "shape": shape}
    found: torch.Tensor = type(packed).__tensor_unflatten__(tensors, attributes, shape, None)
    return found
