"""Changes the names of modules that are bound to an object, without looking at all names of all modules each time.

NOTE [Who else holds it]: to look through all modules takes 25 ms where torch's compiler and transformers are imported.
But whoever binds one more name to an object holds one more reference to it. So it is noted of each object where it was
found, and how many references it had beside these names. As long as those are as many, no name is missing; where they
are more or fewer, all modules are looked through again, which costs time alone.

What stands for an object is made anew by each run, and when it goes it has fewer references than when it came: the
patches that held it have gone before. How many fewer is learnt at the end of the first run, by looking. Later runs
replace what was learnt only where more go, or where two looks agree: so a run that leaves an instance of a class
behind, which holds the class, does not hide a name that the next one leaves.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Pairs = Sequence[tuple[object, object]]

_OURS = __name__.partition(".")[0]
_IMMORTAL = 1 << 28  # from Python 3.12 on some objects count no references (PEP 683)
# Tells objects that live apart as `id` does, which Python announces to audit hooks each time (see files/patches).
_identity = object.__hash__


@dataclass(slots=True, eq=False)
class _Learnt:
    """How many references beside names an object has, where all of its names are known; None before one was seen.

    Attributes:
        forth: when it is about to be replaced.
        fewer: how many it has lost when it is about to be bound back, beside when it came.
        fewer_last: the same of the last time that all modules were looked through.
    """

    forth: int | None = None
    fewer: int | None = None
    fewer_last: int | None = None

    def learn_fewer(self, fewer: int) -> None:
        """Note how many were lost. See NOTE [Who else holds it]."""
        if self.fewer is None or fewer > self.fewer or fewer == self.fewer_last:
            self.fewer = fewer
        self.fewer_last = fewer


@dataclass(slots=True, eq=False)
class _Origin:
    """An object that is replaced, by one or by several after one another.

    Attributes:
        obj: held, so that its identity stays its own.
        places: names that were bound to it; some may be bound to something else by now.
        learnt: of it, and of what stands for it, in the order in which that came.
        standing: how many objects stand for it at the moment.
    """

    obj: object
    places: set[tuple[weakref.ref[ModuleType], str]] = field(default_factory=set)
    learnt: list[_Learnt] = field(default_factory=lambda: [_Learnt()])
    standing: int = 0

    def bound(self, obj: object) -> list[tuple[dict[str, object], str]]:
        """Which of its names are bound to an object now."""
        return [
            (names, name)
            for place, name in self.places
            if (module := place()) is not None and (names := vars(module)).get(name) is obj
        ]


@dataclass(slots=True, eq=False)
class _Role:
    """What an object is to the names of an origin.

    Attributes:
        obj: held, so that its identity stays its own.
        origin: whose names it is bound to.
        number: 0 for the origin itself, 1 for what came first to stand for it.
        others: references beside names when it came; None where its names were never swapped.
        shared: whether it stands for another object too, whose names are then its own.
    """

    obj: object
    origin: _Origin
    number: int
    others: int | None = None
    shared: bool = False

    @property
    def learnt(self) -> _Learnt:
        """What is known of objects in its place."""
        self.origin.learnt += [_Learnt() for _ in range(self.number + 1 - len(self.origin.learnt))]
        return self.origin.learnt[self.number]


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """An object that is to be replaced, or bound back.

    Attributes:
        role: of the object.
        into: what its names are to be bound to.
        back: whether that stood there before.
        references: to the object beside names that are known.
    """

    role: _Role
    into: object
    back: bool
    references: int

    def misses_none(self) -> bool:
        """Whether no name can be bound to the object that is not known."""
        learnt = self.role.learnt
        if self.back:
            came_with, fewer = self.role.others, learnt.fewer
            expected = None if came_with is None or fewer is None else came_with - fewer
        else:
            expected = learnt.forth
        return self.references == expected and self.references < _IMMORTAL and not self.role.shared


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
        self._origins: dict[int, _Origin] = {}
        self._standing: dict[int, _Role] = {}

    def expect(self, pairs: Pairs) -> None:
        """Note which object is to be replaced by which; they may be bound back without ever being swapped."""
        for one, other in pairs:
            self._replacing(one, other)

    def swap(self, pairs: Pairs) -> int:
        """Bind every name that is bound to the first object of a pair to its second, or to what replaces that.

        Returns:
            How many names.
        """
        into = _followed(pairs)
        roles = [self._replacing(one, other) for one, other in pairs]
        # All of them here: what else holds them meanwhile is the same each time.
        changes = [
            _Change(role, into[_identity(one)], back, _references(one, role))
            for (one, _), (role, back) in zip(pairs, roles, strict=True)
        ]
        if not _are_counted() or not all(change.misses_none() for change in changes):
            self._look_through(changes)
        count = 0
        for change in changes:
            for names, name in change.role.origin.bound(change.role.obj):
                names[name] = change.into
                count += 1
        for (one, other), change in zip(pairs, changes, strict=True):
            if change.back:
                if self._standing.pop(_identity(one), None) is not None:
                    change.role.origin.standing -= 1
            elif (role := self._standing.get(_identity(other))) is not None:
                role.others = _references(other, role)
        return count

    def _role(self, obj: object) -> _Role | None:
        standing = self._standing.get(_identity(obj))
        if standing is not None:
            return standing
        origin = self._origins.get(_identity(obj))
        return None if origin is None else _Role(obj, origin, 0)

    def _replacing(self, one: object, other: object) -> tuple[_Role, bool]:
        """The role of an object that another is to replace, and whether that one stood there before."""
        role, next_role = self._role(one), self._role(other)
        if role is None:
            origin = self._origins[_identity(one)] = _Origin(one)
            role = _Role(one, origin, 0)
        known = next_role is not None and next_role.origin is role.origin
        if not known:
            role.origin.standing += 1
            shared = next_role is not None and next_role.number > 0
            self._standing[_identity(other)] = _Role(other, role.origin, role.origin.standing, shared=shared)
        return role, known and next_role is not None and next_role.number < role.number

    def _look_through(self, changes: Sequence[_Change]) -> None:
        """Find all names of objects, and learn how many references they have beside them."""
        self.sweeps += 1
        table = {_identity(change.role.obj): change.role.origin.places for change in changes}
        before = [len(change.role.origin.bound(change.role.obj)) for change in changes]
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
        for change, known in zip(changes, before, strict=True):
            role, learnt = change.role, change.role.learnt
            references = change.references - (len(role.origin.bound(role.obj)) - known)
            if not change.back:
                learnt.forth = references
            elif role.others is not None:
                learnt.learn_fewer(role.others - references)


def _followed(pairs: Pairs) -> dict[int, object]:
    """What at last replaces the first object of each pair: what one gives another may replace."""
    following = {_identity(one): other for one, other in pairs}

    def last(obj: object) -> object:
        while (number := _identity(obj)) in following:
            obj = following[number]
        return obj

    return {number: last(other) for number, other in following.items()}


def _references(obj: object, role: _Role) -> int:
    """References to an object that are neither names that are known nor those of classes below it.

    A class below one may wait to be collected.
    """
    return sys.getrefcount(obj) - len(role.origin.bound(obj)) - _held_by_classes(obj)


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
