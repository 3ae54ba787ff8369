"""What a function reaches: the containers, tensors and generators that a call of it may read or change.

NOTE [Reach]: a step moves more than its arguments say: an attribute of the model, a counter in a closure, a teacher's
weights, an optimizer of its own. So everything is followed that a function can name: the cells of its closure, the
globals in its code, the object that it is bound to, the attributes of all of these, and the same of the functions that
those hold. Libraries' own code is not read, but the attributes of their objects are. The walk goes breadth first, so
that what is near is certain to be seen, and ends at `MOST` objects.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vramfit.techniques.core.array_values import is_array
from vramfit.techniques.core.random_generators import is_generator

MOST = 100_000
"""Objects that are looked at."""

LONG = 10_000
"""Entries of a container from which on what they hold is far: it may be data, and is not looked at in every step."""

_HOOKS = ("_hooks", "_hooks_with_kwargs")

_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size,
)  # fmt: skip

_PASSED_BY = (
    type(sys), type, logging.Logger, logging.Handler, io.IOBase, threading.Thread, weakref.ref, types.CodeType,
    types.FrameType, types.TracebackType, property,
)  # fmt: skip

_LOOPS = frozenset({"transformers", "accelerate", "lightning", "pytorch_lightning", "vramfit", "logging"})
"""Libraries whose objects (a Trainer, an Accelerator) are loops and not what a step moves, but for modules of torch."""


@dataclass
class Reached:
    """What was reached, each once.

    Attributes:
        mappings: dictionaries, those of objects' attributes included.
        sequences: lists, deques and sets.
        names: dictionaries of which some entries alone are reached, as of globals.
        classes: with the names of their attributes that are values.
        cells: of closures.
        tensors: with memory.
        arrays: see `is_array`.
        generators: random ones.
        streams: what gives one value after the other and cannot be set back: iterators, and Python's generators.
        modules: of torch.
        far: what containers of more than `LONG` entries hold; None where there are no such.
        whole: whether everything was followed.
    """

    mappings: list[dict[Any, Any]] = field(default_factory=list)
    sequences: list[Any] = field(default_factory=list)
    names: list[tuple[dict[str, Any], tuple[str, ...]]] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    slots: list[Any] = field(default_factory=list)
    cells: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    streams: list[Any] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    far: Reached | None = None
    whole: bool = True


def reached_from(roots: Iterable[Any], *, without: Iterable[Any] = ()) -> Reached:
    """What a step with these functions and objects reaches. See NOTE [Reach].

    Args:
        roots: functions, modules, optimizers and other objects.
        without: objects that are neither noted nor followed.
    """
    walk = _Walk(without)
    walk.follow(roots)
    return walk.found


def streams_are_equal(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether `stream_position` gave the same."""
    return len(before) == len(after) and all(
        one is other or one == other for one, other in zip(before, after, strict=True)
    )


def stream_position(stream: Any) -> tuple[Any, ...]:
    """How far a stream has come, as far as it says; what says nothing is taken to move with every step."""
    if isinstance(stream, types.GeneratorType):
        frame = stream.gi_frame
        place = -1 if frame is None else frame.f_lasti
        held = () if frame is None else tuple(map(id, frame.f_locals.values()))
        return (place, *held)
    if type(stream).__module__ == "builtins" and hasattr(stream, "__length_hint__"):
        return (stream.__length_hint__(),)  # an iterator over a list, a range, ...
    return (object(),)


