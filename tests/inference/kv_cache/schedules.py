"""Random schedules of a cache's bookkeeping: sequences added, forked, extended and finished, some without room.

The model of what should be is as plain as can be: for each sequence the list of its tokens, and a dictionary of what
each place of each block was last written.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vramfit.errors import CacheFullError
from vramfit.inference.kv_cache.block_pool import BlockPool
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


class Schedules(RuleBasedStateMachine):
    """Two groups over one pool, one of them with a window; blocks of a few tokens."""

    @initialize(
        blocks=st.integers(1, 24), size=st.integers(1, 5), window=st.integers(2, 9), sinks=st.integers(0, 3)
    )
    def start(self, blocks: int, size: int, window: int, sinks: int) -> None:
        self.pool = BlockPool(blocks)
        self.size = size
        self.rules = [BlockRule(pool=self.pool), BlockRule(pool=self.pool, window=window, sinks=sinks)]
        self.rows: list[TokenSequence] = []
        self.texts: list[list[int]] = []
        self.written: dict[tuple[int, int, int], int] = {}
        self.serial = 0
        self.failed = 0

    @rule(count=st.integers(1, 9))
    def add(self, count: int) -> None:
        row = TokenSequence(tables=[[], []])
        self.rows.append(row)
        self.texts.append([])
        if not self._extend([len(self.rows) - 1], count):
            self.rows.pop()
            self.texts.pop()

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 5))
    def extend(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.integers(0, len(self.rows) - 1), unique=True, min_size=1, max_size=4))
        self._extend(chosen, count)

    @precondition(lambda self: self.rows and len(self.rows) < 8)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.rows.append(fork(self.rows[row], self.rules))
        self.texts.append(list(self.texts[row]))

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
        if self.rows[row].tokens < (self.rules[1].window or 0):
            left = data.draw(st.integers(0, self.rows[row].tokens))
            truncate(self.rows[row], left, self.rules, self.size)
            del self.texts[row][left:]

    def _extend(self, chosen: Sequence[int], count: int) -> bool:
        """One after the other, as sequences of other widths; all or nothing for each."""
        for number in chosen:
            row = self.rows[number]
            width = row.tokens
            release_passed(row, width, self.rules, self.size)
            before = [list(table) for table in row.tables]
            extension = BatchExtension(
                [row], width + count, [range(width, width + count)], self.rules, self.size
            )
            needed = extension.needed()[self.pool]
            free = self.pool.free
            try:
                self.pool.check(needed)
            except CacheFullError:
                self.failed += 1
                assert row.tables == before and self.pool.free == free
                return False
            done = extension.apply()
            assert free - self.pool.free == needed
            for group in range(2):
                for _, source, target in done.copies[group]:
                    for offset in range(self.size):
                        kept = self.written.get((group, source, offset))
                        if kept is not None:
                            self.written[group, target, offset] = kept
            for _ in range(count):
                self.serial += 1
                self.texts[number].append(self.serial)
            for group in range(2):
                for slot in done.slots[group]:
                    self.written[group, slot.block, slot.offset] = self.texts[number][slot.column]
        return True

    @invariant()
    def nothing_is_lost(self) -> None:
        """Each token that a later query sees is where the table says."""
        if not hasattr(self, "rows"):
            return
        for row, text in zip(self.rows, self.texts, strict=True):
            for group, one in enumerate(self.rules):
                first = one.first_kept(row.columns, row.tokens)
                for token, mark in enumerate(text):
                    if token >= first or token < one.sinks:
                        block = row.tables[group][token // self.size]
                        assert block != GONE
                        assert self.written[group, block, token % self.size] == mark

    @invariant()
    def nothing_leaks(self) -> None:
        """Blocks are held as often as tables name them, and all others are free."""
        if hasattr(self, "rows"):
            held = [block for group in range(2) for block in blocks_of(self.rows, group)]
            assert self.pool.agrees_with(held)

    def teardown(self) -> None:
        if hasattr(self, "rows"):
            for row in self.rows:
                drop(row, self.rules)
            assert self.pool.free == self.pool.blocks
