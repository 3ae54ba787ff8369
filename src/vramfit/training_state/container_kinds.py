"""Kinds of containers that hold a training's state: how each is read, compared with what it held, and put back.

NOTE [Contents by reference]: a container's contents are kept as they stand, a copy of references, which takes a
fraction of a microsecond for each. So containers are compared by identity: ``is`` says that nothing was put in
another's place.

NOTE [Subclasses]: a subclass may give something else than what it holds: the registry of activations of transformers
makes a layer whenever one of its classes is asked for. So what a container holds is read and put back by the methods of
the class of the standard library that it is of, never by its own, which may forbid writing, too.
"""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

MODULE_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What each module of torch has of its own: hooks, and the dictionaries of parameters, buffers and modules."""


_BASES = (collections.OrderedDict, dict, list, collections.deque, set)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Any = _Missing()
"""In place of a value that is not there."""

Key = Any


class ContainerKind:
    """A kind of containers; `owner` is the container, or what has it.

    Attributes:
        noted: whether there is anything to put back; what holds values for ever is followed only.
        counted: whether the number of entries is a value too.
        sized: whether `len` tells how many entries the owner has.
    """

    noted: ClassVar[bool] = True
    counted: ClassVar[bool] = False
    sized: ClassVar[bool] = False

    def contents(self, owner: Any) -> Any:
        """What it holds now, as a collection of its own."""
        raise NotImplementedError

    def all_contents(self, owners: list[Any]) -> list[Any]:
        """The same of many; it is asked for before every step."""
        return list(map(self.contents, owners))

    def entries(self, contents: Any) -> Iterable[tuple[Key, Any]]:
        """Keys and values of contents."""
        return contents.items()  # type: ignore[no-any-return]

    def differs(self, owner: Any, kept: Any) -> bool:
        """Whether it holds something else than what was kept."""
        return not _same_items(self.contents(owner), kept)

    def put(self, owner: Any, kept: Any, left: Collection[Key] = ()) -> None:
        """Give it what was kept.

        Args:
            left: keys whose values stay as they are.
        """
        raise NotImplementedError

    def name(self, prefix: str, key: Key) -> str:
        """What an entry is called, in a container of that name."""
        return f"{prefix}[{key}]"


def _by_path(prefix: str, key: Key) -> str:
    """What belongs to a module of torch is called by the module's path."""
    return f"{prefix}.{key}" if prefix else str(key)


class _Mappings(ContainerKind):
    """Dictionaries. See NOTE [Subclasses]."""

    sized = True

    def contents(self, owner: dict[Any, Any]) -> dict[Any, Any]:
        return dict(owner) if type(owner) is dict else dict(_base_of(owner).items(owner))

    def put(self, owner: dict[Any, Any], kept: dict[Any, Any], left: Collection[Key] = ()) -> None:
        base = _base_of(owner)
        stay = {key: value for key, value in base.items(owner) if self._stays(key) or key in left}
        own = {key: value for key, value in kept.items() if not self._stays(key) and key not in left}
        base.clear(owner)
        base.update(owner, own)
        base.update(owner, stay)

    def _stays(self, key: Key) -> bool:  # noqa: ARG002  # subclasses ask for the key
        return False


def _base_of(owner: Any) -> Any:
    """The class of the standard library whose methods read and write what a container holds."""
    return next(base for base in _BASES if isinstance(owner, base))


class _ModuleAttributes(_Mappings):
    """The attributes of a module of torch, without what torch keeps there and what is put around its forward pass."""

    def entries(self, contents: dict[str, Any]) -> Iterable[tuple[Key, Any]]:
        return [(key, value) for key, value in contents.items() if not self._stays(key)]

    def differs(self, owner: dict[str, Any], kept: dict[str, Any]) -> bool:
        return not _same_items(owner, kept) and not _same_items(
            dict(self.entries(owner)), dict(self.entries(kept))
        )

    def name(self, prefix: str, key: Key) -> str:
        return _by_path(prefix, key)

    def _stays(self, key: Key) -> bool:
        return isinstance(key, str) and (key in MODULE_OWN or key == "forward" or key.startswith("_vramfit"))


class _Buffers(_Mappings):
    def name(self, prefix: str, key: Key) -> str:
        return _by_path(prefix, key)


@dataclass(frozen=True, slots=True, eq=False)
class Names:
    """Some of the keys of a dictionary, e.g. of globals; more may come."""

    space: dict[Any, Any]
    names: dict[Any, None] = field(default_factory=dict)
    prefix: str = ""


class _Entries(ContainerKind):
    """Those entries alone of a dictionary whose keys are known."""

    def contents(self, owner: Names) -> dict[Any, Any]:
        values = ((name, dict.get(owner.space, name, MISSING)) for name in owner.names)
        return {name: value for name, value in values if value is not MISSING}

    def put(self, owner: Names, kept: dict[Any, Any], left: Collection[Key] = ()) -> None:
        for name in owner.names:
            if name in left:
                continue
            if name not in kept:
                owner.space.pop(name, None)
            elif owner.space.get(name, MISSING) is not kept[name]:
                owner.space[name] = kept[name]


class _Globals(_Entries):
    def name(self, prefix: str, key: Key) -> str:
        return f"{prefix}{key}"


class _Parameters(_Entries):
    def name(self, prefix: str, key: Key) -> str:
        return _by_path(prefix, key)


