"""Random schedules of a cache's bookkeeping: sequences added, forked, extended and finished, some without room.

The model of what should be is as plain as can be: for each sequence the list of its tokens and their columns, a
dictionary of what each place of each block was last written, and who sees what, counted out token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vramfit.errors import CacheFullError
from vramfit.inference.kv_cache.block_pool import BlockPool
from vramfit.inference.kv_cache.sequences import (
    GONE,
    BatchExtension,
    BlockRule,
    TokenSequence,
    drop,
    fork,
    release_passed,
    truncate,
)

MOST_ROWS = 8


@dataclass(kw_only=True)
class Text:
    """What a sequence holds: its tokens, the column of each, and columns in all."""

    marks: list[Hashable]
    columns: list[int]
    width: int

    def copy(self) -> Text:
        return Text(marks=list(self.marks), columns=list(self.columns), width=self.width)


class Schedules(RuleBasedStateMachine):
    """Two groups over one pool, one of them with a window; blocks of a few tokens."""

    @initialize(
        blocks=st.integers(1, 24), size=st.integers(1, 5), window=st.integers(2, 9), sinks=st.integers(0, 3)
    )
    def start(self, blocks: int, size: int, window: int, sinks: int) -> None:
        self.pool = BlockPool(blocks)
        self.size, self.window, self.sinks = size, window, sinks
        self.rules = [BlockRule(pool=self.pool), BlockRule(pool=self.pool, window=window, sinks=sinks)]
        self.rows: list[TokenSequence] = []
        self.texts: list[Text] = []
        self.written: dict[tuple[int, int, int], Hashable] = {}
        self.serial = 0
        self.failed = self.stored = 0

    @precondition(lambda self: len(self.rows) < MOST_ROWS)
    @rule(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=3))
    def add(self, prompts: list[list[int]]) -> None:
        """A batch that is padded at the left; rows that begin alike may share blocks of the first group."""
        width, first = max(map(len, prompts)), len(self.rows)
        self.serial += 1
        for _ in prompts:
            self.rows.append(TokenSequence(tables=[[], []]))
            self.texts.append(Text(marks=[], columns=[], width=0))
        new = [[(self.serial, *one[: at + 1]) for at in range(len(one))] for one in prompts]
        columns = [range(width - len(one), width) for one in prompts]
        if not self._extended(range(first, len(self.rows)), width, columns, new, prompts):
            del self.rows[first:], self.texts[first:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        """Those of one width in one step, as forks are."""
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), unique=True, min_size=1, max_size=4))
        for width in sorted({self.texts[number].width for number in chosen}):
            batch = [number for number in chosen if self.texts[number].width == width]
            for number in batch:
                release_passed(self.rows[number], width, self.rules, self.size)
            new: list[list[Hashable]] = []
            for _ in batch:
                new.append([self.serial + 1 + at for at in range(count)])
                self.serial += count
            columns = [range(width, width + count)] * len(batch)
            self._extended(batch, width + count, columns, new)

    @precondition(lambda self: self.rows and len(self.rows) < MOST_ROWS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.rows.append(fork(self.rows[row], self.rules))
        self.texts.append(self.texts[row].copy())

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        drop(self.rows.pop(row), self.rules)
        self.texts.pop(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def forget_tokens(self, data: st.DataObject) -> None:
        """As `crop` does, where no window has moved on."""
        row = data.draw(st.integers(0, len(self.rows) - 1))
        text = self.texts[row]
        if text.width < self.window:
            left = data.draw(st.integers(0, len(text.marks)))
            truncate(self.rows[row], left, self.rules, self.size)
            text.width = text.columns[left] if left < len(text.columns) else text.width
            del text.marks[left:], text.columns[left:]

    def _extended(
        self,
        batch: Sequence[int],
        width: int,
        columns: Sequence[Sequence[int]],
        new: Sequence[Sequence[Hashable]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> bool:
        """All or nothing; says which."""
        rows = [self.rows[number] for number in batch]
        tables = [[list(table) for table in row.tables] for row in rows]
        free = self.pool.free
        extension = BatchExtension(rows, width, columns, self.rules, self.size, tokens=tokens)
        needed = extension.needed()[self.pool]
        try:
            self.pool.check(needed)
        except CacheFullError:
            self.failed += 1
            assert [row.tables for row in rows] == tables and self.pool.free == free
            return False
        seen = [(len(self.texts[number].marks), self.texts[number].width) for number in batch]
        done = extension.apply()
        assert free - self.pool.free == needed
        for number, more, places in zip(batch, new, columns, strict=True):
            text = self.texts[number]
            text.marks.extend(more)
            text.columns.extend(places)
            text.width = width
            self.stored += len(more)
        for group in range(2):
            for _, source, target in done.copies[group]:
                for offset in range(self.size):
                    kept = self.written.get((group, source, offset))
                    if kept is not None:
                        self.written[group, target, offset] = kept
            for slot in done.slots[group]:
                text = self.texts[batch[slot.row]]
                self.written[group, slot.block, slot.offset] = text.marks[text.columns.index(slot.column)]
        for number, (count, before_step) in zip(batch, seen, strict=True):
            self._check_seen(number, count, before_step)  # by the first query of this step
        return True

    def _check_seen(self, number: int, count: int, width: int) -> None:
        """Of the first tokens of a row, those that a query in the column `width` sees are where the table says."""
        row, text = self.rows[number], self.texts[number]
        for token in range(count):
            # The query counts among the columns that its window shows.
            shown = width - text.columns[token] < self.window or token < self.sinks
            for group in (0, 1) if shown else (0,):
                block = row.tables[group][token // self.size]
                assert block != GONE
                assert self.written[group, block, token % self.size] == text.marks[token]

    @invariant()
    def nothing_is_lost(self) -> None:
        """Each token that a later query sees is where the table says."""
        if not hasattr(self, "rows"):
            return
        for number, (row, text) in enumerate(zip(self.rows, self.texts, strict=True)):
            assert row.columns == text.columns
            self._check_seen(number, len(text.marks), text.width)

    @invariant()
    def nothing_leaks(self) -> None:
        """Blocks are held as often as tables name them, and all others are free."""
        if hasattr(self, "rows"):
            named = Counter(block for row in self.rows for table in row.tables for block in table)
            del named[GONE]
            held = [self.pool.holders(block) for block in range(self.pool.blocks)]
            assert held == [named[block] for block in range(self.pool.blocks)]
            assert self.pool.free == held.count(0)

    def teardown(self) -> None:
        if hasattr(self, "rows"):
            for row in self.rows:
                drop(row, self.rules)
            assert self.pool.free == self.pool.blocks
