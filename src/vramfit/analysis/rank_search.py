"""How many cards a distributed program needs, or the largest value of one of its options that they hold: by runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vramfit.analysis.rank_memory import WorldMemory
from vramfit.errors import UsageError, VramfitError
from vramfit.searching.largest import LargestSearch, doubled_from
from vramfit.searching.orders import first_of
from vramfit.searching.tries import Tries

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
    worlds = _Worlds(run)
    last = first_of(_doubled(most), worlds.tries, lambda tried: tried.fits)
    tries = tuple(worlds.tries.answers.values())
    if all(tried.failure for tried in tries):
        raise VramfitError(
            f"the program fails on every number of cards: {tries[-1].failure}", "Run it with --ranks 8"
        )
    failing = tries[-2].value if last.enough and len(tries) > 1 else 0
    return worlds.search(CARDS, last.candidate if last.enough else 0, failing, 0)


def _doubled(most: int) -> Iterator[int]:
    cards = 1
    while cards <= most:
        yield cards
        cards *= 2


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
    worlds = _Worlds(run)

    def fits(world: WorldTry) -> bool:
        tries = tuple(worlds.tries.answers.values())
        if len(tries) == 1 and world.failure:
            raise VramfitError(
                f"the program fails with {option} {start}: {world.failure}", "Run it alone first"
            )
        doubled = all(tried.fits for tried in tries[:-1])
        if doubled and len(tries) == _SAME and len({tried.total_bytes for tried in tries}) == 1:
            raise UsageError(
                f"the program takes the same whatever {option} is",
                "Name an option that it reads its batch from",
            )
        return world.fits

    largest = LargestSearch(worlds.tries, fits, doubled_from(start, most)).run()
    return worlds.search(option, largest.value, largest.failing, size)


class _Worlds:
    """Runs of a program in worlds of which nothing but a `WorldTry` is kept."""

    def __init__(self, run: Callable[[int], WorldMemory]) -> None:
        self._run, self._card = run, ("", 0)
        self.tries: Tries[int, WorldTry] = Tries(self._tried)

    def _tried(self, value: int) -> WorldTry:
        memory = self._run(value)
        self._card = memory.decisive.card.gpu, memory.decisive.card.total
        return _tried(value, memory)

    def search(self, sought: str, value: int, failing: int, size: int) -> WorldSearch:
        """What was found, with all runs."""
        gpu, total = self._card
        return WorldSearch(
            sought=sought,
            value=value,
            failing=failing,
            gpu=gpu,
            card_bytes=total,
            size=size,
            tries=tuple(self.tries.answers.values()),
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
