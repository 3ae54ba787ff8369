"""How many sequences of which lengths fit a budget, block by block, before anything is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import torch

from vramfit.arguments import shown, whole_argument
from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_cache import checked_layout, checked_settings
from vramfit.inference.kv_cache.block_store import BlockFormat, BlockNumbers
from vramfit.inference.kv_cache.cache_layout import CacheLayout, LayerGroup, decoder_config
from vramfit.inference.kv_cache.cache_memory import PoolKey, pool_key
from vramfit.inference.kv_cache.cached_batch import Reading
from vramfit.inference.kv_cache.scratch import expected_columns
from vramfit.searching.largest import halved, largest_where


@dataclass(frozen=True, kw_only=True)
class CacheCapacity:
    """A batch that fits.

    Attributes:
        sequences: how many, from the first on.
        blocks: most that they hold at once.
        pool_bytes: a pool that has them; the budget to give `BlockCache`.
        scratch_bytes: that all layers are gathered into.
        index_bytes: of numbers that say where tokens are, while tokens are generated.
        budget: that was given.
    """

    sequences: int
    blocks: int
    pool_bytes: int
    scratch_bytes: int
    index_bytes: int
    budget: int

    @property
    def total_bytes(self) -> int:
        """All of it, as asked of the allocator (``requested_bytes``), which may leave up to 1 MiB beside a tensor."""
        return self.pool_bytes + self.scratch_bytes + self.index_bytes


def sequences_that_fit(
    model: Any,
    prompts: Sequence[int],
    *,
    budget: int | str,
    new_tokens: int,
    shared: int = 0,
    block_tokens: int = 16,
    numbers: BlockNumbers | str = BlockNumbers.MODEL,
    reading: Reading | str = Reading.GATHERED,
    window: int | None = None,
    sinks: int = 0,
    dtype: torch.dtype | None = None,
) -> CacheCapacity:
    """How many of these prompts a cache can hold together while each gets so many tokens more.

    >>> capacity = sequences_that_fit(model, [300, 1200, 80, 4000], budget="256MiB", new_tokens=64)
    >>> cache = vramfit.BlockCache(model, budget=capacity.pool_bytes)

    The count is exact for prompts that share nothing but `shared`: what the cache does, not an estimate. The model, and
    what a step computes, are beside it.

    Args:
        model: decoder-only, of transformers, or its configuration.
        prompts: tokens of each, in the order in which they are taken, those that are shared among them.
        budget: bytes of the cache: its pool, its scratch, and where tokens are.
        new_tokens: that each gets, as ``max_new_tokens``.
        shared: tokens that all begin with, computed once (``BlockCache.begin(prompts, model=model)``).
        block_tokens, numbers, window, sinks: as of `BlockCache`.
        reading: ``"gathered"``, or ``"blocks"`` without a scratch.
        dtype: of keys and values; None is the model's.

    Returns:
        the capacity, with 0 sequences where not even the first fits.

    Raises:
        UsageError: an argument cannot be used.
    """
    settings = checked_settings(budget, None, block_tokens, numbers, 0)
    limit = settings.budget
    assert limit is not None
    whole_argument("new_tokens", new_tokens, least=1)
    lengths = [whole_argument("a prompt's tokens", one, least=1) for one in prompts]
    if not lengths:
        raise UsageError("there are no prompts", "Give the tokens of each")
    whole_argument("shared", shared, least=0, most=min(lengths) - 1)
    config = decoder_config(model)
    kind = _dtype_of(model, config) if dtype is None else dtype
    plan = _Plan(
        layout=checked_layout(config, window, sinks),
        block_tokens=settings.block_tokens,
        numbers=settings.numbers,
        reading=_checked_reading(reading),
        dtype=kind,
        new_tokens=new_tokens,
        shared=shared,
        budget=limit,
    )
    # All parts grow with the batch, so the largest that fits is found by halving.
    largest = largest_where(
        lambda count: plan.capacity(lengths[:count]).total_bytes <= limit, halved(len(lengths))
    )
    return plan.capacity(lengths[: largest.value])


@dataclass(frozen=True, kw_only=True)
class _Plan:
    layout: CacheLayout
    block_tokens: int
    numbers: BlockNumbers
    reading: Reading
    dtype: torch.dtype
    new_tokens: int
    shared: int
    budget: int

    def capacity(self, prompts: Sequence[int]) -> CacheCapacity:
        """What a batch takes."""
        if not prompts:
            return CacheCapacity(
                sequences=0, blocks=0, pool_bytes=0, scratch_bytes=0, index_bytes=0, budget=self.budget
            )
        held = self._blocks(prompts)
        forms = {key: self._form(key) for key in held}
        sizes = {key: count * forms[key].block_bytes for key, count in held.items()}
        weights = {key: forms[key].block_bytes * self._groups(key) for key in held}
        # A budget is split among pools in proportion to a token's bytes, so the fullest one says how much is needed.
        pool = max(ceil(Fraction(size * sum(weights.values()), weights[key])) for key, size in sizes.items())
        return CacheCapacity(
            sequences=len(prompts),
            blocks=sum(held.values()),
            pool_bytes=pool,
            scratch_bytes=self._scratch(prompts),
            index_bytes=self._index(prompts),
            budget=self.budget,
        )

    def _form(self, key: PoolKey) -> BlockFormat:
        return BlockFormat(
            tokens=self.block_tokens, layers=key[1], shape=key[0], dtype=self.dtype, numbers=self.numbers
        )

    def _groups(self, key: PoolKey) -> int:
        return sum(pool_key(group) == key for group in self.layout.groups)

    def _blocks(self, prompts: Sequence[int]) -> dict[PoolKey, int]:
        """Most blocks of each pool that are held at once."""
        totals: dict[PoolKey, Any] = {}
        for group in self.layout.groups:
            key = pool_key(group)
            totals[key] = totals.get(key, 0) + self._by_step(group, prompts)
        return {key: int(np.max(total)) for key, total in totals.items()}

    def _by_step(self, group: LayerGroup, prompts: Sequence[int]) -> Any:
        """Blocks that a group holds at each step: after the prompt, and after each token that is read back."""
        size = self.block_tokens
        steps = np.arange(self.new_tokens)
        tokens = np.array(prompts)[:, None] + steps[None, :]
        last = -(-tokens // size)
        if group.window is None:
            common, kept = self._shared_blocks(prompts)
            return (last - common).sum(axis=0) + kept
        # The first token that the query before sees: what it no longer sees is released before the next is stored.
        before = np.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
        first = np.maximum(before - (group.window - 1), 0)
        gone = np.maximum(first // size - -(-group.sinks // size), 0)
        return (last - gone).sum(axis=0)

    def _shared_blocks(self, prompts: Sequence[int]) -> tuple[int, int]:
        """Blocks of the common beginning that no row holds for itself, and those that are held for all."""
        size = self.block_tokens
        ragged = len(set(prompts)) > 1
        if self.shared < size:
            return self.shared // size, self.shared // size
        if self.layout.windowed and ragged:
            return self.shared // size, self.shared // size
        return self.shared // size, -(-self.shared // size)

    def _scratch(self, prompts: Sequence[int]) -> int:
        if self.reading is Reading.BLOCKS or not self._reads():
            return 0
        room = max(prompts) + self.new_tokens
        sizes = (
            len(prompts) * expected_columns(room, group.window, group.sinks) * group.shape.numbers
            for group in self.layout.groups
        )
        return max(sizes) * self.dtype.itemsize

    def _index(self, prompts: Sequence[int]) -> int:
        """Where each group reads, after the last step, when it is largest."""
        rows, total = len(prompts), 0
        if self.reading is Reading.BLOCKS or not self._reads():
            return 0
        columns = max(prompts) + self.new_tokens - 1
        for group in self.layout.groups:
            heads = group.shape.heads
            seen = columns if group.window is None else min(columns, group.window + group.sinks)
            total += 4 * rows * heads * seen
        return total

    def _reads(self) -> bool:
        """Whether anything is read back: not where each prompt gives one token, unless its beginning is shared."""
        return self.new_tokens > 1 or (self.shared >= self.block_tokens and not self.layout.windowed)


def _checked_reading(reading: Any) -> Reading:
    try:
        return Reading(reading)
    except ValueError:
        names = " or ".join(repr(one.value) for one in Reading)
        raise UsageError(f"reading={shown(reading)} is no way to read a cache", f"Give {names}") from None


def _dtype_of(model: Any, config: Any) -> torch.dtype:
    for found in (getattr(model, "dtype", None), getattr(config, "dtype", None)):
        if isinstance(found, torch.dtype):
            return found
    return torch.float32
