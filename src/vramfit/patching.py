"""Patching with its undo: what is replaced in Python is put back exactly as it was, in reverse order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

from vramfit.name_bindings import NameBindings


class _Absent:
    """Marks an attribute or item that did not exist before."""

    def __repr__(self) -> str:
        return "<absent>"


_ABSENT = _Absent()
_bindings = NameBindings()


class PatchStack:
    """Replaces attributes and items, and undoes all of it in reverse order.

    An attribute that did not exist is deleted again by the undo; one that an object merely inherited
    is uncovered again. It is a context manager: leaving the block undoes.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._rebound: list[tuple[object, object]] = []

    def __len__(self) -> int:
        """Number of steps that `undo` would take."""
        return len(self._undo)

    def set(self, obj: Any, name: str, value: Any) -> None:
        """Bind ``obj.name`` to `value` until the undo.

        Raises:
            TypeError: the object does not let its attributes be set (a C type).
            AttributeError: the object has no such attribute to set.
        """
        self.keep(obj, name)
        setattr(obj, name, value)

    def supply(self, obj: Any, name: str, value: Any) -> None:
        """As `set`, where it is known that the object may have no attribute of that name."""
        self.keep(obj, name)
        setattr(obj, name, value)

    def delete(self, obj: Any, name: str) -> None:
        """Delete ``obj.name``, if it is there, until the undo."""
        self.keep(obj, name)
        if name in vars(obj):
            delattr(obj, name)

    def keep(self, obj: Any, name: str) -> None:
        """Remember how ``obj.name`` stands now, so that the undo restores it whoever changes it in between.

        Only the object's own attribute counts: what it inherits is not copied into it.
        """
        before = vars(obj).get(name, _ABSENT)

        def undo() -> None:
            if before is not _ABSENT:
                setattr(obj, name, before)
            elif name in vars(obj):
                delattr(obj, name)

        self._undo.append(undo)

    def item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Bind ``mapping[key]`` to `value` until the undo."""
        before = mapping.get(key, _ABSENT)

        def undo() -> None:
            if before is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = before

        self._undo.append(undo)
        mapping[key] = value

    def call(self, undo: Callable[[], object]) -> None:
        """Register a step of the undo that no attribute or item expresses (a flag kept in C++, a handler)."""

        def step() -> None:
            undo()

        self._undo.append(step)

    def rebind(self, pairs: Iterable[tuple[object, object]]) -> int:
        """Replace objects under every module-level name bound to them, in every imported module.

        ``from torch.cuda import Stream`` copies the class into the importing module; without this such a
        module would keep the old one. Names inside classes, closures and containers are not looked at, and
        vramfit's own modules keep the originals.

        Returns:
            How many names were rebound; 0 inside `together`.
        """
        found = list(pairs)
        # A module that is imported while the patch stands binds the new objects by itself, so the undo asks for all
        # names again: once for all that was rebound, since names are found by identity in any order.
        self._rebound += [(new, old) for old, new in found]
        self.call(self._bind_back)
        return _rename(found)

    def _bind_back(self) -> None:
        back, self._rebound = self._rebound[::-1], []
        if back:
            _rename(back)

    def undo(self) -> None:
        """Undo everything, last first. Idempotent; an undo that fails does not keep the others from running.

        Raises:
            ExceptionGroup: some steps failed; all others were taken.
        """
        errors: list[Exception] = []
        while self._undo:
            step = self._undo.pop()
            try:
                step()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("some patches could not be undone", errors)

    def __enter__(self) -> PatchStack:
        """Give the stack itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Undo everything, whatever happened in the block."""
        self.undo()


_waiting: list[list[tuple[object, object]]] = []


@contextmanager
def together() -> Iterator[None]:
    """Rebind at once, at the end, all that any stack rebinds or binds back in the block, also where the block fails.

    To look for names takes most of the time of patching. No object that is replaced, and nothing that replaces one, may
    be held by the caller's own variables when the block ends: see NOTE [Who else holds it].
    """
    if _waiting:
        yield
        return
    with _bindings.gathered() as pairs:
        _waiting.append(pairs)
        try:
            yield
        finally:
            _waiting.clear()


def _rename(pairs: list[tuple[object, object]]) -> int:
    """Replace objects under all their names, now or at the end of `together`."""
    if _waiting:
        _waiting[0].extend(pairs)
        return 0
    return _bindings.swap(pairs)


# -- Modules that are not imported yet -------------------------------------------------------------------------


Change = Callable[[ModuleType], object]


def after_import(changes: Mapping[str, Change], patches: PatchStack) -> None:
    """Change modules by name: those that are imported already, and the others once they have been executed."""
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
    finder = _AfterImport(changes)
    sys.meta_path.insert(0, finder)
    patches.call(lambda: sys.meta_path.remove(finder))


class _AfterImport(MetaPathFinder):
    """Finds what the other finders find, and has modules changed once they have been executed."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is to be changed; None for all others, which the next finder looks for."""
        change = self._changes.get(fullname)
        if change is None:
            return None
        # Those behind this one: another of this class before it, for the same module, has asked it.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                change_after(spec, change)
                return spec
        return None


def change_after(spec: ModuleSpec, change: Change) -> None:
    """Have a module changed once it has been executed."""
    if spec.loader is not None:
        spec.loader = _ChangingLoader(spec.loader, change)  # type: ignore[assignment]


class _ChangingLoader:
    """A loader that changes the module once it has been executed; several modules may share the one behind it."""

    def __init__(self, loader: Any, change: Change) -> None:
        self._loader = loader
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Do as the loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do as the loader does, which the module keeps as its own, and change the module."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._change(module)
