"""How one object holds another, as text that continues a path: ``.history``, ``[12]``, `` -> closure x``.

Nothing here runs code of the program: attributes are read from dictionaries and slots, types are compared by
identity, and keys are shown only where they are plain values.
"""

from __future__ import annotations

import collections
import enum
import functools
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import torch

from vramfit.holders.chains import Link, Through
from vramfit.torch_internals.autograd_engine import TensorBase
from vramfit.torch_internals.dispatch import DisableTorchFunction

_LONGEST_KEY = 40
_LONGEST_TEXT = 400
_PLAIN = frozenset({str, int, float, bool, bytes, type(None), complex})
_NO_TEXT = frozenset(
    {"_modules", "_parameters", "_buffers"}
)  # of a module: what they hold reads as its attribute
_CO_OPTIMIZED = 0x1
_PARTIAL = functools.partial
_SIZE: Any = TensorBase.size
LRU = type(functools.lru_cache(lambda: None))
"""The type of what ``functools.lru_cache`` makes."""
_GENERATORS = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_LOCAL = threading.local


def type_name(of: object) -> str:
    """``list``, ``train.Metrics``: the type of an object with its module unless built in."""
    kind = type(of)
    module = type.__dict__["__module__"].__get__(kind)
    name = type.__dict__["__qualname__"].__get__(kind)
    return name if module in ("builtins", None) or not isinstance(module, str) else f"{module}.{name}"


def is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    """Like isinstance, but never runs the object's own ``__class__``."""
    return issubclass(type(value), kind)


