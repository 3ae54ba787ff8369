"""The memory of a cache: a pool of blocks for each shape of heads, the scratch, and blocks on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_pool import BlockPool
from vramfit.inference.kv_cache.block_store import BlockFormat, BlockNumbers, BlockTensors
from vramfit.inference.kv_cache.cache_layout import CacheLayout, HeadShape, LayerGroup
from vramfit.inference.kv_cache.scratch import GatherScratch
from vramfit.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """What a cache may take.

    Attributes:
        budget: bytes of all pools; None where `tokens` says how much.
        tokens: that all layers can hold.
        block_tokens: tokens of a block.
        numbers: what blocks hold.
        host: bytes of the host that blocks are spilled to.
    """

    budget: int | None = None
    tokens: int | None = None
    block_tokens: int = 16
    numbers: BlockNumbers = BlockNumbers.MODEL
    host: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """One pool, before it is made.

    Attributes:
        form: of its blocks.
        groups: that take blocks from it.
        blocks: how many it gets.
    """

    form: BlockFormat
    groups: int
    blocks: int


PoolKey = tuple[HeadShape, int]
"""Shape of heads, and layers of a block."""


def pool_key(group: LayerGroup) -> PoolKey:
    """The pool that a group takes blocks from."""
    return group.shape, len(group.layers)


def pool_sizes(
    layouts: list[CacheLayout], settings: CacheSettings, dtype: torch.dtype
) -> dict[PoolKey, PoolSize]:
    """How many blocks each pool gets.

    Raises:
        UsageError: they would not hold one block for each group.
    """
    groups: dict[PoolKey, int] = {}
    for layout in layouts:
        for group in layout.groups:
            groups[pool_key(group)] = groups.get(pool_key(group), 0) + 1
    forms = {
        key: BlockFormat(
            tokens=settings.block_tokens, layers=key[1], shape=key[0], dtype=dtype, numbers=settings.numbers
        )
        for key in groups
    }
    least = sum(groups[key] * forms[key].block_bytes for key in groups)
    found = {}
    for key, form in forms.items():
        if settings.tokens is not None:
            blocks = groups[key] * -(-settings.tokens // settings.block_tokens)
        else:
            mine = (settings.budget or 0) * groups[key] * form.block_bytes // least
            blocks = mine // form.block_bytes
        if blocks < groups[key]:
            raise UsageError(
                f"a budget of {format_bytes(settings.budget or 0)} holds no block of {settings.block_tokens} tokens "
                "for every layer",
                f"Give {format_bytes(least)} or more",
            )
        found[key] = PoolSize(form=form, groups=groups[key], blocks=blocks)
    return found


class CacheMemory:
    """Pools, their stores, the scratch and the host's blocks; made when the first states come, which say their dtype.

    Args:
        settings: what it may take.
        layouts: of all caches that share it.
    """

    def __init__(self, settings: CacheSettings, layouts: list[CacheLayout]) -> None:
        self.settings, self.layouts = settings, layouts
        self.scratch = GatherScratch()
        self.pools: dict[PoolKey, BlockPool] = {}
        self.stores: dict[PoolKey, BlockTensors] = {}
        self.host_pools: dict[PoolKey, BlockPool] = {}
        self._host_stores: dict[PoolKey, BlockTensors] = {}

    @property
    def made(self) -> bool:
        """Whether it has been made."""
        return bool(self.stores)

    @property
    def pool_bytes(self) -> int:
        """Of all pools on the device."""
        return sum(store.bytes for store in self.stores.values())

    @property
    def host_bytes(self) -> int:
        """Of blocks that are on the host now."""
        return sum(
            pool.used * self._host_stores[key].form.block_bytes
            for key, pool in self.host_pools.items()
            if key in self._host_stores
        )

    def make(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make the pools.

        Raises:
            UsageError: the budget is too small.
        """
        sizes = pool_sizes(self.layouts, self.settings, dtype)
        for key, size in sizes.items():
            self.pools[key] = BlockPool(size.blocks)
            self.stores[key] = BlockTensors(size.form, size.blocks, device)
            share = self.settings.host * size.groups * size.form.block_bytes
            whole = sum(one.groups * one.form.block_bytes for one in sizes.values())
            self.host_pools[key] = BlockPool(share // whole // size.form.block_bytes)

    def host_store(self, key: PoolKey) -> BlockTensors:
        """Blocks of the host, made at their first use."""
        if key not in self._host_stores:
            store = self.stores[key]
            self._host_stores[key] = BlockTensors(
                store.form, self.host_pools[key].blocks, torch.device("cpu"), beside=store.device
            )
        return self._host_stores[key]

    def free(self) -> None:
        """Give all memory back."""
        self.scratch.free()
        for several in (self.pools, self.stores, self.host_pools, self._host_stores):
            several.clear()
