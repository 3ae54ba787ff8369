"""Sequences beside the batch: beginnings that later calls find by their tokens, and batches that wait on the host."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vramfit.errors import CacheFullError, UsageError
from vramfit.inference.kv_cache.block_pool import BlockPool
from vramfit.inference.kv_cache.cache_memory import pool_key
from vramfit.inference.kv_cache.cached_batch import CachedBatch
from vramfit.inference.kv_cache.sequences import (
    GONE,
    BlockRule,
    TokenSequence,
    blocks_of,
    drop,
    fork,
    truncate,
)

Tokens = tuple[int, ...]


@dataclass(eq=False, kw_only=True)
class ParkedSequences:
    """Sequences whose blocks are on the host: their tables name blocks there.

    Attributes:
        rows: the sequences.
        width: columns of the batch.
        owner: the only one who finds their blocks; gone with its cache, or with what that has freed.
        back: whether they have been brought back.
    """

    rows: list[TokenSequence]
    width: int
    owner: weakref.ref[KeptSequences]
    back: bool = False


class KeptSequences:
    """What is held for later.

    Kept beginnings give way when the pool has no free block: the one that was found least lately first, to the host if
    there is room, or for good.

    Args:
        batch: whose sequences are kept and taken up again.
    """

    def __init__(self, batch: CachedBatch) -> None:
        self._batch = batch
        self._kept: OrderedDict[Tokens, TokenSequence | ParkedSequences] = OrderedDict()
        mine = weakref.ref(self)  # no circle: what is dropped gives its memory back at once

        def reclaim(pool: BlockPool, blocks: int) -> None:
            kept = mine()
            if kept is not None:
                kept._reclaim(pool, blocks)

        batch.reclaim = reclaim

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tokens: Tokens, row: int) -> None:
        """Keep a row's first tokens.

        Raises:
            UsageError: the row has fewer, or a window has passed over some.
        """
        batch = self._batch
        if not 0 <= row < len(batch.rows) or batch.rows[row].finished:
            raise UsageError(f"row {row} holds no sequence", f"The batch has {len(batch.rows)}")
        if not tokens or batch.rows[row].tokens < len(tokens):
            raise UsageError(
                f"row {row} has {batch.rows[row].tokens} tokens, not the {len(tokens)} that are to be kept"
            )
        if batch.layout.windowed and batch.rows[row].tokens > len(tokens):
            raise UsageError(
                "a layer's window has moved on behind these tokens", "Keep the row before it gets more tokens"
            )
        copy = fork(batch.rows[row], batch.rules)
        truncate(copy, len(tokens), batch.rules, batch.memory.settings.block_tokens)
        copy.columns = list(range(len(tokens)))
        self._forget(tokens)
        self._kept[tokens] = copy

    def find(self, tokens: Tokens) -> int:
        """Make the longest beginning that was kept the only row of the batch; says how many tokens it has."""
        best, found = 0, None
        for kept in self._kept:
            same = _same(kept, tokens)
            if self._batch.layout.windowed and same < len(kept):
                continue  # the window before its last token is all that is left
            if same > best:
                best, found = same, kept
        if found is None:
            return 0
        self._kept.move_to_end(found)
        entry = self._kept[found]
        if isinstance(entry, ParkedSequences):
            entry = self._kept[found] = self._fetched(entry)[0]
        batch = self._batch
        row = fork(entry, batch.rules)
        truncate(row, best, batch.rules, batch.memory.settings.block_tokens)
        batch.adopt([row], best)
        return best

    def park(self) -> ParkedSequences:
        """Take the batch to the host.

        Raises:
            CacheFullError: there is no room; nothing has changed.
        """
        batch = self._batch
        rows, width = batch.rows, batch.width
        if not rows:
            raise UsageError("the cache holds no sequences to park")
        parked = self._spilled(rows, width)
        batch.adopt([], 0)
        return parked

    def resume(self, parked: ParkedSequences) -> None:
        """Bring a batch back.

        Raises:
            UsageError: it is back already, or of another cache, or the cache has given its memory back since.
            CacheFullError: there is no room; it stays on the host.
        """
        if parked.owner() is not self:
            raise UsageError(
                "these sequences are not on the host for this cache",
                "Resume them in the cache that parked them, before its free()",
            )
        self._batch.adopt(self._fetched(parked), parked.width)

    def clear(self) -> None:
        """Forget all that was kept."""
        for tokens in list(self._kept):
            self._forget(tokens)

    def _forget(self, tokens: Tokens) -> None:
        entry = self._kept.pop(tokens, None)
        if isinstance(entry, TokenSequence):
            drop(entry, self._batch.rules)
        elif entry is not None:
            self._leave_host(entry)

    def _leave_host(self, parked: ParkedSequences) -> None:
        for row in parked.rows:
            drop(row, self._host_rules())
        parked.back = True

    def _reclaim(self, pool: BlockPool, blocks: int) -> None:
        """Free blocks of kept beginnings until there are so many more, or none is left."""
        goal = pool.free + blocks
        for tokens, entry in list(self._kept.items()):
            if pool.free >= goal:
                return
            if isinstance(entry, ParkedSequences) or not self._alone(entry):
                continue
            try:
                self._kept[tokens] = self._spilled([entry], len(tokens))
            except CacheFullError:
                self._forget(tokens)

    def _alone(self, entry: TokenSequence) -> bool:
        """Whether giving it up frees a block: what the batch goes on with frees none."""
        return any(
            rule.pool.holders(block) == 1
            for group, rule in enumerate(self._batch.rules)
            for block in entry.tables[group]
            if block != GONE
        )

    def _host_rules(self) -> list[BlockRule]:
        batch = self._batch
        return [
            replace(rule, pool=batch.memory.host_pools[pool_key(group)])
            for rule, group in zip(batch.rules, batch.layout.groups, strict=True)
        ]

    def _spilled(self, rows: list[TokenSequence], width: int) -> ParkedSequences:
        moved = self._moved(rows, self._host_rules())
        for row in rows:
            drop(row, self._batch.rules)
        return ParkedSequences(rows=moved, width=width, owner=weakref.ref(self))

    def _fetched(self, parked: ParkedSequences) -> list[TokenSequence]:
        if parked.back:
            raise UsageError("these sequences have been brought back already", "park() gives them anew")
        moved = self._moved(parked.rows, self._batch.rules, reclaim=self._reclaim)
        self._leave_host(parked)
        return moved

    def _moved(
        self,
        rows: list[TokenSequence],
        rules: Sequence[BlockRule],
        reclaim: Callable[[BlockPool, int], None] = lambda _pool, _blocks: None,
    ) -> list[TokenSequence]:
        """The same sequences over blocks of other pools, shared among them as before; all or nothing."""
        memory, layout = self._batch.memory, self._batch.layout
        different = [sorted(set(blocks_of(rows, group))) for group in range(len(rules))]
        for pool in dict.fromkeys(rule.pool for rule in rules):
            needed = sum(
                len(blocks) for blocks, rule in zip(different, rules, strict=True) if rule.pool is pool
            )
            if needed > pool.free:
                reclaim(pool, needed - pool.free)
            pool.check(needed)
        moved = [replace(row, columns=list(row.columns), tables=list(row.tables)) for row in rows]
        for group, rule in enumerate(rules):
            key = pool_key(layout.groups[group])
            names = {block: rule.pool.take() for block in different[group]}
            device, host = memory.stores[key], memory.host_store(key) if names else None
            source, target = (host, device) if rule.pool is memory.pools[key] else (device, host)
            for block, name in names.items():
                assert source is not None and target is not None
                source.copy_block(block, name, target)
            seen: set[int] = set()
            for row in moved:
                table = row.tables[group] = [names.get(block, GONE) for block in row.tables[group]]
                for block in table:
                    if block in seen:
                        rule.pool.share(block)
                    elif block != GONE:
                        seen.add(block)
        return moved


def _same(first: Tokens, second: Tokens) -> int:
    """Tokens that both begin with."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))