def instance_dict(value: object) -> dict[Any, Any] | None:
    """The ``__dict__`` of an object, without its own ``__getattribute__``."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:
        return None
    return found if type(found) is dict else None


def key_text(key: object, depth: int = 0) -> str:
    """A key of a dictionary, shown if it is a plain value."""
    kind = type(key)
    if kind in _PLAIN:
        text = repr(key)
        return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 1]}…"
    if kind is tuple and depth < 2 and len(key) <= 4:  # type: ignore[arg-type]
        return f"({', '.join(key_text(one, depth + 1) for one in key)})"  # type: ignore[attr-defined]
    if issubclass(kind, torch.Tensor):
        with DisableTorchFunction():
            return f"<{kind.__name__} {tuple(_SIZE(key))}>"
    if issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{object.__getattribute__(key, '_name_')}"
    return f"<{type_name(key)}>"


def location(code: types.CodeType, line: int | None) -> str:
    """``train() (train.py:33)``."""
    return f"{code.co_qualname}() ({FilePath(code.co_filename).name}:{line or code.co_firstlineno})"


def local_names(frame: types.FrameType) -> dict[str, int]:
    """The variables of a frame and the ids of their values, without leaving a snapshot that keeps them alive."""
    return {name: id(value) for name, value in local_values(frame).items()}


def local_values(frame: types.FrameType) -> dict[str, object]:
    """The variables of a frame, without leaving a snapshot that keeps them alive once the result is gone.

    Until Python 3.12 ``f_locals`` of a function is a dictionary that stays with the frame; it is emptied again where
    nobody else has it. (Objects/frameobject.c, PyFrame_FastToLocalsWithError; 3.13 gives a view, PEP 667.)
    """
    snapshot = frame.f_locals
    try:
        values = dict(snapshot)
    except Exception:
        return {}
    function = frame.f_code.co_flags & _CO_OPTIMIZED
    if sys.version_info < (3, 13) and function and type(snapshot) is dict and sys.getrefcount(snapshot) <= 3:
        snapshot.clear()
    return values


def _local_name(frame: types.FrameType | None, child: object) -> str:
    if frame is None:
        return ""
    return next((name for name, number in local_names(frame).items() if number == id(child)), "")


class Path:
    """Writes the text of a chain link by link; what an edge means depends on the ones before it."""

    def __init__(self, start: str = "", *, attributes: bool = False) -> None:
        self.text = start
        self.through: set[Through] = set()
        self.links: list[Link] = []
        self._as_attributes = attributes  # the dictionary that comes next holds attributes
        self._function: object = None  # whose closure comes next
        self._cache = False  # the dictionary that comes next is that of a functools cache

    def step(self, parent: object, child: object, told: str | None = None) -> None:
        """Add how ``parent`` holds ``child``; ``told`` is that text where only the search knows it."""
        before = len(self.text)
        self.text += self._edge(parent, child) if told is None else told
        self.links.append(Link(kind=type_name(parent), edge=self.text[before:].strip()))

    def finish(self) -> str:
        """The whole text, cut in its middle where it is too long."""
        text = re.sub(
            r"( ->)+(?= ->|$)", "", self.text
        )  # of objects that say nothing of how they hold the next
        if len(text) <= _LONGEST_TEXT:
            return text
        half = _LONGEST_TEXT // 2 - 2
        return f"{text[:half]} … {text[-half:]}"

    # -- edges ---------------------------------------------------------------------------------------------------

    def _edge(self, parent: object, child: object) -> str:
        attributes, self._as_attributes = self._as_attributes, False
        function, self._function = self._function, None
        cache, self._cache = self._cache, False
        if is_a(parent, dict):
            entry = self._entry(parent, child, attributes, cache)  # type: ignore[arg-type]
            return self._attribute(parent, child) if entry is None else entry
        if type(parent) is tuple and function is not None:
            names = function.__code__.co_freevars  # type: ignore[attr-defined]
            index = next((i for i, cell in enumerate(parent) if cell is child), None)
            return (
                f" -> closure {names[index]}" if index is not None and index < len(names) else " -> closure"
            )
        for kinds, tell in _TELLERS:
            if is_a(parent, kinds) and (text := tell(self, parent, child)) is not None:
                return str(text)
        return self._attribute(parent, child)

    def _entry(self, parent: dict[Any, Any], child: object, attributes: bool, cache: bool) -> str | None:
        for key, value in _pairs(parent):
            if value is child:
                if cache:
                    return " -> cached result"
                if attributes and type(key) is str:
                    return self._named(key)
                if attributes and _is_of_thread(key):  # its attributes are the next dictionary
                    self._as_attributes = True
                    return ""
                return f"[{key_text(key)}]"
            if key is child:
                return " -> cached argument" if cache else f" key {key_text(key)}"
        return " -> cached argument" if cache else None

    def _named(self, key: str) -> str:
        if key in _NO_TEXT:
            self._as_attributes = True
            return ""
        if key.endswith("_hooks"):
            self.through.add(Through.HOOK)
        return f".{key}"

    def _attribute(self, parent: object, child: object) -> str:
        attributes = instance_dict(parent)
        if is_a(parent, torch.nn.Module):
            self.through.add(Through.MODULE)
        if is_a(parent, torch.optim.Optimizer):
            self.through.add(Through.OPTIMIZER)
        if attributes is not None:
            if attributes is child:
                self._as_attributes = True
                return ""
            for key, value in _pairs(attributes):
                if value is child and type(key) is str:
                    return self._named(key)
        for name, value in _slots(parent):
            if value is child:
                return f".{name}"
        return f" -> {type_name(parent)} ->"

    def _sequence(self, parent: Any, child: object) -> str | None:
        for index, value in enumerate(
            list.__iter__(parent) if is_a(parent, list) else tuple.__iter__(parent)
        ):
            if value is child:
                return f"[{index}]"
        return None

    def _deque(self, parent: Any, child: object) -> str | None:
        index = next(
            (i for i, value in enumerate(list(collections.deque.__iter__(parent))) if value is child), None
        )
        return None if index is None else f"[{index}]"

    def _class(self, _parent: object, _child: object) -> str:
        self._as_attributes = True
        return ""

    def _member(self, _parent: object, _child: object) -> str:
        return " -> member"

    def _called(self, parent: Any, child: object) -> str | None:
        if parent.__closure__ is child:
            self._function = parent
            self.through.add(Through.CLOSURE)
            return ""
        if parent.__defaults__ is child or parent.__kwdefaults__ is child:
            self.through.add(Through.DEFAULT)
            return " -> defaults"
        return None

    def _cell(self, _parent: object, _child: object) -> str:
        return ""

    def _method(self, parent: Any, child: object) -> str:
        return " -> __self__" if parent.__self__ is child else " -> __func__"

    def _partial(self, parent: Any, child: object) -> str | None:
        if parent.args is child:
            return " -> partial arguments"
        if parent.keywords is child:
            return " -> partial keywords"
        return " -> partial function" if parent.func is child else None

    def _cached(self, parent: object, child: object) -> str | None:
        self.through.add(Through.CACHE)
        if instance_dict(parent) is child:
            return None
        if type(child) is dict:
            self._cache = True
            return ""
        return " -> cached result"

    def _generator(self, parent: Any, child: object) -> str:
        self.through.add(Through.GENERATOR)
        prefix = next(p for p in ("gi", "cr", "ag") if hasattr(type(parent), f"{p}_frame"))
        frame, code = getattr(parent, f"{prefix}_frame"), getattr(parent, f"{prefix}_code")
        if child is frame:
            return ""
        name = _local_name(frame, child)
        return f" -> suspended {location(code, frame and frame.f_lineno)}{f' local {name}' if name else ''}"

    def _frame(self, parent: Any, child: object) -> str:
        if child is parent.f_back:
            return " -> caller"
        name = _local_name(parent, child)
        return f" -> {location(parent.f_code, parent.f_lineno)}{f' local {name}' if name else ''}"

    def _traceback(self, _parent: object, _child: object) -> str:
        return ""

    def _exception(self, parent: Any, child: object) -> str | None:
        if type(child) is types.TracebackType:
            self.through.add(Through.TRACEBACK)
            return f" {type(parent).__name__} traceback"
        for name in ("__cause__", "__context__", "args"):
            if BaseException.__dict__[name].__get__(parent) is child:
                return f".{name}"
        return None

    def _weak(self, _parent: object, _child: object) -> str:
        self.through.add(Through.WEAKREF_CALLBACK)
        return " -> callback of a weak reference"

    def _thread(self, _parent: object, _child: object) -> str:
        # Modules/_threadmodule.c, local_traverse: a dictionary by thread, whose values are the attributes.
        self.through.add(Through.THREAD_LOCAL)
        self._as_attributes = True
        return ""


def _is_of_thread(key: object) -> bool:
    """Whether a key of a thread-local's dictionary stands for a thread: a weak reference until Python 3.12."""
    return type(key) is weakref.ref or type_name(key) == "_thread._localdummy"


