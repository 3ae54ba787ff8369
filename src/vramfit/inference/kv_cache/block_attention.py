"""Attention over a `BlockCache` block by block, without gathering: sums go on from block to block (online softmax)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_cache import BLOCK_ATTENTION, BlockCache

BLOCKS_AT_ONCE = 8
"""Blocks of each sequence that are read together: 128 tokens, as much as a tile of FlashAttention-2's forward pass."""


@contextmanager
def block_attention(model: Any) -> Iterator[None]:
    """Have a model read a `BlockCache` block by block; afterwards it attends as before.

    >>> with block_attention(model):
    ...     tokens = model.generate(**inputs, past_key_values=cache)

    What a layer reads at once is `BLOCKS_AT_ONCE` blocks of each sequence, instead of all. Products and sums are the
    same but for their order, in float32: results differ by rounding from those of the gathered cache.

    Args:
        model: a decoder-only model of transformers, whose attention can be chosen (``set_attn_implementation``).

    Raises:
        UsageError: its attention cannot be chosen.
    """
    register()
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before is None or not getattr(model, "_supports_attention_backend", False):
        raise UsageError(
            f"the attention of {type(model).__name__} cannot be chosen",
            "Use the cache without block_attention",
        )
    # Parts of a model may attend in other ways than the whole, which set_attn_implementation does not go back to.
    parts = [part.config for part in model.modules() if hasattr(part, "set_attn_implementation")]
    each = [(part, part._attn_implementation) for part in parts]
    model.set_attn_implementation(BLOCK_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        for part, own in each:  # from the whole to its parts, since what is set here goes on to parts
            part._attn_implementation = own


def register() -> None:
    """Make the name known to transformers; again is no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(BLOCK_ATTENTION, attend)
    AttentionMaskInterface.register(BLOCK_ATTENTION, sdpa_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the layer.
        query: ``[batch, query heads, columns, dim]``.
        key, value: ``[batch, heads, columns, dim]``, of new columns where they are from a `BlockCache`.
        attention_mask: ``[batch, 1, columns, columns seen]``, or None.
        dropout: while training.
        scaling: of the scores; None is one over the root of `dim`.
        kwargs: of other attentions.

    Returns:
        ``[batch, columns, query heads, dim]``, and no weights.

    Raises:
        UsageError: the attention has a part that is not computed here.
    """
    found = getattr(key, "vramfit_layer", None)
    # The attention below, which new columns alone are given to, adds a position bias, and would leave sinks out.
    for name in ("softcap", "s_aux") if found is None else ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise UsageError(
                f"{type(module).__name__} has {name}, which block attention does not compute",
                "Use the cache without block_attention",
            )
    if found is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        whole: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return whole
    cache, layer = found
    cache.read_by_blocks()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _OverBlocks(cache, layer, query, attention_mask).run(scale).to(query.dtype), None


class _OverBlocks:
    """One layer's queries over all blocks of their sequences."""

    def __init__(self, cache: BlockCache, layer: int, query: torch.Tensor, mask: torch.Tensor | None) -> None:
        batch = cache.batch
        self._batch, self._query = batch, query
        group = batch.layout.group_of(layer)
        assert group is not None
        self._store = batch.store(group)
        self._part = batch.layout.groups[group].layers.index(layer)
        self._rule = batch.rules[group]
        self._blocks, self._tokens = batch.device_table(group)
        self._size = batch.memory.settings.block_tokens
        self._first_block = batch.first_block(group)
        new = query.shape[2]
        device = query.device
        # Where no padding was told, a token's number is its column, and the mask given says what is seen.
        self._mask = mask if batch.padding_free else None
        self._begin = batch.width - new - batch.past_of(group, batch.width - new)
        steps = torch.arange(new, device=device)
        self._query_tokens = self._tokens[:, None] - new + steps[None, :]

    def run(self, scale: float) -> torch.Tensor:
        shape = self._store.form.shape
        rows, query_heads, new, width = self._query.shape
        group = query_heads // shape.heads
        query = (self._query.float() * scale).reshape(rows, shape.heads, group * new, width)
        most = query.new_full((rows, shape.heads, group * new, 1), -torch.inf)
        total = torch.zeros_like(most)
        summed = query.new_zeros(rows, shape.heads, group * new, shape.value_dim)
        for begin in range(self._first_block, self._blocks.shape[1], BLOCKS_AT_ONCE):
            blocks = self._blocks[:, begin : begin + BLOCKS_AT_ONCE]
            seen = self._seen(begin * self._size, blocks.shape[1] * self._size)
            keys = self._read(blocks, 0, rows)
            scores = torch.matmul(query, keys.transpose(2, 3).float())
            scores = scores.view(rows, shape.heads, group, new, -1).masked_fill_(~seen, -torch.inf)
            scores = scores.view(rows, shape.heads, group * new, -1)
            larger = torch.maximum(most, scores.amax(dim=-1, keepdim=True))
            # Of a row that has seen nothing yet the largest score is -inf, from which nothing can be taken away.
            safe = larger.masked_fill(larger == -torch.inf, 0)
            weights = scores.sub_(safe).exp_()
            fade = torch.exp(most - safe)
            total = total * fade + weights.sum(dim=-1, keepdim=True)
            summed = summed * fade + torch.matmul(weights, self._read(blocks, 1, rows).float())
            most = larger
        found = summed / total.masked_fill(total == 0, 1)
        return found.view(rows, query_heads, new, shape.value_dim).transpose(1, 2).contiguous()

    def _read(self, blocks: torch.Tensor, plane: int, rows: int) -> torch.Tensor:
        """``[batch, heads, tokens, dim]``."""
        found = self._store.read_blocks(self._part, blocks.reshape(-1), plane)
        return found.view(rows, -1, found.shape[2], found.shape[3]).transpose(1, 2)

    def _seen(self, begin: int, count: int) -> torch.Tensor:
        """Which tokens each query sees, ``[batch, 1, 1, columns, tokens]``."""
        tokens = torch.arange(begin, begin + count, device=self._query.device)
        ask = self._query_tokens[:, :, None]
        seen = (tokens <= ask) & (tokens < self._tokens[:, None, None])
        if self._rule.window is not None:
            seen &= (tokens > ask - self._rule.window) | (tokens < self._rule.sinks)
        if self._mask is not None:
            columns = (tokens - self._begin).clamp(0, self._mask.shape[-1] - 1)
            given = self._mask.index_select(-1, columns)
            seen = seen & (given if given.dtype == torch.bool else given == 0)[:, 0]
        return seen[:, None, None]
