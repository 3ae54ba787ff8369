"""Sequences of tokens over blocks: which block holds which token, and what extending and forking them takes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vramfit.inference.kv_cache.block_pool import BlockPool

GONE = -1
"""In a table: a block that is no longer needed, or was never stored."""


@dataclass(frozen=True, kw_only=True)
class BlockRule:
    """What the layers of one group keep.

    Attributes:
        pool: where their blocks are from.
        window: columns that a query sees, itself among them; None is all.
        sinks: first tokens of a sequence that are kept beside a window.
    """

    pool: BlockPool
    window: int | None = None
    sinks: int = 0

    def past(self, width: int) -> int:
        """Columns of the past that the next query sees, of so many."""
        return width if self.window is None else min(width, self.window - 1 + self.sinks)

    def first_kept(self, columns: Sequence[int], width: int) -> int:
        """The first token that the next query sees, sinks aside."""
        if self.window is None:
            return 0
        return bisect_left(columns, width - (self.window - 1))


@dataclass(kw_only=True)
class TokenSequence:
    """One sequence.

    Attributes:
        columns: the column of each token in the padded batch, ascending.
        tables: for each group the blocks, the first of which holds the first tokens; `GONE` where there is none.
        finished: it gets no more tokens and holds no blocks.
    """

    columns: list[int] = field(default_factory=list)
    tables: list[list[int]]
    finished: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens it has had."""
        return len(self.columns)