def _pairs(mapping: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """Entries of a dictionary, by dict's own iteration whatever its class; nothing if it changes meanwhile."""
    try:
        found = list(dict.items(mapping))
    except RuntimeError:
        found = []
    return iter(found)


def _slots(value: object) -> Iterator[tuple[str, object]]:
    """Name and value of the slots of an object, read by their C descriptors."""
    for kind in type.__dict__["__mro__"].__get__(type(value)):
        for name, member in list(type.__dict__["__dict__"].__get__(kind).items()):
            if type(member) is types.MemberDescriptorType:
                try:
                    yield name, member.__get__(value)
                except (AttributeError, TypeError):
                    continue


_TELLERS: tuple[tuple[Any, Any], ...] = (
    ((list, tuple), Path._sequence),
    (collections.deque, Path._deque),
    ((set, frozenset), Path._member),
    (types.FunctionType, Path._called),
    (types.CellType, Path._cell),
    (types.MethodType, Path._method),
    (_PARTIAL, Path._partial),
    (LRU, Path._cached),
    (_GENERATORS, Path._generator),
    (types.FrameType, Path._frame),
    (types.TracebackType, Path._traceback),
    (BaseException, Path._exception),
    (_LOCAL, Path._thread),
    (weakref.ref, Path._weak),
    (type, Path._class),
)
