"""What a model's layers keep in a cache: all or a window, the shape of heads, and which share their blocks."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.torch_internals.dispatch import disable_current_modes


class LayerKind(enum.Enum):
    """What a layer keeps."""

    FULL = "full"
    """All tokens."""
    SLIDING = "sliding"
    """The model's own window, which its mask knows of."""
    FORGETTING = "forgetting"
    """A window that the user has put on a layer with full attention; the mask shows all that is kept."""
    NOTHING = "nothing"
    """It reads what another layer keeps, or has no attention."""


@dataclass(frozen=True, kw_only=True, order=True)
class HeadShape:
    """Keys and values of one token in one layer.

    Attributes:
        heads: of keys and values.
        key_dim, value_dim: numbers of each.
    """

    heads: int
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        """Numbers of a token, keys and values together."""
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Layers that have one block table.

    Attributes:
        layers: their numbers; a block has a part for each.
        shape: of their heads.
        window: columns that a query sees, itself among them; None is all.
        sinks: first tokens that are kept beside a window.
        kind: what they keep.
    """

    layers: tuple[int, ...]
    shape: HeadShape
    kind: LayerKind
    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """All layers of a model.

    Attributes:
        layers: how many the model has, those without a cache of their own among them.
        groups: of those with one. Groups of one shape have equally many layers, so that all take blocks of one size
            from one pool (the greatest common divisor, as in vLLM's hybrid cache manager, but without padding).
    """

    layers: int
    groups: tuple[LayerGroup, ...]

    def group_of(self, layer: int) -> int | None:
        """The group that a layer is in; None for one that reads another's states."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number
        return None

    @property
    def windowed(self) -> bool:
        """Whether some layer forgets."""
        return any(group.window is not None for group in self.groups)


def decoder_config(model: Any) -> Any:
    """The configuration of a model's decoder, of the model or of its configuration.

    Raises:
        UsageError: it is neither a model of transformers nor its configuration.
    """
    config = getattr(model, "config", model)
    if not callable(getattr(config, "get_text_config", None)):
        raise UsageError(
            f"{type(model).__name__} is no model of transformers",
            "Give a model that generates, or its configuration",
        )
    return config.get_text_config(decoder=True)


def observed_heads(model: Any) -> dict[int, HeadShape] | None:
    """What each layer of a decoder puts into a cache, seen in a call of a model of that configuration, without values.

    Returns:
        shapes of layers that keep keys and values; None where it is not seen: a configuration was given, or the model's
        code does not run without values.

    Raises:
        UsageError: the model takes no cache.
    """
    if not isinstance(model, nn.Module):
        return None
    taken = inspect.signature(model.forward).parameters
    if "past_key_values" not in taken and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        raise UsageError(f"{type(model).__name__} takes no past_key_values", _OTHERS)
    from transformers import cache_utils

    cache = cache_utils.DynamicCache(config=decoder_config(model))
    try:
        with disable_current_modes(), torch.device("meta"), torch.no_grad():
            hollow: Any = type(model)(model.config).eval()  # the model's own hooks and weights stay out of it
            hollow(input_ids=torch.zeros(1, 2, dtype=torch.int64), past_key_values=cache, use_cache=True)
    except Exception:  # whatever its code makes of tensors without values
        return None
    found: dict[int, HeadShape] = {}
    for layer, kept in enumerate(cache.layers):
        keys, values = getattr(kept, "keys", None), getattr(kept, "values", None)
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor) and keys.dim() == 4:
            found[layer] = HeadShape(heads=keys.shape[1], key_dim=keys.shape[-1], value_dim=values.shape[-1])
    return found


