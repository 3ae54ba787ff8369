"""Changes the names of modules that are bound to an object, without looking at all names of all modules each time.

NOTE [Who else holds it]: to look through all modules takes 25 ms where torch's compiler and transformers are imported.
But whoever binds one more name to an object holds one more reference to it. So it is noted of each object where it was
found, and, when a swap is over, how many references it has beside these names. Where it has as many when the next one
begins, and no module was imported, no name is missing; otherwise all modules are looked through again, which costs time
alone. Whatever holds an object when it is counted first must hold it until it is counted again: a list that is dropped
between the two would hide a name. So only swaps that are gathered are counted, whose callers are known.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Pairs = Sequence[tuple[object, object]]

_OURS = __name__.partition(".")[0]
_IMMORTAL = 1 << 28  # from Python 3.12 on some objects count no references (PEP 683)
# Tells objects that live apart as `id` does, which Python announces to audit hooks each time (see files/patches).
_identity = object.__hash__


@dataclass(slots=True, eq=False)
class _Origin:
    """An object that is replaced, by one or by several after one another.

    Attributes:
        places: names that were bound to it; some may be bound to something else by now.
        standing: how many objects stand for it at the moment.
    """

    places: set[tuple[weakref.ref[ModuleType], str]] = field(default_factory=set)
    standing: int = 0


@dataclass(slots=True, eq=False)
class _Role:
    """What an object is to the names of an origin.

    Attributes:
        obj: held, so that its identity stays its own.
        origin: whose names it is bound to.
        number: 0 for the origin itself, 1 for what came first to stand for it.
        shared: whether it stands for another object too, whose names are then its own.
        others: references beside names when the last swap of it was over; None where they were not counted.
        unchanged: whether there were as many when the swap that is under way began.
    """

    obj: object
    origin: _Origin
    number: int
    shared: bool = False
    others: int | None = None
    unchanged: bool = False

    def bound(self) -> list[tuple[dict[str, object], str]]:
        """Which names of the origin are bound to the object now."""
        return [
            (names, name)
            for place, name in self.origin.places
            if (module := place()) is not None and (names := vars(module)).get(name) is self.obj
        ]

    def references(self) -> int | None:
        """References to the object that are neither names that are known nor those of classes below it.

        A class below one may wait to be collected. None where they tell nothing.
        """
        count = sys.getrefcount(self.obj)
        return (
            None
            if self.shared or count > _IMMORTAL
            else count - len(self.bound()) - _held_by_classes(self.obj)
        )


class NameBindings:
    """Names of modules, by the objects that they are bound to. See NOTE [Who else holds it].

    Names inside of classes, closures and containers are not looked at, and vramfit's own modules keep what they have.

    Args:
        modules: whose names they are; None for all that are imported.

    Attributes:
        sweeps: how often all modules were looked through.
    """

    def __init__(self, modules: Mapping[str, ModuleType] | None = None) -> None:
        self.sweeps = 0
        self._modules = sys.modules if modules is None else modules
        self._roles: dict[int, _Role] = {}
        self._looked_at = 0  # how many modules

    @contextmanager
    def gathered(self) -> Iterator[list[tuple[object, object]]]:
        """Swap at the end what the block has put into the list, also where the block fails.

        What holds an object at the start of this block and at the end of the one before, is to hold it between the two:
        see NOTE [Who else holds it].
        """
        self._compare()
        pairs: list[tuple[object, object]] = []
        try:
            yield pairs
        except BaseException:
            self.swap(pairs)  # not counted: the frames of the error hold what they will not hold for long
            raise
        self.swap(pairs)
        moved = _of(pairs)
        pairs.clear()
        self._count(moved)

    def swap(self, pairs: Pairs) -> int:
        """Bind every name that is bound to the first object of a pair to its second, one pair after the other.

        Returns:
            How many names.
        """
        into = _followed(pairs)
        for one, other in pairs:
            self._note(one, other)
        moved = [self._roles[number] for number in _of(pairs)]
        if len(self._modules) != self._looked_at or not all(role.unchanged for role in moved):
            self._look_through(moved)
        count = 0
        for number, obj in into.items():
            if self._roles[number].obj is not obj:
                for names, name in self._roles[number].bound():
                    names[name] = obj
                    count += 1
        for one, other in pairs:
            self._leave(one, other)
        for role in self._roles.values():
            role.unchanged = False
        for role in moved:
            role.others = None
        return count

    def _compare(self) -> None:
        """See of what is known whether it is held by as many as when it was counted last."""
        for role in self._roles.values():
            role.unchanged = role.others is not None and role.others == role.references()

    def _count(self, numbers: Set[int]) -> None:
        """Count who holds some objects, as far as they are still known."""
        for number in numbers & self._roles.keys() if _are_counted() else ():
            self._roles[number].others = self._roles[number].references()

    def _note(self, one: object, other: object) -> None:
        """Note that an object is to replace another."""
        role = self._roles.setdefault(_identity(one), _Role(one, _Origin(), 0))
        known = self._roles.get(_identity(other))
        if known is None or known.origin is not role.origin:
            role.origin.standing += 1
            shared = known is not None and known.number > 0
            number = role.origin.standing
            # What is new has no name: only what it stands for is looked for.
            self._roles[_identity(other)] = _Role(
                other, role.origin, number, shared=shared, unchanged=known is None
            )

    def _leave(self, one: object, other: object) -> None:
        """Forget an object that stood for another that is back."""
        role, back = self._roles.get(_identity(one)), self._roles.get(_identity(other))
        if role is not None and back is not None and back.origin is role.origin and back.number < role.number:
            role.origin.standing -= 1
            del self._roles[_identity(one)]

    def _look_through(self, roles: Sequence[_Role]) -> None:
        """Find all names of objects."""
        self.sweeps += 1
        self._looked_at = len(self._modules)
        table = {_identity(role.obj): role.origin.places for role in roles}
        wanted = set(table)
        for path, module in list(self._modules.items()):
            if not isinstance(module, ModuleType) or path.partition(".")[0] == _OURS:
                continue
            # vars(), not getattr: modules with a lazy __getattr__ must not be made to import things.
            names = vars(module)
            # Nearly every module has none of them: this asks without a loop in Python, five times as fast.
            if wanted.isdisjoint(map(_identity, list(names.values()))):
                continue
            place = weakref.ref(module)
            for name, value in list(names.items()):
                if (number := _identity(value)) in table:
                    table[number].add((place, name))


def _of(pairs: Pairs) -> Set[int]:
    """What pairs are of."""
    return {_identity(obj) for pair in pairs for obj in pair}


def _followed(pairs: Pairs) -> dict[int, object]:
    """What names of the first object of each pair are bound to at last: what one gives, a later one may replace."""
    into: dict[int, object] = {}
    given: dict[int, list[int]] = {}  # by what names are bound to so far: whose names
    for one, other in pairs:
        whose = [*given.pop(_identity(one), ()), _identity(one)]
        into.update(dict.fromkeys(whose, other))
        given.setdefault(_identity(other), []).extend(whose)
    return into


def _held_by_classes(obj: object) -> int:
    """How often the classes below a class hold it: in the order of their bases, as a base, as the first one."""
    if not isinstance(obj, type):
        return 0
    below: set[type[Any]] = set()
    fresh: set[type[Any]] = {obj}
    while fresh:
        fresh = {one for base in fresh for one in type.__subclasses__(base)} - below
        below |= fresh
    return sum(1 + one.__bases__.count(obj) + (one.__base__ is obj) for one in below)


def _are_counted() -> bool:
    """Whether the interpreter counts all references to objects; one without a global lock defers some."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
