"""Runs a model layer by layer, each layer over chunks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.inference.layerwise import (
    conv_rules,
    norm_rules,
    pointwise_rules,
    resampling_rules,
    structure_rules,
)
from vramfit.inference.layerwise.chunk_height import ChunkHeight, ChunkStore
from vramfit.inference.layerwise.row_calls import RowMode, RowSession, Rule
from vramfit.inference.layerwise.row_tensors import RowTensor


def run_layerwise(
    model: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    rows: int | ChunkHeight,
    store: ChunkStore = ChunkStore.DEVICE,
) -> Any:
    """The output of a model, computed layer by layer over chunks of rows.

    Each convolution, pooling and interpolation computes some rows of the first spatial dimension at a time, of as many
    rows of its input as its filter reaches; group, instance and layer norms and means over everything take their
    statistics in a pass over the rows and normalise in the next. Rows that nothing will read again are let go, so that
    of most layers only a window exists at a time, and of what a norm has to see whole, one copy. What has no rule
    (attention, a reshape across rows) gets its whole input. Gradients are not computed.

    The result is that of ``model(*args, **kwargs)`` but for rounding. Tensors that the caller gave are not changed,
    also where the model works in place.

    Args:
        model: a module, or any function that calls torch.
        args, kwargs: its arguments. Floating tensors of three dimensions or more are taken as batches of signals,
            images or volumes, channels first.
        rows: how many rows of its output a layer computes at a time, or a `ChunkHeight`, which may be in bytes.
        store: where what is kept of layers lies meanwhile.

    Raises:
        UsageError: `rows` is not a positive whole number, or the model does what cannot be followed: it changes a
            tensor in place that has views.
    """
    with layerwise(rows=rows, store=store) as by_rows:
        return by_rows(model, *args, **(kwargs or {}))


@contextlib.contextmanager
def layerwise(
    *, rows: int | ChunkHeight, store: ChunkStore = ChunkStore.DEVICE
) -> Iterator[Callable[..., Any]]:
    """A context that gives a function which calls models as `run_layerwise` does.

    Inside, convolutions and norms of plain tensors higher than a chunk go by rows too, wherever they are called.

    >>> with layerwise(rows=16) as by_rows:
    ...     image = by_rows(vae.decode, latents).sample
    """
    height = rows if isinstance(rows, ChunkHeight) else ChunkHeight(rows=rows)
    if not isinstance(store, ChunkStore):
        raise UsageError(f"store={store!r} is no place for chunks", "Give a ChunkStore")
    session = RowSession(height, store, RULES, ENTRIES)

    def call(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _mapped(args, session), _mapped(kwargs, session)
        made = model(*given[0], **given[1])
        del given
        return _whole(made)

    with torch.no_grad(), RowMode(session):
        yield call


def _mapped(value: Any, session: RowSession) -> Any:
    """Arguments with batches of images and the like by rows."""
    if isinstance(value, torch.Tensor):
        takes = type(value) is not RowTensor and value.dim() >= 3 and value.is_floating_point()
        return session.tensor_of(value, 2 - value.dim()) if takes and value.numel() else value
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, session) for item in value)
    if type(value) is dict:
        return {name: _mapped(item, session) for name, item in value.items()}
    return value


def _whole(value: Any) -> Any:
    """An output with whole tensors: in tuples, lists, mappings and dataclasses."""
    if isinstance(value, RowTensor):
        return value.whole()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_whole(item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_whole(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **{name: _whole(item) for name, item in found.items()})
    if isinstance(value, dict):
        for name in list(value):
            value[name] = _whole(value[name])
    return value


def _rules() -> dict[str, Rule]:
    found: dict[str, Rule] = dict.fromkeys(pointwise_rules.POINTWISE, pointwise_rules.pointwise)
    found |= dict.fromkeys(pointwise_rules.CHANNELWISE, pointwise_rules.along_rows)
    found |= dict.fromkeys(pointwise_rules.CASTS, pointwise_rules.cast)
    found |= dict.fromkeys(pointwise_rules.ALONG, pointwise_rules.along)
    found |= dict.fromkeys(("to", "type", "type_as"), pointwise_rules.to)
    found |= dict.fromkeys(("detach", "view_as_real_", "alias"), pointwise_rules.itself)
    found |= dict.fromkeys(
        (
            "dropout",
            "dropout1d",
            "dropout2d",
            "dropout3d",
            "alpha_dropout",
            "feature_alpha_dropout",
            "feature_dropout",
        ),
        pointwise_rules.dropout,
    )
    found["contiguous"] = pointwise_rules.contiguous
    found["linear"] = pointwise_rules.linear
    found |= dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims"), structure_rules.permute)
    found |= dict.fromkeys(("view", "reshape", "unflatten", "flatten"), structure_rules.reshape)
    found |= {"unsqueeze": structure_rules.unsqueeze, "squeeze": structure_rules.squeeze}
    found |= dict.fromkeys(("chunk", "split", "tensor_split", "unsafe_chunk"), structure_rules.split)
    found |= {"unbind": structure_rules.unbind, "select": structure_rules.unbind}
    found |= {"narrow": structure_rules.narrow, "__getitem__": structure_rules.getitem}
    found |= dict.fromkeys(("cat", "concat", "concatenate"), structure_rules.cat)
    found["pixel_shuffle"] = structure_rules.pixel_shuffle
    found["pixel_unshuffle"] = structure_rules.pixel_unshuffle
    for dims in (1, 2, 3):
        found[f"conv{dims}d"] = conv_rules.convolution
        found[f"conv_transpose{dims}d"] = conv_rules.transposed_convolution
    found |= dict.fromkeys(resampling_rules.POOLS, resampling_rules.pool)
    found |= {"pad": resampling_rules.pad, "interpolate": resampling_rules.interpolate}
    found |= {"group_norm": norm_rules.group_norm, "instance_norm": norm_rules.instance_norm}
    found["batch_norm"] = norm_rules.batch_norm
    found |= dict.fromkeys(("layer_norm", "rms_norm"), norm_rules.trailing_norm)
    found |= dict.fromkeys(norm_rules.FOLDED, norm_rules.folded)
    return found | dict.fromkeys(norm_rules.GLOBAL_POOLS, norm_rules.global_pool)


RULES = _rules()
ENTRIES = frozenset(
    [f"conv{dims}d" for dims in (1, 2, 3)]
    + [f"conv_transpose{dims}d" for dims in (1, 2, 3)]
    + ["group_norm", "instance_norm", "interpolate"]
)
