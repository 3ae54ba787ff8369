"""Removes channels from a model, with everything that has an entry for them, in place, with the undo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from vramfit.arguments import number_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.pruning.channel_groups import ChannelGroup, ChannelPlace, channel_groups, entries
from vramfit.torch_internals.layers import ConvNd, NormBase
from vramfit.workload import Batch

_MULTIPLE = 8
"""Channels that tensor cores take together in 16 bits (NVIDIA, Matrix Multiplication Background User's Guide)."""


@dataclass(frozen=True, kw_only=True)
class PrunedModel:
    """A model without some of its channels.

    Attributes:
        model: the same object that was given.
        kept: numbers of the channels that are left, by the first layer of each group.
        before, after: bytes of its parameters and buffers.
    """

    model: nn.Module
    kept: Mapping[str, tuple[int, ...]]
    before: int
    after: int
    _live: AttachedProgram

    def undo(self) -> None:
        """Give the model its channels back, bit for bit; what was trained since is lost."""
        self._live.undo()


def prune_channels(
    model: nn.Module, batch: Batch, *, share: float = 0.5, multiple: int = _MULTIPLE
) -> PrunedModel:
    """Remove the channels of least weight from every group of channels of a model.

    Groups are found by watching one forward pass: chains of linear layers or convolutions with activations and batch
    norms between, the gate, up and down projections of a feed-forward, sums of such chains. Channels of a residual
    stream that is normalised, attention heads, grouped convolutions and the model's outputs stay. A channel's weight is
    the norm of all its entries, each tensor in units of its own norm (Li and others, 2017, for groups).

    Args:
        model: in evaluation mode, with its values.
        batch: what it is called with.
        share: of each group's channels that is removed.
        multiple: what the number of channels that are left is rounded up to a multiple of.

    Returns:
        the same model with smaller tensors, and the undo.

    Raises:
        UsageError: the model has no channels that could be removed, or too few.
    """
    number_argument("share", share, least=0.0, most=1.0, inside=True)
    whole_argument("multiple", multiple, least=1)
    groups = channel_groups(model, batch)
    kept = {}
    for group in groups:
        left = -(-round(group.size * (1 - share)) // multiple) * multiple
        if 0 < left < group.size:
            kept[group.name] = _strongest(model, group, left)
    if not kept:
        raise UsageError(
            "the model has no channels that could be removed: no layer's channels go through functions of single "
            f"channels to another layer, or they are fewer than {2 * multiple}",
            "Give a smaller multiple, or prune what you know by hand",
        )
    before = _bytes(model)
    live = AttachedProgram(model, None)
    for group in groups:
        if group.name in kept:
            _remove(live, group, kept[group.name])
    return PrunedModel(
        model=model,
        kept={name: tuple(channels.tolist()) for name, channels in kept.items()},
        before=before,
        after=_bytes(model),
        _live=live,
    )


def _strongest(model: nn.Module, group: ChannelGroup, count: int) -> torch.Tensor:
    """Numbers of the channels with the largest norms, in their order."""
    total = torch.zeros(group.size, dtype=torch.float64)
    parameters = dict(model.named_parameters())
    for place in group.places:
        if place.name in parameters:
            values = parameters[place.name].detach().double().cpu()
            rows = values.movedim(place.dim, 0).reshape(group.size, -1)
            whole = float(rows.square().sum())
            total += rows.square().sum(dim=1) / whole if whole else 0.0
    return total.topk(count).indices.sort().values


def _remove(live: AttachedProgram, group: ChannelGroup, kept: torch.Tensor) -> None:
    for place in group.places:
        owner, own = _owner(live.model, place)
        tensor = getattr(owner, own)
        before = tensor.data
        tensor.data = before.index_select(place.dim, entries(place, kept.to(before.device)))
        live.on_undo(partial(_put_back, tensor, before))
        _resize(live, owner, own, place, len(kept))


def _put_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    tensor.data = before.to(tensor.device)


def _resize(live: AttachedProgram, owner: nn.Module, own: str, place: ChannelPlace, count: int) -> None:
    """Say the new number of channels where a module says it."""
    if own == "weight" and isinstance(owner, nn.Linear):
        live.set(owner, "out_features" if place.makes else "in_features", count * place.each)
    elif own == "weight" and isinstance(owner, ConvNd):
        live.set(owner, "out_channels" if place.makes else "in_channels", count)
    elif isinstance(owner, NormBase) and owner.num_features != count:
        live.set(owner, "num_features", count)


def _owner(model: nn.Module, place: ChannelPlace) -> tuple[nn.Module, str]:
    path, _, own = place.name.rpartition(".")
    return model.get_submodule(path), own


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
