"""A batch of sequences in a cache: steps that lengthen it, what layers write and read, forks, and what is dropped."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from vramfit.errors import UsageError
from vramfit.inference.kv_cache.block_pool import BlockPool
from vramfit.inference.kv_cache.block_store import BlockTensors
from vramfit.inference.kv_cache.cache_layout import CacheLayout
from vramfit.inference.kv_cache.cache_memory import CacheMemory, pool_key
from vramfit.inference.kv_cache.row_index import RowIndex, WriteIndex
from vramfit.inference.kv_cache.scratch import expected_columns, scratch_columns
from vramfit.inference.kv_cache.sequences import (
    GONE,
    BatchExtension,
    BlockRule,
    TokenSequence,
    blocks_of,
    drop,
    fork,
    release_passed,
    truncate,
)

T = TypeVar("T")


def repeated(items: Sequence[T], copies: int) -> tuple[T, ...]:
    """Each item as many times, one beside the other."""
    return tuple(item for item in items for _ in range(copies))


class Reading(enum.Enum):
    """How attention reads a cache."""

    GATHERED = "gathered"
    BLOCKS = "blocks"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is known of the columns that come next.

    Attributes:
        width: columns when all of it has come.
        columns: of each row, those that are no padding, ascending.
        tokens: of each row, what stands there, where rows may share blocks; None where that is not known.
        room: columns that the batch will have at last, where that is known.
    """

    width: int
    columns: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...] | None = None
    room: int = 0


