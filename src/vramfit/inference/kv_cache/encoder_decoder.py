"""A cache of blocks for encoder-decoder models: the decoder's own states and those of the encoder, from one pool."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache

from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_cache import BlockCache, checked_layout, checked_settings
from vramfit.inference.kv_cache.block_store import BlockNumbers
from vramfit.inference.kv_cache.cache_layout import decoder_config
from vramfit.inference.kv_cache.cache_memory import CacheMemory


class BlockCachePair(EncoderDecoderCache):
    """Two caches over one pool, for ``generate(past_key_values=...)`` of an encoder-decoder; see `block_cache_pair`."""

    self_attention_cache: BlockCache  # type: ignore[assignment]  # transformers names the one that it makes
    cross_attention_cache: BlockCache  # type: ignore[assignment]  # as above

    def check_dynamic_cache(self, method: str) -> None:
        """Nothing: blocks can be cropped, repeated and selected as those of a `DynamicCache` can."""

    def expect(self, attention_mask: torch.Tensor, *, copies: int = 1) -> None:
        """Say which of the encoder's columns are padding, so that they take no blocks.

        Args:
            attention_mask: of the encoder, ``[batch, columns]``.
            copies: times that ``generate`` repeats each row, for beams; they share their blocks.
        """
        rows = torch.arange(len(attention_mask)).repeat_interleave(copies)
        # Rows of one input hold the same states, column for column: their number stands for what they are.
        marks = rows[:, None].expand(-1, attention_mask.shape[1])
        self.cross_attention_cache.expect(marks, attention_mask.cpu()[rows])

    def reset(self) -> None:
        """Drop all sequences; the pool stays."""
        self.self_attention_cache.reset()
        self.cross_attention_cache.reset()
        self.is_updated = {}

    def free(self) -> None:
        """Give all memory back."""
        self.cross_attention_cache.batch.clear()
        self.self_attention_cache.free()
        self.cross_attention_cache.free()


def block_cache_pair(
    model: Any,
    *,
    budget: int | str | None = None,
    tokens: int | None = None,
    block_tokens: int = 16,
    numbers: BlockNumbers | str = BlockNumbers.MODEL,
) -> BlockCachePair:
    """A cache of blocks for an encoder-decoder model.

    >>> cache = block_cache_pair(model, budget="512MiB")
    >>> tokens = model.generate(**inputs, past_key_values=cache)

    The encoder's states are gathered into the scratch at each step, where `transformers.DynamicCache` keeps them in one
    piece: padding takes no blocks (`BlockCachePair.expect`), and beams share theirs.

    Args:
        model: of transformers, or its configuration.
        budget: bytes of the pool for both.
        tokens: what the pool holds in place of bytes, the decoder's tokens and the encoder's each.
        block_tokens, numbers: as of `BlockCache`.

    Raises:
        UsageError: the model has no encoder, or an argument cannot be used.
    """
    whole = getattr(model, "config", model)
    if not getattr(whole, "is_encoder_decoder", False):
        raise UsageError(f"{type(whole).__name__} has no encoder", "Use vramfit.BlockCache(model, ...)")
    settings = checked_settings(budget, tokens, block_tokens, numbers, 0)
    layout = checked_layout(decoder_config(model), None, 0)
    memory = CacheMemory(settings, [layout, layout])
    return BlockCachePair(BlockCache(model, memory=memory), BlockCache(model, memory=memory))