class _Sequences(ContainerKind):
    """Lists and deques."""

    counted = sized = True

    def contents(self, owner: Any) -> list[Any]:
        return list(owner) if type(owner) is list else list(_base_of(owner).__iter__(owner))

    def entries(self, contents: list[Any]) -> Iterable[tuple[Key, Any]]:
        return enumerate(contents)

    def differs(self, owner: Any, kept: list[Any]) -> bool:
        now = owner if type(owner) is list else self.contents(owner)
        return len(now) != len(kept) or not all(one is other for one, other in zip(now, kept, strict=True))

    def put(self, owner: Any, kept: list[Any], left: Collection[Key] = ()) -> None:  # noqa: ARG002
        base = _base_of(owner)
        base.clear(owner)
        base.extend(owner, kept)


class _Sets(ContainerKind):
    counted = sized = True

    def contents(self, owner: set[Any]) -> set[Any]:
        return set(set.__iter__(owner))

    def entries(self, contents: set[Any]) -> Iterable[tuple[Key, Any]]:  # noqa: ARG002
        return ()  # it has no names for them

    def differs(self, owner: set[Any], kept: set[Any]) -> bool:
        return self.contents(owner) != kept

    def put(self, owner: set[Any], kept: set[Any], left: Collection[Key] = ()) -> None:  # noqa: ARG002
        set.clear(owner)
        set.update(owner, kept)


class _Cells(ContainerKind):
    """Of closures; the name of a cell is its variable's."""

    def contents(self, owner: types.CellType) -> Any:
        try:
            return owner.cell_contents
        except ValueError:  # not set
            return MISSING

    def entries(self, contents: Any) -> Iterable[tuple[Key, Any]]:
        return () if contents is MISSING else (("", contents),)

    def differs(self, owner: types.CellType, kept: Any) -> bool:
        return self.contents(owner) is not kept

    def put(self, owner: types.CellType, kept: Any, left: Collection[Key] = ()) -> None:  # noqa: ARG002
        if kept is MISSING:
            del owner.cell_contents
        else:
            owner.cell_contents = kept

    def name(self, prefix: str, key: Key) -> str:  # noqa: ARG002
        return prefix


class _Slots(ContainerKind):
    """Attributes of an object that lie in no dictionary."""

    def contents(self, owner: Any) -> dict[str, Any]:
        found = {}
        for kind in type(owner).__mro__:
            names = vars(kind).get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(owner, name):
                    found[name] = getattr(owner, name)
        return found

    def put(self, owner: Any, kept: dict[str, Any], left: Collection[Key] = ()) -> None:
        now = self.contents(owner)
        for name in now.keys() - kept.keys() - set(left):
            object.__delattr__(owner, name)
        for name, value in kept.items():
            if name not in left and now.get(name, MISSING) is not value:
                object.__setattr__(owner, name, value)  # frozen ones forbid theirs


class _Classes(ContainerKind):
    """A class's own attributes that are values, in which methods may count."""

    def contents(self, owner: type) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(owner).items()
            if not name.startswith("__") and not hasattr(type(value), "__get__")
        }

    def put(self, owner: type, kept: dict[str, Any], left: Collection[Key] = ()) -> None:
        now = self.contents(owner)
        for name in now.keys() - kept.keys() - set(left):
            delattr(owner, name)
        for name, value in kept.items():
            if name not in left and now.get(name, MISSING) is not value:
                setattr(owner, name, value)


class _Modes(ContainerKind):
    """Whether a module of torch trains, where nothing else of it is noted."""

    def contents(self, owner: nn.Module) -> bool:
        return owner.training

    def entries(self, contents: bool) -> Iterable[tuple[Key, Any]]:
        return (("training", contents),)

    def differs(self, owner: nn.Module, kept: bool) -> bool:
        return owner.training is not kept

    def put(self, owner: nn.Module, kept: bool, left: Collection[Key] = ()) -> None:  # noqa: ARG002
        owner.training = kept

    def name(self, prefix: str, key: Key) -> str:
        return _by_path(prefix, key)


class _Fixed(ContainerKind):
    """What cannot be changed: tuples, arguments of partial functions, defaults."""

    noted, sized = False, True

    def contents(self, owner: Any) -> Any:
        return owner

    def entries(self, contents: Iterable[Any]) -> Iterable[tuple[Key, Any]]:
        return enumerate(contents)


class _Parts(ContainerKind):
    """The tensors in a tensor that is a class around others, e.g. a quantised one."""

    noted = False

    def contents(self, owner: Any) -> dict[str, Any]:
        return {name: getattr(owner, name) for name in owner.__tensor_flatten__()[0]}


MAPPING = _Mappings()
MODULE = _ModuleAttributes()
BUFFERS = _Buffers()
ENTRIES = _Entries()
PARAMETERS = _Parameters()
MODE = _Modes()
GLOBALS = _Globals()
SEQUENCE = _Sequences()
SET = _Sets()
CELL = _Cells()
SLOTS = _Slots()
CLASS = _Classes()
FIXED = _Fixed()
PARTS = _Parts()


def _same_items(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    """Whether two dictionaries have the same keys and values, in the same order."""
    return len(one) == len(other) and all(
        key is known and value is before
        for (key, value), (known, before) in itertools.zip_longest(one.items(), other.items())
    )