class CachedBatch:
    """The sequences of a cache, row by row of the padded batch.

    Args:
        layout: of the model's layers.
        memory: where blocks are from.
    """

    def __init__(self, layout: CacheLayout, memory: CacheMemory) -> None:
        self.layout, self.memory = layout, memory
        self.rows: list[TokenSequence] = []
        self.width = 0
        self.earliest: int | None = None
        self.room = 0
        self.reclaim: Callable[[BlockPool, int], None] = lambda _pool, _blocks: None
        self._prompt: Prompt | None = None
        self._pending: set[int] = set()
        self._own = frozenset(layer for group in layout.groups for layer in group.layers)
        self._part = {layer: at for group in layout.groups for at, layer in enumerate(group.layers)}
        self._rules: list[BlockRule] = []
        self._index: list[RowIndex] = []
        self._writes: list[WriteIndex] = []
        self._new = 0

    # What is known of it

    @property
    def rules(self) -> list[BlockRule]:
        """What each group keeps; there are none before the first states have come."""
        if not self._rules and self.memory.made:
            self._rules = [
                BlockRule(pool=self.memory.pools[pool_key(group)], window=group.window, sinks=group.sinks)
                for group in self.layout.groups
            ]
            self._index = [RowIndex() for _ in self.layout.groups]
        return self._rules

    def store(self, group: int) -> BlockTensors:
        """Where the blocks of a group are."""
        return self.memory.stores[pool_key(self.layout.groups[group])]

    def width_of(self, layer: int) -> int:
        """Columns that a layer has had; within a step, layers come one after the other."""
        return self.width - self._new if layer in self._pending else self.width

    def past_of(self, group: int, width: int) -> int:
        """Columns of the past that the next query of a group's layers sees."""
        if self.layout.groups[group].window is None:
            return width
        return self.rules[group].past(width) if self.rules else 0

    @property
    def padding_free(self) -> bool:
        """Whether every column of every row is a token, as far as the cache was told."""
        return all(row.tokens == self.width for row in self.rows)

    def first_block(self, group: int) -> int:
        """The first place in the tables of a group that a query of this step sees; sinks are at the beginning."""
        rule, size = self.rules[group], self.memory.settings.block_tokens
        if rule.window is None or rule.sinks:
            return 0
        before = self.width - self._new
        return min((rule.first_kept(row.columns, before) for row in self.rows), default=0) // size

    # What comes and goes

    def expect(self, prompt: Prompt) -> None:
        """Say what comes next."""
        self._prompt = prompt
        self.room = max(self.room, prompt.room)

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, reading: Reading
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take a layer's new states, and give all that its queries see.

        Args:
            layer: its number.
            keys, values: ``[batch, heads, columns, dim]``.
            reading: how they are read; what is read by blocks is not given here, but the new states alone.

        Raises:
            UsageError: the batch is another than before.
            CacheFullError: there are no blocks for it; nothing has changed then.
        """
        if layer not in self._pending:
            self._begin(keys)
        self._pending.discard(layer)
        group = self._group(layer)
        self._check_shape(layer, group, keys, values)
        self._writes[group].write(self.store(group), self._part[layer], keys, values)
        past = self.past_of(group, self.width - self._new)
        if past and reading is Reading.GATHERED:
            keys, values = self.gather(layer, keys, values)
        if not self._pending:
            self._writes = []
            if reading is Reading.GATHERED and self.earliest is None:
                self._release_passed()
        return keys, values

    def gather(
        self, layer: int, keys: torch.Tensor | None = None, values: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in the scratch, ``[batch, heads, columns, dim]``, contiguous.

        Args:
            layer: its number.
            keys, values: new states, which stand at the end; without them, all is as stored.
        """
        group = self._group(layer)
        store, index = self.store(group), self._index[group]
        shape = store.form.shape
        new = 0 if keys is None else self._new
        past = self.past_of(group, self.width - new)
        columns = past + new
        begin = self.width - columns
        sinks = self._moved_sinks(group, begin)
        rows = index.device_rows(begin, self.width, shape.heads, store.device, sinks)
        batch = len(self.rows)
        lanes = batch * shape.heads
        rule = self.rules[group]
        expected = expected_columns(self.room, rule.window, rule.sinks)
        room = lanes * scratch_columns(columns, expected) * (shape.key_dim + shape.value_dim)
        buffer = self.memory.scratch.reserve(room, store.form.dtype, store.device)
        found, at = [], 0
        for plane, (dim, states) in enumerate(((shape.key_dim, keys), (shape.value_dim, values))):
            out = buffer[at : at + lanes * columns * dim].view(lanes * columns, dim)
            at += lanes * columns * dim
            store.read(self._part[layer], rows, plane, out)
            whole = out.view(batch, shape.heads, columns, dim)
            # Padding, what leaves a window within this step and 8-bit blocks do not give these back.
            if states is not None and (new > 1 or store.form.int8):
                whole[:, :, past:].copy_(states)
            found.append(whole)
        return found[0], found[1]

    def select(self, chosen: Sequence[int]) -> None:
        """Make these rows the batch; a row that is chosen more than once is forked."""
        rows = [fork(self.rows[one], self.rules) for one in chosen]
        for row in self.rows:
            drop(row, self.rules)
        self.rows = rows
        for index in self._index:
            index.take(chosen)

    def finish(self, row: int) -> None:
        """Give a row's blocks back; what it is given from now on is not kept."""
        drop(self.rows[row], self.rules)
        for index in self._index:
            index.clear(row)

    def crop(self, columns: int) -> None:
        """Forget the last columns, and what has left a window until then."""
        size = self.memory.settings.block_tokens
        self.width -= columns
        for row in self.rows:
            if not row.finished:
                left = sum(column < self.width for column in row.columns) if columns else row.tokens
                truncate(row, left, self.rules, size)
        self.earliest = None if self.earliest is None else self.width
        for index in self._index:
            index.changed()
        self._release_passed()

    def clear(self) -> None:
        """Drop all sequences."""
        for row in self.rows:
            drop(row, self.rules)
        self.adopt([], 0)

    def adopt(self, rows: list[TokenSequence], width: int) -> None:
        """Go on with other sequences, whose blocks are held for this batch; those that it had are not dropped."""
        self.rows, self.width = rows, width
        self.earliest = None if self.earliest is None else width
        self._prompt, self._pending, self._new, self.room = None, set(), 0, 0
        for group, index in enumerate(self._index):
            index.rebuild(rows, group, width, self.store(group), self.memory.settings.block_tokens)

    def _moved_sinks(self, group: int, begin: int) -> list[tuple[int, list[int]]]:
        """Rows whose first tokens have left the window, and are shown in its first columns."""
        sinks = self.layout.groups[group].sinks
        found = []
        for number, row in enumerate(self.rows):
            if sinks and not row.finished and row.columns and row.columns[0] < begin:
                found.append((number, row.columns[:sinks]))
        return found

    # Parts of a step

    def _begin(self, keys: torch.Tensor) -> None:
        if self._pending:
            missing = min(self._pending)
            raise UsageError(
                f"the step before ended early: layer {missing} was given no states",
                "Call reset() on the cache, and read the prompt again",
            )
        if torch.is_grad_enabled() and keys.requires_grad:
            raise UsageError(
                "a cache of blocks is written in place, which gradients cannot pass",
                "Generate within torch.inference_mode() or torch.no_grad()",
            )
        batch, _, new, _ = keys.shape
        self._repeat_prompt(batch)
        if self.rows and len(self.rows) != batch:
            raise UsageError(
                f"the cache holds {len(self.rows)} sequences and is given states of {batch}",
                "Call reset() before another batch",
            )
        if not self.memory.made:
            self.memory.make(keys.dtype, keys.device)
        rules, size = self.rules, self.memory.settings.block_tokens
        rows = self.rows or [TokenSequence(tables=[[] for _ in rules]) for _ in range(batch)]
        columns, tokens = self._next_columns(rows, new)
        if self.earliest is None:
            self._release_passed()
        extension = BatchExtension(
            rows, self.width + new, columns, rules, size, tokens=tokens, earliest=self.earliest
        )
        for pool, needed in extension.needed().items():
            if needed > pool.free:
                self.reclaim(pool, needed - pool.free)
            pool.check(needed)
        done = extension.apply()
        self.rows, self.width, self._new = rows, self.width + new, new
        self._pending = set(self._own)
        self._writes = []
        for group, index in enumerate(self._index):
            store = self.store(group)
            index.grow(batch, self.width)
            for row, source, target in done.copies[group]:
                store.copy_block(source, target)
                index.move(row, source, target, store.form.rows)
            index.add(done.slots[group], store)
            index.add(done.shared[group], store)
            self._writes.append(WriteIndex(done.slots[group], store, batch, self.width - new, new))

    def _repeat_prompt(self, batch: int) -> None:
        """Beams and several returned sequences: ``generate`` repeats each prompt, one beside the other."""
        prompt = self._prompt
        if prompt is None or self.width >= prompt.width or batch % len(prompt.columns):
            return
        copies = batch // len(prompt.columns)
        if copies == 1 or (self.rows and len(self.rows) != len(prompt.columns)):
            return
        tokens = None if prompt.tokens is None else repeated(prompt.tokens, copies)
        self._prompt = replace(prompt, columns=repeated(prompt.columns, copies), tokens=tokens)
        if self.rows:
            self.select([row for row in range(len(self.rows)) for _ in range(copies)])

    def _next_columns(
        self, rows: Sequence[TokenSequence], new: int
    ) -> tuple[list[Sequence[int]], list[Sequence[int]] | None]:
        """Columns of each row's new tokens, and what these tokens are, where that is known."""
        prompt, begin, end = self._prompt, self.width, self.width + new
        if prompt is None or begin >= prompt.width:
            return [() if row.finished else range(begin, end) for row in rows], None
        if len(prompt.columns) != len(rows) or end > prompt.width:
            raise UsageError(
                f"the cache expects {len(prompt.columns)} prompts of {prompt.width} columns, and is given columns "
                f"{begin} to {end} of {len(rows)}",
                "Give generate() the inputs that begin() has returned, or call reset()",
            )
        columns: list[Sequence[int]] = []
        tokens: list[Sequence[int]] = []
        for number, row in enumerate(prompt.columns):
            inside = [at for at, column in enumerate(row) if begin <= column < end]
            columns.append([] if rows[number].finished else [row[at] for at in inside])
            if prompt.tokens is not None:
                tokens.append([prompt.tokens[number][at] for at in inside])
        return columns, tokens if prompt.tokens is not None else None

    def _release_passed(self) -> None:
        width = self.width if self.earliest is None else self.earliest
        if self.layout.windowed:
            for row in self.rows:
                release_passed(row, width, self.rules, self.memory.settings.block_tokens)

    def _group(self, layer: int) -> int:
        group = self.layout.group_of(layer)
        if group is None:
            raise UsageError(
                f"layer {layer} keeps nothing in a cache of this model, and was given states",
                "Make the cache of the model that it is used with",
            )
        return group

    def _check_shape(self, layer: int, group: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = self.store(group).form.shape
        given = (keys.shape[1], keys.shape[-1], values.shape[-1])
        if given != (shape.heads, shape.key_dim, shape.value_dim):
            raise UsageError(
                f"layer {layer} has {given[0]} heads of {given[1]} and {given[2]} numbers, and the configuration says "
                f"{shape.heads} of {shape.key_dim} and {shape.value_dim}",
                "Leave the cache out: its layout is another",
            )

    def held(self, group: int) -> list[int]:
        """Blocks that the batch holds in a group, once for each row."""
        return list(blocks_of(self.rows, group))

    def filled(self, group: int) -> dict[int, int]:
        """Tokens in each block of a group."""
        size = self.memory.settings.block_tokens
        found: dict[int, int] = {}
        for row in self.rows:
            for place, block in enumerate(row.tables[group]):
                if block != GONE:
                    found[block] = max(found.get(block, 0), min(size, row.tokens - place * size))
        return found

    def device_table(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of each row ``[batch, blocks]`` (0 where there is none) and tokens of each row ``[batch]``, int64."""
        tables = [row.tables[group] for row in self.rows]
        longest = max(map(len, tables), default=0)
        whole = np.zeros((len(tables), longest), dtype=np.int64)
        for number, table in enumerate(tables):
            whole[number, : len(table)] = np.maximum(table, 0)
        device = self.store(group).device
        counts = [0 if row.finished else row.tokens for row in self.rows]
        return torch.from_numpy(whole).to(device), torch.tensor(counts).to(device)
