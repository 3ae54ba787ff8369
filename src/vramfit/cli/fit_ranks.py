"""``vramfit fit --ranks``: how many cards a script needs, or the largest value of an option of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vramfit.cli.printing import apart_from_json, print_result, wide_console
from vramfit.cli.ranks import WorldOptions, run_ranks, world_of
from vramfit.errors import UsageError
from vramfit.units import counted

if TYPE_CHECKING:
    from vramfit.analysis.rank_memory import WorldMemory
    from vramfit.options.run_options import RunOptions

DOES_NOT_FIT = 3
AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """What is looked for.

    Attributes:
        ranks: how many cards, or ``auto``.
        largest: the script's option whose value is sought; None where it is the number of cards.
        at_least: the value from which on the search has passed.
        most: cards up to which it is tried.
    """

    ranks: str
    largest: str | None
    at_least: int | None
    most: int | None


def fit_ranks(
    script: str, arguments: Sequence[str], options: RunOptions, given: FitOptions, json: Path | None
) -> None:
    """Search, print, and end with exit code 3 where nothing fits.

    Raises:
        UsageError: the options contradict one another.
        typer.Exit: at the end.
    """
    from vramfit.analysis.rank_search import MOST_CARDS, fewest_cards, largest_value
    from vramfit.report import json_text, print_report

    size = _size(given, options.per_node)

    def run(cards: int, words: Sequence[str]) -> WorldMemory:
        chosen = replace(options, ranks=cards)
        world = world_of(None, [script, *words], chosen)
        assert isinstance(world, WorldOptions)
        told = (
            counted(cards, "rank")
            if given.largest is None
            else f"{given.largest} {_value(words, _name(given))}"
        )
        typer.echo(f"vramfit: {told}", err=True)
        return run_ranks(world, chosen, json)

    with apart_from_json(json):
        if size is None:
            found = fewest_cards(lambda cards: run(cards, arguments), given.most or MOST_CARDS)
        else:
            option = _name(given)
            start = _value(arguments, option) or 1
            found = largest_value(
                lambda value: run(size, _with(arguments, option, value)), option, start, size
            )
    print_result(json, lambda: json_text(found), lambda: print_report(found, console=wide_console()))
    enough = given.at_least is None or (
        found.value <= given.at_least if size is None else found.value >= given.at_least
    )
    raise typer.Exit(0 if found.value and enough else DOES_NOT_FIT)


def _size(given: FitOptions, per_node: int | None) -> int | None:
    """How many cards there are; None where that is sought."""
    from vramfit.analysis.rank_search import MOST_CARDS

    if given.ranks == AUTO:
        if given.largest is not None:
            raise UsageError(
                "--ranks auto looks for the number of cards, --largest for a value", "Give one number"
            )
        per_node = per_node or 1
        if per_node & (per_node - 1) and (given.most or MOST_CARDS) >= _beyond(per_node):
            raise UsageError(
                f"--per-node {per_node} does not divide {_beyond(per_node)} cards, which --ranks auto tries",
                "Give 1, 2, 4 or 8, or --most-ranks of a node alone",
            )
        return None
    if not given.ranks.isdecimal() or not 1 <= int(given.ranks) <= 1 << 20:
        raise UsageError(
            f"--ranks {given.ranks} is not a number of cards", "Write auto, or a number such as 8"
        )
    if given.largest is not None and not given.largest.strip("-= "):
        raise UsageError("--largest names no option of the script", "Write it: --largest=--batch-size")
    if given.largest is None:
        raise UsageError(
            f"nothing is sought on {given.ranks} cards",
            "Name an option of the script: --largest=--batch-size; or write --ranks auto",
        )
    return int(given.ranks)


def _beyond(number: int) -> int:
    """The next power of two."""
    return 1 << number.bit_length()


def _name(given: FitOptions) -> str:
    """The script's option as it is written on its command line."""
    name = given.largest or ""
    return name if name.startswith("-") or "=" in name else f"--{name}"


def _value(arguments: Sequence[str], option: str) -> int | None:
    """The value that the script's arguments give to an option.

    Raises:
        UsageError: it is not a whole number.
    """
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        text = value if equals else arguments[at + 1] if at + 1 < len(arguments) else ""
        if not text.isdecimal() or not int(text):
            raise UsageError(
                f"the script's {option} is {text!r}, not a whole number", "Begin with one, such as 1"
            )
        return int(text)
    return None


def _with(arguments: Sequence[str], option: str, value: int) -> list[str]:
    """The arguments with another value of an option."""
    words = list(arguments)
    for at, word in enumerate(words):
        if word == option:
            return [*words[: at + 1], str(value), *words[at + 2 :]]
        if word.startswith(f"{option}="):
            return [*words[:at], f"{option}={value}", *words[at + 1 :]]
    return [*words, option, str(value)]