class TokenSlot(NamedTuple):
    """Where a new token goes.

    Attributes:
        row: of the batch.
        column: of the padded batch.
        block, offset: the block, and the place in it.
    """

    row: int
    column: int
    block: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What a step changes, group by group.

    Attributes:
        copies: blocks that were shared and are written to from now on: (row, from, to).
        slots: where new tokens are written.
        shared: where new tokens are that another row of this step writes.
    """

    copies: list[list[tuple[int, int, int]]]
    slots: list[list[TokenSlot]]
    shared: list[list[TokenSlot]]


def blocks_of(sequences: Iterable[TokenSequence], group: int) -> Iterator[int]:
    """Blocks that sequences hold in a group, once for each holder."""
    for sequence in sequences:
        yield from (block for block in sequence.tables[group] if block != GONE)


def fork(sequence: TokenSequence, rules: Sequence[BlockRule]) -> TokenSequence:
    """The same sequence once more, over the same blocks."""
    for rule, table in zip(rules, sequence.tables, strict=True):
        for block in table:
            if block != GONE:
                rule.pool.share(block)
    return TokenSequence(
        columns=list(sequence.columns),
        tables=[list(table) for table in sequence.tables],
        finished=sequence.finished,
    )


def drop(sequence: TokenSequence, rules: Sequence[BlockRule]) -> None:
    """Give all blocks of a sequence back; it is finished then."""
    for group, rule in enumerate(rules):
        for block in sequence.tables[group]:
            if block != GONE:
                rule.pool.release(block)
        sequence.tables[group] = []
    sequence.finished = True


def truncate(sequence: TokenSequence, tokens: int, rules: Sequence[BlockRule], size: int) -> None:
    """Forget the last tokens, so that so many are left."""
    del sequence.columns[tokens:]
    kept = -(-tokens // size)
    for rule, table in zip(rules, sequence.tables, strict=True):
        for block in table[kept:]:
            if block != GONE:
                rule.pool.release(block)
        del table[kept:]


def release_passed(sequence: TokenSequence, width: int, rules: Sequence[BlockRule], size: int) -> None:
    """Give blocks back that no later query sees."""
    for rule, table in zip(rules, sequence.tables, strict=True):
        if rule.window is None:
            continue
        passed = rule.first_kept(sequence.columns, width) // size
        for place in range(-(-rule.sinks // size), min(passed, len(table))):
            if table[place] != GONE:
                rule.pool.release(table[place])
                table[place] = GONE


class BatchExtension:
    """New tokens of a batch: what they need is found first, so that a step is done as a whole or not at all.

    Args:
        rows: the sequences of the batch.
        width: columns that it has had after this step.
        columns: columns of each row's new tokens; none for a finished row.
        rules: what each group keeps.
        size: tokens of a block.
        tokens: of each row, what its new tokens are, where rows may share blocks from their first token on.
        earliest: columns that may be left when tokens are taken back again; windows are kept for a query there.
    """

    def __init__(
        self,
        rows: Sequence[TokenSequence],
        width: int,
        columns: Sequence[Sequence[int]],
        rules: Sequence[BlockRule],
        size: int,
        tokens: Sequence[Sequence[int]] | None = None,
        earliest: int | None = None,
    ) -> None:
        self._rows, self._columns, self._rules, self._size = rows, columns, rules, size
        self._width = width
        self._earliest = earliest
        self._twins = self._find_twins(tokens)

    def needed(self) -> dict[BlockPool, int]:
        """Blocks that have to be free in each pool."""
        found: dict[BlockPool, int] = {rule.pool: 0 for rule in self._rules}
        for group, rule in enumerate(self._rules):
            writers: Counter[int] = Counter()
            for row, sequence in enumerate(self._rows):
                if not self._columns[row]:
                    continue
                for place in self._places(row, rule):
                    if place >= len(sequence.tables[group]):
                        found[rule.pool] += self._twin(rule, row, place) is None
                    elif sequence.tables[group][place] == GONE:
                        found[rule.pool] += 1
                    else:
                        writers[sequence.tables[group][place]] += 1
            for block, count in writers.items():
                # The last one who holds it writes into the block itself.
                found[rule.pool] += count - (count == rule.pool.holders(block))
        return found

    def apply(self) -> Extension:
        """Take the blocks and lengthen the sequences; there have to be enough."""
        found = Extension(
            copies=[[] for _ in self._rules],
            slots=[[] for _ in self._rules],
            shared=[[] for _ in self._rules],
        )
        before = [sequence.tokens for sequence in self._rows]
        for row, sequence in enumerate(self._rows):
            sequence.columns.extend(self._columns[row])
        for group in range(len(self._rules)):
            for row, sequence in enumerate(self._rows):
                if self._columns[row]:
                    self._extend(found, group, row, sequence, before[row])
        return found

    def _extend(self, found: Extension, group: int, row: int, sequence: TokenSequence, before: int) -> None:
        rule, size, table = self._rules[group], self._size, sequence.tables[group]
        table.extend([GONE] * (-(-sequence.tokens // size) - len(table)))
        for place in self._places(row, rule, before):
            twin = self._twin(rule, row, place)
            block = table[place]
            if twin is not None and block == GONE:
                table[place] = self._rows[twin].tables[group][place]
                rule.pool.share(table[place])
            elif block == GONE:
                table[place] = rule.pool.take()
            elif rule.pool.holders(block) > 1:
                table[place] = rule.pool.take()
                rule.pool.release(block)
                found.copies[group].append((row, block, table[place]))
            kind = found.slots[group] if twin is None else found.shared[group]
            first = self._first_stored(row, rule, before)
            for token in range(max(place * size, before), min((place + 1) * size, sequence.tokens)):
                if token >= first or token < rule.sinks:
                    column = sequence.columns[token]
                    kind.append(
                        TokenSlot(row=row, column=column, block=table[place], offset=token - place * size)
                    )

    def _twin(self, rule: BlockRule, row: int, place: int) -> int | None:
        """The row whose block this one shares; rows of other lengths keep other parts of a window, so none there."""
        return self._twins.get((row, place)) if rule.window is None else None

    def _first_stored(self, row: int, rule: BlockRule, before: int) -> int:
        """The first new token that a window still shows after this step, sinks aside."""
        if rule.window is None:
            return before
        threshold = self._width - (rule.window - 1)
        if self._earliest is not None:
            threshold = min(threshold, self._earliest - (rule.window - 1))
        return before + bisect_left(self._columns[row], threshold)

    def _places(self, row: int, rule: BlockRule, before: int | None = None) -> list[int]:
        """Places in the table that new tokens of a row are written to."""
        size = self._size
        before = self._rows[row].tokens if before is None else before
        after = before + len(self._columns[row])
        first = self._first_stored(row, rule, before)
        sinks = range(before // size, -(-min(after, rule.sinks) // size)) if before < rule.sinks else range(0)
        kept = range(first // size, -(-after // size)) if first < after else range(0)
        return sorted({*sinks, *kept})

    def _find_twins(self, tokens: Sequence[Sequence[int]] | None) -> dict[tuple[int, int], int]:
        """Whole blocks whose tokens, and all before them, are those of a row above: by row and place, that row."""
        found: dict[tuple[int, int], int] = {}
        if tokens is None:
            return found
        seen: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        for row, sequence in enumerate(self._rows):
            before = sequence.tokens
            if before % self._size or not self._columns[row]:
                continue
            chain, _ = seen.setdefault((-2, tuple(sequence.tables[0])), (len(seen), row))
            for number in range(len(tokens[row]) // self._size):
                key = (chain, tuple(tokens[row][number * self._size : (number + 1) * self._size]))
                chain, owner = seen.setdefault(key, (len(seen), row))
                if owner != row:
                    found[row, before // self._size + number] = owner
        return found
