"""How many cards a distributed program needs, or the largest value of one of its options that they hold: by runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vramfit.analysis.rank_memory import RankMemory, WorldMemory
from vramfit.errors import UsageError, VramfitError

MOST_CARDS = 64
"""Cards up to which a program is tried, unless the caller says else."""
MOST_VALUE = 1 << 20
"""Value of an option up to which it is tried."""
_SAME = 9
"""Values, each twice the one before, that may take the same: segments hide what small batches add."""
CARDS = "ranks"
"""What is looked for where it is the number of cards."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldTry:
    """One run of a world.

    Attributes:
        value: number of cards, or value of the option.
        fits: whether every rank that ran fits; False too where the program failed.
        worst: number of the rank that decides.
        total_bytes: that it takes of its card, with the context; where it ran out, at least.
        reserved_bytes: of torch's allocator there.
        failure: why the program failed, where it was not for want of memory; else empty.
    """

    value: int
    fits: bool
    worst: int
    total_bytes: int
    reserved_bytes: int
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldSearch:
    """What was found.

    Attributes:
        sought: ``ranks``, or the option of the program.
        value: the fewest cards that do, or the largest value that fits; 0 where none does.
        failing: the next one that does not; 0 where none was seen.
        gpu: name of the card.
        card_bytes: its memory.
        size: how many cards there are where an option is sought; 0 otherwise.
        tries: all runs, in order.
    """

    sought: str
    value: int
    failing: int
    gpu: str
    card_bytes: int
    size: int
    tries: tuple[WorldTry, ...]

    @property
    def is_of_cards(self) -> bool:
        """Whether the number of cards was sought."""
        return self.sought == CARDS

    @property
    def best(self) -> WorldTry | None:
        """The run with what was found."""
        return next((one for one in self.tries if one.value == self.value), None)


def fewest_cards(run: Callable[[int], WorldMemory], most: int = MOST_CARDS) -> WorldSearch:
    """The smallest of 1, 2, 4, 8, ... cards on which a program fits.

    A world in which the program fails for another reason than memory, such as one card where it wants several, counts
    as too small.

    Args:
        run: runs it on so many cards.
        most: of them.

    Raises:
        VramfitError: it failed in every world for another reason than memory.
    """
    tries: list[WorldTry] = []
    cards, card = 1, None
    while cards <= most:
        memory = run(cards)
        card = memory.decisive
        tries.append(_tried(cards, memory))
        if tries[-1].fits:
            break
        cards *= 2
    if card is None or all(one.failure for one in tries):
        raise VramfitError(
            f"the program fails on every number of cards: {tries[-1].failure}", "Run it with --ranks 8"
        )
    found = cards if tries[-1].fits else 0
    failing = tries[-2].value if found and len(tries) > 1 else 0
    return _search(CARDS, found, failing, card, 0, tries)


def largest_value(
    run: Callable[[int], WorldMemory], option: str, start: int, size: int, most: int = MOST_VALUE
) -> WorldSearch:
    """The largest value of a program's option with which it fits: doubled from `start` on, then between.

    Args:
        run: runs it with a value.
        option: its name.
        start: value to begin with, from 1 on.
        size: how many cards there are.
        most: of the values.

    Raises:
        UsageError: the value does not change what the program takes, so that it does not read it.
        VramfitError: it failed at `start` for another reason than memory.
    """
    tries: list[WorldTry] = []

    def fits(value: int) -> bool:
        memory = run(value)
        tries.append(_tried(value, memory))
        cards.append(memory.decisive)
        return tries[-1].fits

    cards: list[RankMemory] = []
    low, high = 0, 0  # fits; does not
    value = start
    if fits(value):
        low = value
        while not high and low < most:
            value = min(2 * low, most)
            low, high = (value, 0) if fits(value) else (low, value)
            if len(tries) == _SAME and len({one.total_bytes for one in tries}) == 1:
                raise UsageError(
                    f"the program takes the same whatever {option} is",
                    "Name an option that it reads its batch from",
                )
    elif tries[0].failure:
        raise VramfitError(
            f"the program fails with {option} {start}: {tries[0].failure}", "Run it alone first"
        )
    else:
        high = value
    while high - low > 1:
        value = (low + high) // 2
        low, high = (value, high) if fits(value) else (low, value)
    return _search(option, low, high, cards[0], size, tries)


def _search(
    sought: str, value: int, failing: int, card: RankMemory, size: int, tries: list[WorldTry]
) -> WorldSearch:
    return WorldSearch(
        sought=sought,
        value=value,
        failing=failing,
        gpu=card.card.gpu,
        card_bytes=card.card.total,
        size=size,
        tries=tuple(tries),
    )


def _tried(value: int, memory: WorldMemory) -> WorldTry:
    worst, failed = memory.decisive, memory.failed
    failure = "" if failed is None else failed.run.error or f"exit code {failed.run.exit_code}"
    return WorldTry(
        value=value,
        fits=memory.fits is True,
        worst=worst.rank,
        total_bytes=worst.needed,
        reserved_bytes=worst.card.peak_reserved,
        failure="" if memory.fits is False else failure,
    )
