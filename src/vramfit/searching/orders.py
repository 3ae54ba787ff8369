"""Searches by an order of candidates: the first that does, the most promising one next, one size after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from vramfit.searching.largest import Largest, LargestSearch, Strategy
from vramfit.searching.tries import C, Tries, ignored

A = TypeVar("A")


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstOf(Generic[C, A]):
    """The last candidate of an order that was tried, with its answer.

    Attributes:
        enough: whether it does; False where none of the order did.
    """

    candidate: C
    answer: A
    enough: bool


def first_of(order: Iterable[C], ask: Callable[[C], A], enough: Callable[[A], bool]) -> FirstOf[C, A]:
    """Try candidates in their order until one does.

    Raises:
        ValueError: there are no candidates.
    """
    tried = None
    for candidate in order:
        answer = ask(candidate)
        tried = FirstOf(candidate=candidate, answer=answer, enough=enough(answer))
        if tried.enough:
            break
    if tried is None:
        raise ValueError("there are no candidates")
    return tried


def go_by(
    tries: Tries[C, A],
    following: Callable[[], C | None],
    score: Callable[[A], float],
    *,
    most: int,
    patience: int,
) -> None:
    """Try what promises most, until nothing promises anything or the best has not become better for long.

    Args:
        following: the candidate that promises most by what was tried so far; None where none does.
        score: of an answer, the less the better; infinite where it is of no use.
        most: candidates that may be tried, those before this search included.
        patience: tries in a row that may be no better than the best before.
    """
    best, left = min(map(score, tries.answers.values()), default=math.inf), patience
    while len(tries) < most and left and (candidate := following()) is not None:
        reached = score(tries(candidate))
        left = patience if reached < best else left - 1
        best = min(best, reached)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargestSizes(Generic[A]):
    """Several sizes, each raised as far as those before it allow.

    Attributes:
        sizes: the largest of each, by name; empty where not even the smallest of all fit.
        largest: how each was found, by name; without those that were not reached.
        tries: sizes that were run, in order, by name, with what was said of them.
    """

    sizes: Mapping[str, int]
    largest: Mapping[str, Largest[A]]
    tries: tuple[tuple[Mapping[str, int], A], ...]


def largest_in_order(
    run: Callable[[Mapping[str, int]], A],
    fits: Callable[[A], bool],
    strategies: Mapping[str, Strategy],
    *,
    progress: Callable[[Mapping[str, int]], object] = ignored,
    stop: Callable[[], bool] = lambda: False,
) -> LargestSizes[A]:
    """Raise the first size as far as possible, with that the next, and so on; sizes not yet raised have their smallest.

    Args:
        run: gives the answer for values of all sizes; it is called once for the same values.
        fits: whether an answer says that they fit. Where they do, smaller ones have to.
        strategies: of the sizes by name, in their order.
        progress: called with the sizes before they are run.
        stop: asked before each try; the search ends where it is true, with the largest so far.
    """
    names = tuple(strategies)

    def named(values: tuple[int, ...]) -> dict[str, int]:
        return dict(zip(names, values, strict=True))

    tries: Tries[tuple[int, ...], A] = Tries(
        lambda values: run(named(values)), progress=lambda values: progress(named(values))
    )
    allowed = [strategy.allowed for strategy in strategies.values()]
    largest: dict[str, Largest[A]] = {}
    raised: tuple[int, ...] = ()
    smallest: tuple[int, ...] = ()
    if all(choice.first <= choice.last for choice in allowed):
        smallest = tuple(choice.value_at(choice.first) for choice in allowed)
    for name, strategy in strategies.items() if smallest else ():
        ask = partial(_asked, tries, raised, smallest[len(raised) + 1 :])
        largest[name] = LargestSearch(ask, fits, strategy, stop=stop).run()
        if not largest[name].value:
            break
        raised = (*raised, largest[name].value)
    return LargestSizes(
        sizes=named((*raised, *smallest[len(raised) :])) if raised else {},
        largest=largest,
        tries=tuple((named(tried), answer) for tried, answer in tries.answers.items()),
    )


def _asked(
    tries: Tries[tuple[int, ...], A], before: tuple[int, ...], after: tuple[int, ...], value: int
) -> A:
    return tries((*before, value, *after))
