"""Private names of torch, looked up by path: one that is missing switches off what needs it, and is reported.

NOTE [A name that is missing]
torch may rename or drop what is private in any release. Each name is looked up with the `Feature` that needs it:

1. A name that is read or called becomes an `Absent` where it is missing. It raises `AbsentName` when it is used.
2. A name that is replaced is a `TorchName`. Where it is missing, nothing is replaced.
3. A group of patches is applied by `attempt`: all of it, or nothing where a name is missing on the way.

Each case notes path and feature. `report` tells a listener of those noted already, and of later ones as the program
imports more of torch.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NoReturn

import torch

from vramfit.errors import EnvironmentUnfitError
from vramfit.patching import Change, PatchStack, after_import

Listener = Callable[[str], object]


class AbsentName(EnvironmentUnfitError):
    """A private name was used that the installed torch does not have."""


class Feature:
    """What vramfit does with a group of private names, in a few words that follow "needs ... for"."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self.missing: list[str] = []
        _features.append(self)

    def find(self, path: str) -> Any:
        """What stands at a full path now; an `Absent` where nothing does."""
        try:
            return _resolve(path)
        except (ImportError, AttributeError):
            self.lack(path)
            return Absent(path, self)

    def place(self, path: str) -> TorchName:
        """A name that is to be replaced; it is looked up when it is used."""
        return TorchName(path, self)

    def lack(self, path: str) -> None:
        """Note a name as missing."""
        if path not in self.missing:
            self.missing.append(path)
            for listener in tuple(_listeners):
                listener(self._sentence(path))

    def sentences(self) -> list[str]:
        """What is missing, a sentence each."""
        return [self._sentence(path) for path in self.missing]

    def _sentence(self, path: str) -> str:
        return f"torch {torch.__version__} has no {path}, which vramfit needs for {self.purpose}: this is switched off"


_features: list[Feature] = []
_listeners: list[Listener] = []


