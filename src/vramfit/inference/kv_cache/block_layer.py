"""One layer of a `BlockCache`, as transformers asks for it: its lengths, its masks, and its keys and values."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from vramfit.inference.kv_cache.cache_layout import LayerKind
from vramfit.inference.kv_cache.cached_batch import CachedBatch


class BlockLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' own is untyped
    """A layer's view of the batch.

    Args:
        batch: of the cache.
        layer: its number.
        cache: that the layer is part of.
    """

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: CachedBatch, layer: int, cache: Any) -> None:
        self._batch, self._layer = batch, layer
        self._cache = weakref.ref(cache)  # no circle: a cache that is dropped gives its memory back at once
        group = batch.layout.group_of(layer)
        assert group is not None
        self._group = group
        self.is_sliding = batch.layout.groups[group].kind is LayerKind.SLIDING
        if self.is_sliding:
            self.sliding_window = batch.layout.groups[group].window

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # what transformers sets is known of the batch here
        """Whether it holds something."""
        return bool(self._batch.rows)

    @property
    def record_past(self) -> bool:
        """Whether what leaves a window is kept until `crop`."""
        return self._batch.earliest is not None

    @record_past.setter
    def record_past(self, given: bool) -> None:
        self._batch.earliest = self._batch.width if given else None

    @property
    def batch_size(self) -> int:
        """Sequences, 0 where there are none."""
        return len(self._batch.rows)

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # gathered when it is asked for
        """Gathered, ``[batch, heads, columns, dim]``: until the next layer is gathered into the same scratch."""
        return self._batch.gather(self._layer)[0] if self._batch.rows else None

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]  # as `keys`
        """As `keys`."""
        return self._batch.gather(self._layer)[1] if self._batch.rows else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: memory is made for all layers at once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """New states in, all states that their queries see out."""
        cache = self._cache()
        assert cache is not None
        found: tuple[torch.Tensor, torch.Tensor] = cache.update_layer(self._layer, key_states, value_states)
        return found

    def move_to(self, batch: CachedBatch) -> None:
        """Look at another batch of the same layout."""
        self._batch = batch

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that the next queries see, and the first of them."""
        width = self._batch.width_of(self._layer)
        past = self._batch.past_of(self._group, width)
        return past + query_length, width - past

    def get_seq_length(self) -> int:
        """Columns that the layer has had."""
        return self._batch.width_of(self._layer)

    def get_max_length(self) -> int:
        """Of a window, or -1."""
        window = self._batch.layout.groups[self._group].window
        return -1 if window is None else window

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def activate_past_recording(self) -> None:
        """Keep what leaves a window until `crop`."""
        self.record_past = True
