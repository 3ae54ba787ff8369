"""How an option of a run is declared: its words on the command line, where it applies, and how its value is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from vramfit.arguments import shown, size_argument
from vramfit.errors import UsageError
from vramfit.units import parse_bytes

SEVERAL_CARDS = "Several cards"
ASSUMED = "What is assumed"
ENDING = "When it ends, and the files that it writes"
"""Panels of options in the help of verbs with many."""

_KEY = "option"


class RunKind(Enum):
    """The runs that an option is for."""

    ANY = "any"
    VIRTUAL = "virtual"
    RECORDED = "recorded"


class Door(Protocol):
    """How users spell options where they give them, for errors in their words."""

    def name(self, option: str) -> str:
        """The option as the user writes it."""

    def given(self, option: str, value: object) -> str:
        """The option with its value."""

    def size(self, option: str, value: Any, *, least: int = 1) -> int:
        """A size in bytes.

        Raises:
            UsageError: it is not a size, or below `least`.
        """

    @property
    def choose_card(self) -> str:
        """What to do where an option needs a virtual card."""


Read = Callable[[Door, str, Any], Any]
"""Turns what a user gave for an option into the value that is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of a run.

    Attributes:
        help: one line for the command line; empty where that does not have it.
        metavar: the form of its value there; empty for a flag.
        panel: of the help.
        runs: the runs that it is for.
        read: turns a given value into the one that is kept.
        kind: the type of the value on the command line.
        least, most: bounds of a number.
        completion: values that the shell offers.
        default_words: the default as the help words it; None shows the value.
        negated: whether the command line has ``--no-NAME`` in place of the option.
    """

    help: str = ""
    metavar: str = ""
    panel: str = ""
    runs: RunKind = RunKind.ANY
    read: Read = lambda _door, _name, value: value
    kind: Any = str
    least: int | None = None
    most: int | None = None
    completion: Callable[[], list[str]] | None = None
    default_words: str | None = None
    negated: bool = False


def option(default: Any = None, **words: Any) -> Any:
    """A field of `RunOptions`; the words are those of `Option`."""
    return dataclasses.field(default=default, metadata={_KEY: Option(**words)})


def declared(kind: type) -> Mapping[str, tuple[Option, Any]]:
    """The options that a class declares, in order, each with its default."""
    return {
        one.name: (one.metadata[_KEY], one.default)
        for one in dataclasses.fields(kind)
        if _KEY in one.metadata
    }


class CommandLine:
    """Options as ``--alloc-conf``."""

    choose_card = "Choose one with --gpu NAME"

    def __init__(self, declarations: Mapping[str, tuple[Option, Any]]) -> None:
        self._declarations = declarations

    def name(self, option: str) -> str:
        """``--alloc-conf``; ``--no-need`` where only that can be given."""
        negated = option in self._declarations and self._declarations[option][0].negated
        return f"--{'no-' if negated else ''}{option.replace('_', '-')}"

    def given(self, option: str, value: object) -> str:
        """``--ranks 8``."""
        return f"{self.name(option)} {value}"

    def size(self, option: str, value: Any, *, least: int = 1) -> int:
        """See `Door.size`."""
        try:
            found = parse_bytes(value)
        except ValueError as error:
            raise UsageError(f"{self.name(option)}: {error}") from None
        if found < least:
            raise UsageError(
                f"{self.given(option, value)} leaves no memory: it must be more than 0", "Write it as 2GiB"
            )
        return found


class Keywords:
    """Options as ``alloc_conf=``."""

    choose_card = "Pass gpu= too, or leave it out"

    def name(self, option: str) -> str:
        """``alloc_conf=``."""
        return f"{option}="

    def given(self, option: str, value: object) -> str:
        """``ranks=8``."""
        return f"{option}={shown(value)}"

    def size(self, option: str, value: Any, *, least: int = 1) -> int:
        """See `Door.size`."""
        return size_argument(option, value, least=least)