class Absent:
    """Stands for a private name that the installed torch does not have: false, and any use of it raises."""

    def __init__(self, path: str, feature: Feature) -> None:
        self._path = path
        self._feature = feature

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<no {self._path}>"

    def _refuse(self) -> NoReturn:
        raise AbsentName(
            f"torch {torch.__version__} has no {self._path}, which vramfit needs for {self._feature.purpose}",
            "Use a release of torch that docs/versions.md lists, or report this one.",
        )

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse.

        Raises:
            AbsentName: always.
        """
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # copy, pickle and inspect ask for protocols that it does not have
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False  # nothing is of a class that is not there

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        """A class that builds on one that is missing can be defined, and no object of it be made."""

        def refuse(*_: Any, **__: Any) -> Any:
            self._refuse()

        return (type(repr(self), (), {"__new__": refuse}),)

    def __getitem__(self, key: object) -> Any:
        self._refuse()

    def __iter__(self) -> Iterator[Any]:
        self._refuse()

    def __contains__(self, item: object) -> bool:
        self._refuse()


class TorchName:
    """A private name of torch by its path, to be read late or replaced for a time."""

    def __init__(self, path: str, feature: Feature) -> None:
        self.path = path
        self._holder_path, _, self.name = path.rpartition(".")
        self._feature = feature

    @property
    def holder(self) -> Any:
        """The module, class or object that the name is bound in.

        Raises:
            AbsentName: there is none.
        """
        found = self._feature.find(self._holder_path)
        if isinstance(found, Absent):
            found._refuse()
        return found

    def get(self) -> Any:
        """What is bound now; an `Absent` where nothing is."""
        return self._feature.find(self.path)

    @property
    def exists(self) -> bool:
        """Whether the installed torch has the name."""
        try:
            _resolve(self.path)
        except (ImportError, AttributeError):
            return False
        return True

    def replace(self, patches: PatchStack, value: Any) -> bool:
        """Bind another value until the undo; returns False where there is nothing to replace."""
        if isinstance(self.get(), Absent):
            return False
        patches.set(self.holder, self.name, value)
        return True

    def supply(self, patches: PatchStack, value: Any) -> None:
        """Bind a value until the undo, also where only other builds of torch have the name."""
        patches.supply(self.holder, self.name, value)

    def keep(self, patches: PatchStack) -> None:
        """Remember what is bound, so that the undo restores it."""
        patches.keep(self.holder, self.name)


def report(listener: Listener, patches: PatchStack) -> None:
    """Tell of every name that is missing, of those that are found to be later too, until the undo."""
    for feature in _features:
        for sentence in feature.sentences():
            listener(sentence)
    _listeners.append(listener)
    patches.call(lambda: _listeners.remove(listener))


def attempt(feature: Feature, patches: PatchStack, install: Callable[[PatchStack], Any]) -> Any:
    """Apply a group of patches; where a name of torch is missing on the way, none of them, and None is returned."""
    with _all_or_nothing(feature, patches) as group:
        return install(group)


class _Group(PatchStack):
    """Patches that replace only what torch has: a public name deep in torch may go as well as a private one."""

    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self._feature = feature

    def set(self, obj: Any, name: str, value: Any) -> None:
        """As `PatchStack.set`; a name that is missing in torch is noted and left out."""
        if _of_torch(obj) and not _has(obj, name):
            self._feature.lack(f"{_path_of(obj)}.{name}")
        else:
            super().set(obj, name, value)


_NOTHING = object()


def _has(obj: Any, name: str) -> bool:
    """Whether an object has a name, also one that it cannot answer without a card."""
    return inspect.getattr_static(obj, name, _NOTHING) is not _NOTHING or hasattr(obj, name)


@contextmanager
def _all_or_nothing(feature: Feature, patches: PatchStack) -> Iterator[PatchStack]:
    group = _Group(feature)
    patches.call(group.undo)
    try:
        yield group
    except AbsentName:  # noted already
        group.undo()
    except AttributeError as error:
        if not _of_torch(error.obj):
            raise
        group.undo()
        feature.lack(f"{_path_of(error.obj)}.{error.name}")
    except ImportError as error:
        if not (error.name or "").startswith("torch"):
            raise
        group.undo()
        feature.lack(_imported(error))


def _of_torch(holder: object) -> bool:
    name = (
        holder.__name__
        if isinstance(holder, ModuleType)
        else (holder if isinstance(holder, type) else type(holder)).__module__
    )
    return name.partition(".")[0] == "torch"


def _path_of(holder: Any) -> str:
    if isinstance(holder, ModuleType):
        return holder.__name__
    cls = holder if isinstance(holder, type) else type(holder)
    return f"{cls.__module__}.{cls.__qualname__}"


def _imported(error: ImportError) -> str:
    """The path that could not be imported: a module, or a name in one."""
    name = getattr(error, "name_from", None)  # from Python 3.12 on
    return f"{error.name}.{name}" if name else str(error.name)


def change_after_import(
    feature: Feature, changes: Mapping[str, Callable[[ModuleType, PatchStack], object]], patches: PatchStack
) -> None:
    """Patch modules of torch once they are imported, each whole or not at all (see `attempt`)."""

    def guarded(change: Callable[[ModuleType, PatchStack], object]) -> Change:
        return lambda module: attempt(feature, patches, lambda group: change(module, group))

    after_import({name: guarded(change) for name, change in changes.items()}, patches)


def in_signature_of(
    feature: Feature, original: Callable[..., Any], replacement: Callable[..., Any]
) -> Callable[..., Any]:
    """A replacement that takes what the installed torch's own function takes.

    Arguments reach the replacement by the names that torch gives them. Those that it has no parameter for, which a
    later release has added, are left out. Where torch's function lacks one that the replacement cannot do without, that
    is noted and torch's own is given back.
    """
    signature = inspect.signature(original)
    ours = inspect.signature(replacement).parameters
    wanted = frozenset(ours)
    needed = {name for name, one in ours.items() if one.default is inspect.Parameter.empty}
    if gone := sorted(needed - frozenset(signature.parameters)):
        feature.lack(f"{original.__module__}.{original.__qualname__}({', '.join(gone)})")
        return original

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return replacement(**{name: value for name, value in given.items() if name in wanted})

    return call


def _resolve(path: str) -> Any:
    """The object at a path: modules are imported as far as they go, the rest are attributes."""
    parts = path.split(".")
    found: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        name = ".".join(parts[:at])
        if name in sys.modules and isinstance(found, ModuleType):
            found = sys.modules[
                name
            ]  # an attribute of that name may hide the module (torch.distributed.rendezvous)
            continue
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise
            found = importlib.import_module(name)
    return found
