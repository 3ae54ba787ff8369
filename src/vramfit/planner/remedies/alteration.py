"""What a remedy changes of a program's run, as its user would: arguments, values of classes, lines, a variable.

Where the program never makes an object that was to be made otherwise, nothing changed: a run says what took effect
(`Effects`).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

from vramfit.patching import PatchStack
from vramfit.planner.remedies.source_edits import SourceEdit, edited
from vramfit.techniques import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class KeywordChange:
    """Keywords with which a class is made, in place of the program's own.

    Attributes:
        module: where the class is found.
        kind: its name.
        values: by keyword.
        is_dataclass: whether they are set on the object before its ``__post_init__``.
        only: values that a keyword must have for it to be changed: the batch size of a certain loader.
    """

    module: str
    kind: str
    values: tuple[tuple[str, Any], ...]
    is_dataclass: bool = False
    only: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Alteration:
    """A changed run.

    Attributes:
        arguments: of the program's own command line: values by flag.
        keywords: with which classes are made.
        edits: of its source.
        alloc_conf: settings of the allocator; None leaves them.
        choices: techniques of vramfit that are attached.
        batch: the examples that a batch of the run is to have; None where that stays as it is.
    """

    arguments: tuple[tuple[str, str], ...] = ()
    keywords: tuple[KeywordChange, ...] = ()
    edits: tuple[SourceEdit, ...] = ()
    alloc_conf: str | None = None
    choices: tuple[Choice, ...] = ()
    batch: int | None = None

    def __add__(self, other: Alteration) -> Alteration:
        """Both together."""
        return Alteration(
            arguments=(*self.arguments, *other.arguments),
            keywords=(*self.keywords, *other.keywords),
            edits=(*self.edits, *other.edits),
            alloc_conf=other.alloc_conf or self.alloc_conf,
            choices=(*self.choices, *other.choices),
            batch=self.batch if other.batch is None else other.batch,
        )

    def command(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """A command line with the changed arguments."""
        found = list(command)
        for flag, value in self.arguments:
            found = _with_argument(found, flag, value)
        return tuple(found)

    @property
    def sources(self) -> Mapping[str, bytes]:
        """Files whose text is another, by their absolute paths."""
        return edited(self.edits)

    @contextlib.contextmanager
    def applied(self) -> Iterator[Effects]:
        """Inside, classes are made otherwise, and modules have another text; gives what of that took effect."""
        effects = Effects(self)
        with PatchStack() as patches:
            for change in self.keywords:
                _change_keywords(change, patches, effects)
            if self.edits:
                _change_modules(self.sources, patches)
            yield effects


class Effects:
    """Which changes of a run took effect.

    Args:
        alteration: all changes.
    """

    def __init__(self, alteration: Alteration) -> None:
        self._wanted = {_key(change) for change in alteration.keywords}
        self._met: set[object] = set()

    def meet(self, change: KeywordChange) -> None:
        """Note that an object was made with a change."""
        self._met.add(_key(change))

    @property
    def missed(self) -> tuple[str, ...]:
        """The classes of which no object was made with what should have changed, by name."""
        return tuple(sorted({str(kind) for kind, _ in self._wanted - self._met}))


def _key(change: KeywordChange) -> tuple[str, tuple[str, ...]]:
    """The same for a class that two packages have: a program makes an object of one of them."""
    return change.kind, tuple(name for name, _ in change.values)


NOTHING = Alteration()
"""The program as it is."""


def _with_argument(command: list[str], flag: str, value: str) -> list[str]:
    """A command line with another value of an option, in whichever way it is written there."""
    for place, word in enumerate(command):
        if word == flag and place + 1 < len(command):
            return [*command[: place + 1], value, *command[place + 2 :]]
        if word.startswith(f"{flag}="):
            return [*command[:place], f"{flag}={value}", *command[place + 1 :]]
    return [*command, flag, value]


def _change_keywords(change: KeywordChange, patches: PatchStack, effects: Effects) -> None:
    module = sys.modules.get(change.module)
    owner = getattr(module, change.kind, None)
    if owner is None:
        return
    name = "__post_init__" if change.is_dataclass else "__init__"
    make = _set_before if change.is_dataclass else _given
    patches.set(owner, name, make(getattr(owner, name), change, effects))


def _set_before(
    original: Callable[..., None], change: KeywordChange, effects: Effects
) -> Callable[..., None]:
    @wraps(original)
    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in change.values:
            setattr(self, name, value)
        effects.meet(change)
        original(self, *args, **kwargs)

    return post_init


def _given(original: Callable[..., None], change: KeywordChange, effects: Effects) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind_partial(self, *args, **kwargs)
        given = bound.arguments
        if all(given.get(name, kwargs.get(name)) == value for name, value in change.only):
            for name, value in change.values:
                given[name] = value
            effects.meet(change)
            original(*bound.args, **bound.kwargs)
            return
        original(self, *args, **kwargs)

    return init


def _change_modules(sources: Mapping[str, bytes], patches: PatchStack) -> None:
    """Let modules that are imported be compiled from another text."""
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(self: Any, fullname: str) -> Any:
        text = sources.get(os.path.abspath(self.path))
        if text is None:
            return original(self, fullname)
        return compile(text, self.path, "exec", dont_inherit=True)

    patches.set(importlib.machinery.SourceFileLoader, "get_code", get_code)