class _Walk:
    """The walk itself."""

    def __init__(self, without: Iterable[Any]) -> None:
        self.found = Reached()
        self._alive: list[Any] = list(without)
        self._seen = set(map(id, self._alive))
        self._waiting: collections.deque[Any] = collections.deque()
        self._far: list[Any] = []
        self.code_names: set[str] = set()

    def follow(self, roots: Iterable[Any]) -> None:
        """Look at everything that the roots lead to, as far as `MOST` allows; at last at what is far."""
        self._near(roots)
        if self._far:
            near, self.found, far = self.found, Reached(), self._far
            while far:
                self._far = []
                self._near(far)
                far = self._far
            self.found, near.far = near, self.found
            near.whole = near.whole and near.far.whole

    def _near(self, roots: Iterable[Any]) -> None:
        self._add(roots)
        count = 0
        while self._waiting:
            count += 1
            if count > MOST:
                self.found.whole = False
                return
            self._look_at(self._waiting.popleft())

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            self._waiting.append(value)

    def _look_at(self, value: Any) -> None:
        found = self.found
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._add((value.__self__, value.__func__))
        elif isinstance(value, types.CellType):
            found.cells.append(value)
            self._add(_content(value))
        elif isinstance(value, functools.partial):
            self._add((value.func, *value.args, *value.keywords.values()))
        elif is_generator(value):
            found.generators.append(value)
        elif isinstance(value, dict):
            found.mappings.append(value)
            self._entries(value)
        elif isinstance(value, list | collections.deque):
            found.sequences.append(value)
            self._elements(value)
        elif isinstance(value, set):
            found.sequences.append(value)
        elif isinstance(value, tuple | frozenset):
            self._elements(value)
        elif isinstance(value, _PASSED_BY):
            return
        elif is_array(value):
            found.arrays.append(value)
        else:
            self._object(value)

    def _entries(self, mapping: dict[Any, Any]) -> None:
        if len(mapping) <= LONG:
            self._add(key for key in mapping if isinstance(key, torch.Tensor))
        self._elements(mapping.values())

    def _elements(self, values: Collection[Any]) -> None:
        if len(values) <= LONG:
            self._add(values)
        else:
            self._far += values

    def _tensor(self, tensor: torch.Tensor) -> None:
        parts = getattr(tensor, "__tensor_flatten__", None)
        if parts is None:
            self.found.tensors.append(tensor)
        else:  # a class of tensors around others, e.g. a quantised one, which hold its values
            self._add(getattr(tensor, name) for name in parts()[0])
        if tensor.is_leaf and tensor.grad is not None:
            self._add((tensor.grad,))
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            self.found.mappings.append(attributes)
            self._entries(attributes)

    def _function(self, function: types.FunctionType) -> None:
        self._add(function.__closure__ or ())
        self._add(function.__defaults__ or ())
        self._add((function.__kwdefaults__ or {}).values())
        self._add(function.__dict__.values())
        if _of_library(function.__module__):
            return
        mentioned = _names_in(function.__code__)
        self.code_names.update(mentioned)
        names = tuple(name for name in mentioned if name in function.__globals__)
        if names:
            self.found.names.append((function.__globals__, names))
        for name in names:
            value = function.__globals__[name]
            if isinstance(value, types.ModuleType):
                self._module_of_python(value, function.__code__)
            elif isinstance(value, type):
                self._class(value)
            else:
                self._add((value,))

    def _module_of_python(self, module: types.ModuleType, code: types.CodeType) -> None:
        """Values in a program's own module that a function may name: ``settings.step``."""
        if _of_library(module.__name__):
            return
        names = tuple(name for name in _names_in(code) if name in vars(module))
        if names:
            self.found.names.append((vars(module), names))
            self._add(
                vars(module)[name] for name in names if not isinstance(vars(module)[name], types.ModuleType)
            )

    def _class(self, kind: type) -> None:
        """A class of the program's own: its values, and what its functions name."""
        for one in kind.__mro__:
            if id(one) in self._seen or _of_library(one.__module__):
                continue
            self._seen.add(id(one))
            self._alive.append(one)
            self.found.classes.append(one)
            for value in vars(one).values():
                inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                inner = inner.fget if isinstance(inner, property) else inner
                if not isinstance(inner, type):
                    self._add((inner,))

    def _object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, nn.Module):
            self._torch_module(value)
            return
        if kind.__module__.partition(".")[0] in _LOOPS and not isinstance(value, torch.optim.Optimizer):
            return
        if hasattr(kind, "__next__"):
            self.found.streams.append(value)
            if isinstance(value, types.GeneratorType) or not hasattr(value, "__dict__"):
                return
        self._class(kind)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self.found.mappings.append(attributes)
            self._entries(attributes)
        if any("__slots__" in vars(one) for one in kind.__mro__) and not _of_library(kind.__module__):
            self.found.slots.append(value)
            self._add(slots_of(value).values())

    def _torch_module(self, module: nn.Module) -> None:
        self.found.modules.append(module)
        self._class(type(module))
        attributes = vars(module)
        own = not type(module).__module__.startswith("torch.nn.")
        if own:
            self.found.mappings.append(attributes)
        for name, value in attributes.items():
            if name == "_buffers":
                if value:
                    self.found.mappings.append(value)
                    self._add(one for one in value.values() if one is not None)
            elif name in ("_modules", "_parameters"):
                self._add(one for one in value.values() if one is not None)
            elif name.endswith(_HOOKS):
                if value:
                    self._add(value.values())
            elif own or not isinstance(value, dict | set):
                self._add((value,))


def slots_of(value: Any) -> dict[str, Any]:
    """The values in an object's slots."""
    found = {}
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def values_of_class(kind: type) -> dict[str, Any]:
    """A class's own attributes that are values, which an instance's methods may count in."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not name.startswith("__") and isinstance(value, (*_PLAIN, torch.Tensor))
    }


def _content(cell: Any) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # not set yet
        return


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function's code mentions, those of functions inside of it too."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_names_in(constant))
    return tuple(names)


@functools.lru_cache(maxsize=4096)
def _of_library(module: str | None) -> bool:
    """Whether a module was installed, or comes with Python: its own code is not read."""
    root = (module or "builtins").partition(".")[0]
    if root in sys.builtin_module_names or root in ("torch", "numpy", "vramfit", "builtins"):
        return True
    if root == "__main__":
        return False
    place = getattr(sys.modules.get(root), "__file__", None)
    if place is None:
        places = list(getattr(sys.modules.get(root), "__path__", ()))
        if not places:
            return False
        place = places[0]
    return any(place.startswith(folder) for folder in _library_folders()) or "site-packages" in place


@functools.cache
def _library_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def names_reached(roots: Iterable[Any]) -> set[str]:
    """All names in the code of the program's own functions that can be reached."""
    walk = _Walk(())
    walk.follow(roots)
    return walk.code_names