def read_layout(
    config: Any,
    *,
    window: int | None = None,
    sinks: int = 0,
    heads: Mapping[int, HeadShape] | None = None,
) -> CacheLayout:
    """The layout of a decoder's cache, as `transformers.DynamicCache` makes it for the same configuration.

    Args:
        config: of the decoder.
        window: columns that layers with full attention see, where they are to forget others.
        sinks: first tokens that they keep all the same.
        heads: what layers were seen to keep (`observed_heads`); None takes what the configuration says.

    Raises:
        UsageError: the model has no attention, or layers that keep something else than keys and values.
    """
    name = type(config).__name__
    if not _keeps_states(config):
        raise UsageError(f"{name} is of a model that keeps no keys and values from call to call", _OTHERS)
    kinds = _layer_kinds(config, name)
    alike: dict[tuple[HeadShape, LayerKind, int | None], list[int]] = {}
    for layer, (kind, own) in enumerate(kinds):
        if kind is LayerKind.FULL and window is not None:
            kind, own = LayerKind.FORGETTING, window
        if kind is LayerKind.NOTHING:
            continue
        if heads is not None and layer not in heads:
            raise UsageError(f"layer {layer} of the model puts no keys and values into a cache", _OTHERS)
        shape = _head_shape(config, layer, name) if heads is None else heads[layer]
        alike.setdefault((shape, kind, own), []).append(layer)
    if not alike:
        raise UsageError(f"{name} has no attention, so there are no keys and values to keep", _OTHERS)
    groups = []
    for (shape, kind, width), layers in alike.items():
        size = gcd(*(len(others) for (other, _, _), others in alike.items() if other == shape))
        kept = sinks if kind is LayerKind.FORGETTING else 0
        groups += [
            LayerGroup(layers=tuple(layers[at : at + size]), shape=shape, kind=kind, window=width, sinks=kept)
            for at in range(0, len(layers), size)
        ]
    return CacheLayout(layers=len(kinds), groups=tuple(groups))


_OTHERS = "Leave the cache out: transformers makes the one that such a model needs"


def _keeps_states(config: Any) -> bool:
    """Whether a model has a cache to use: models of masked words have one only as decoders."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if not hasattr(config, "use_cache"):
        return False
    masked = getattr(config, "model_type", None) in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return not masked or config.is_encoder_decoder or bool(getattr(config, "is_decoder", False))


def _layer_kinds(config: Any, name: str) -> list[tuple[LayerKind, int | None]]:
    from transformers import cache_utils

    try:
        layers = cache_utils.DynamicCache(config=config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UsageError(f"{name} describes no layers with a key-value cache", _OTHERS) from None
    found: list[tuple[LayerKind, int | None]] = []
    for number, layer in enumerate(layers):
        if type(layer) is cache_utils.DynamicLayer:
            found.append((LayerKind.FULL, None))
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            found.append((LayerKind.SLIDING, int(layer.sliding_window)))
        elif isinstance(layer, cache_utils.DummyLayer):
            found.append((LayerKind.NOTHING, None))
        else:
            kind = type(layer).__name__
            raise UsageError(
                f"layer {number} of {name} keeps a {kind}, which is no cache of keys and values", _OTHERS
            )
    return found


def _head_shape(config: Any, layer: int, name: str) -> HeadShape:
    own = getattr(config, "per_layer_config", None)
    own = config if own is None else own[layer]
    query_heads = getattr(own, "num_attention_heads", None)
    heads = getattr(own, "num_key_value_heads", None) or query_heads
    if (
        getattr(own, "new_decoder_architecture", None) is not None
    ):  # Falcon: keys are repeated before they are cached
        heads = 1 if own.multi_query and not own.new_decoder_architecture else query_heads
    width = getattr(own, "head_dim", None) or getattr(own, "d_kv", None)
    if width is None and isinstance(query_heads, int) and isinstance(getattr(own, "hidden_size", None), int):
        width = own.hidden_size // query_heads
    if not isinstance(heads, int) or not isinstance(width, int):
        raise UsageError(f"{name} does not say how many heads its keys have, and how wide they are", _OTHERS)
    key, value = width, width
    if getattr(
        own, "kv_lora_rank", None
    ):  # latent attention: keys are the two parts of queries, values have their own
        key, value = own.qk_nope_head_dim + own.qk_rope_head_dim, own.v_head_dim
    return HeadShape(heads=heads, key_dim=key, value_dim=value)
