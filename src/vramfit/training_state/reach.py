"""What a function or a model reaches: the containers, tensors and generators that a call of it may read or change.

NOTE [Reach]: a step moves more than its arguments say: an attribute of the model, a counter in a closure, a teacher's
weights, an optimizer of its own. So everything is followed that a function can name: the cells of its closure, the
globals in its code, the object that it is bound to, the attributes of all of these, and the same of the functions that
those hold. Libraries' own code is not read, but the attributes of their objects are. The walk goes breadth first, so
that what is near is certain to be seen, and ends at as many objects as the scope says.
"""

from __future__ import annotations

import collections
import functools
import io
import logging
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from vramfit.training_state.array_values import bytes_of_array, is_array
from vramfit.training_state.container_kinds import (
    BUFFERS,
    CELL,
    CLASS,
    FIXED,
    GLOBALS,
    MAPPING,
    MODE,
    MODULE,
    PARAMETERS,
    PARTS,
    SEQUENCE,
    SET,
    SLOTS,
    ContainerKind,
    Names,
)
from vramfit.training_state.program_code import called, names_in
from vramfit.training_state.random_generators import is_generator
from vramfit.training_state.scope import STEP, Scope

PLAIN = (int, float, complex, bool, str, bytes, type(None))
"""Values that are compared as they are."""

Label = Any
"""What a container is called: words, or the label, kind and key of where it was met; see `label_in_words`."""

_HOOKS = ("_hooks", "_hooks_with_kwargs")

_SKIPPED = (*PLAIN, type(...), range, slice, torch.dtype, torch.device, torch.Size)

_PASSED_BY = (
    type(sys), logging.Logger, logging.Handler, io.IOBase, threading.Thread, weakref.ref, types.CodeType,
    types.FrameType, types.TracebackType, property,
)  # fmt: skip

_OF_MODULES = (MODULE, BUFFERS, PARAMETERS)


class Reached:
    """What was reached, each once.

    Attributes:
        places: containers with their kinds and labels, those that cannot be changed included.
        tensors: with memory.
        arrays: see `is_array`.
        generators: random ones.
        streams: what gives one value after the other and cannot be set back: iterators, and Python's generators.
        code_names: all names in the code of the program's own functions.
        far: what very long containers hold; None where there are no such.
        whole: whether everything was followed.
    """

    def __init__(self) -> None:
        self.places: list[tuple[ContainerKind, Any, Label]] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[Any] = []
        self.generators: list[Any] = []
        self.streams: list[Any] = []
        self.code_names: set[str] = set()
        self.far: Reached | None = None
        self.whole = True
        self._noted: dict[ContainerKind, list[Any]] = collections.defaultdict(list)

    def hold(self, kind: ContainerKind, owner: Any, label: Label = "") -> None:
        """Take in a container."""
        self.places.append((kind, owner, label))
        if kind.noted:
            self._noted[kind].append(owner)

    def noted(self) -> Iterable[tuple[ContainerKind, list[Any]]]:
        """The containers that can be changed, by kind."""
        return self._noted.items()

    def of(self, kind: ContainerKind) -> list[Any]:
        """The containers of a kind."""
        return self._noted[kind]


def reached_from(roots: Iterable[Any], *, without: Iterable[Any] = ()) -> Reached:
    """What a step with these functions and objects reaches. See NOTE [Reach].

    Args:
        roots: functions, modules, optimizers and other objects.
        without: objects that are neither noted nor followed.
    """
    walk = _Walk(STEP, without)
    walk.follow((root, "") for root in roots)
    return walk.found


def reached_in_turn(roots: Iterable[tuple[Any, Label]], scope: Scope) -> Reached:
    """The same for roots with names: what several of them reach is called as the first of them reaches it."""
    walk = _Walk(scope, ())
    for root in roots:
        walk.follow([root])
    return walk.found


def attributes_reached(model: nn.Module, names: Iterable[str], scope: Scope) -> Reached:
    """What some attributes of a model's modules hold, ``block.steps``."""
    walk = _Walk(scope, ())
    owners: dict[str, list[str]] = collections.defaultdict(list)
    for name in names:
        path, _, attribute = name.rpartition(".")
        owners[path].append(attribute)
    for path, attributes in owners.items():
        walk.attributes(model.get_submodule(path), path, attributes)
    walk.follow(())
    return walk.found


def label_in_words(label: Label) -> str:
    """What a label says, e.g. ``head.stats[count]``."""
    if isinstance(label, str):
        return label
    before, kind, key = label
    words: str = kind.name(label_in_words(before), key)
    return words


def named_values(reached: Reached, scope: Scope) -> Iterator[tuple[str, Any]]:
    """Tensors, arrays, generators and plain values with the names of their places; one in several places comes again.

    Data is left out: what is larger than `Scope.largest` and no attribute of a module.
    """
    for kind, owner, label in reached.places:
        prefix = label_in_words(label)
        if kind.counted:
            yield f"{prefix}[length]", len(owner)
            if len(owner) > scope.near:
                continue
        for key, value in kind.entries(kind.contents(owner)):
            if _is_value(value, scope, any_size=kind in _OF_MODULES):
                yield kind.name(prefix, key), value


def _is_value(value: Any, scope: Scope, *, any_size: bool) -> bool:
    if isinstance(value, PLAIN):
        return True
    if isinstance(value, torch.Tensor):
        whole = not hasattr(value, "__tensor_flatten__") and not value.is_meta
        return whole and scope.has(value) and (any_size or value.numel() <= scope.largest)
    if is_generator(value):
        return True
    return is_array(value) and (any_size or bytes_of_array(value) <= scope.largest)


class _Walk:
    """The walk itself."""

    def __init__(self, scope: Scope, without: Iterable[Any]) -> None:
        self.found = Reached()
        self._scope = scope
        self._alive: list[Any] = list(without)
        self._seen = set(map(id, self._alive))
        self._classes: set[type] = set()
        self._spaces: dict[int, Names] = {}
        self._waiting: collections.deque[tuple[Any, Label]] = collections.deque()
        self._far: list[tuple[Any, Label]] = []

    def follow(self, roots: Iterable[tuple[Any, Label]]) -> None:
        """Look at everything that the roots lead to, as far as the scope allows; at last at what is far."""
        self._near(roots)
        if self._far:
            near, self.found, far = self.found, Reached(), self._far
            while far:
                self._far = []
                self._near(far)
                far = self._far
            self.found, near.far = near, self.found
            near.whole = near.whole and near.far.whole

    def attributes(self, module: nn.Module, path: str, names: Iterable[str]) -> None:
        """Some attributes of a module, wherever it has them."""
        for space in (module._buffers, module._parameters, vars(module)):
            self._hold(PARAMETERS, Names(space, dict.fromkeys(names)), path)

    def _near(self, roots: Iterable[tuple[Any, Label]]) -> None:
        for value, label in roots:
            self._add(value, label)
        count = 0
        while self._waiting:
            count += 1
            if count > self._scope.most:
                self.found.whole = False
                return
            self._look_at(*self._waiting.popleft())

    def _add(self, value: Any, label: Label) -> None:
        if isinstance(value, _SKIPPED) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        self._waiting.append((value, label))

    def _hold(self, kind: ContainerKind, owner: Any, label: Label) -> None:
        """A container with what it holds; the entries of a very long one are far, or too many."""
        is_long = kind.sized and len(owner) > self._scope.near
        if is_long and not self._scope.far:
            if kind.counted:
                self.found.places.append((kind, owner, label))
            return
        self.found.hold(kind, owner, label)
        seen = self._seen
        for key, value in kind.entries(kind.contents(owner)):
            if isinstance(value, _SKIPPED) or id(value) in seen:
                continue
            if is_long:
                self._far.append((value, (label, kind, key)))
            else:
                self._add(value, (label, kind, key))

    def _look_at(self, value: Any, label: Label) -> None:
        found = self.found
        if isinstance(value, torch.Tensor):
            self._tensor(value, label)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._add(value.__self__, f"what {called(value)} is bound to")
            self._add(value.__func__, "")
        elif isinstance(value, types.CellType):
            self._hold(CELL, value, label)
        elif isinstance(value, functools.partial):
            self._add(value.func, label)
            self._hold(FIXED, (*value.args, *value.keywords.values()), f"an argument of {called(value.func)}")
        elif is_generator(value):
            found.generators.append(value)
        elif isinstance(value, dict):
            if len(value) <= self._scope.near:
                for key in [key for key in value if isinstance(key, torch.Tensor)]:
                    self._add(key, (label, MAPPING, "a key"))
            self._hold(MAPPING, value, label)
        elif isinstance(value, list | collections.deque):
            self._hold(SEQUENCE, value, label)
        elif isinstance(value, set):
            self._hold(SET, value, label)
        elif isinstance(value, tuple | frozenset):
            self._hold(FIXED, value, label)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, _PASSED_BY):
            return
        elif is_array(value):
            found.arrays.append(value)
        else:
            self._object(value, label)

    def _tensor(self, tensor: torch.Tensor, label: Label) -> None:
        if not self._scope.has(tensor):
            return
        if hasattr(tensor, "__tensor_flatten__"):  # a class of tensors around others, which hold its values
            self._hold(PARTS, tensor, label)
        else:
            self.found.tensors.append(tensor)
        if not self._scope.trains:
            return
        if tensor.is_leaf and tensor.grad is not None:
            self._add(tensor.grad, (label, MAPPING, "grad"))
        attributes = getattr(tensor, "__dict__", None)
        if attributes:
            self._hold(MAPPING, attributes, label)

    def _function(self, function: types.FunctionType) -> None:
        name = called(function)
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._add(cell, f"{variable} of {name}")
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if defaults:
            self._hold(FIXED, defaults, f"a default of {name}")
        own = self._scope.reads(function.__module__)
        if own or function.__dict__:
            self._hold(MAPPING, function.__dict__, f"{name}, a function")
        if not own:
            return
        mentioned = names_in(function.__code__)
        self.found.code_names.update(mentioned)
        space = function.__globals__
        self._names(space, mentioned, "the global ")
        for name in mentioned:
            module = space.get(name)
            if isinstance(module, types.ModuleType) and self._scope.reads(module.__name__):
                self._names(vars(module), mentioned, f"the global {module.__name__}.")

    def _names(self, space: dict[str, Any], mentioned: Iterable[str], prefix: str) -> None:
        """What a function may name of globals or of a program's own module: ``settings.step``."""
        names = [name for name in mentioned if name in space]
        if not names:
            return
        known = self._spaces.get(id(space))
        if known is None:
            known = self._spaces[id(space)] = Names(space, prefix=prefix)
            self.found.hold(GLOBALS, known, prefix)
        for name in names:
            if name not in known.names:
                known.names[name] = None
                self._add(space[name], (known.prefix, GLOBALS, name))

    def _class(self, kind: type) -> None:
        """A class of the program's own: its values, and what its functions name."""
        for one in kind.__mro__:
            surrounded = "_vramfit_plain" in vars(one)
            if one in self._classes or surrounded or not self._scope.reads(one.__module__):
                continue
            self._classes.add(one)
            label = f"{one.__name__}, a class"
            self._hold(CLASS, one, label)
            for value in vars(one).values():
                inner = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                inner = inner.fget if isinstance(inner, property) else inner
                if not isinstance(inner, type):
                    self._add(inner, label)

    def _object(self, value: Any, label: Label) -> None:
        kind = type(value)
        if isinstance(value, nn.Module):
            self._module(value, label)
            return
        if not self._scope.enters(value):
            return
        if hasattr(kind, "__next__"):
            self.found.streams.append(value)
            if isinstance(value, types.GeneratorType) or not hasattr(value, "__dict__"):
                return
        self._class(kind)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._hold(MAPPING, attributes, label)
        if any("__slots__" in vars(one) for one in kind.__mro__) and self._scope.reads(kind.__module__):
            self._hold(SLOTS, value, label)

    def _module(self, module: nn.Module, label: Label) -> None:
        """A module with those inside of it, each called by its path."""
        self._class(type(module))
        attributes = vars(module)
        noted = self._scope.layers or not type(module).__module__.startswith("torch.nn.")
        if noted or module._buffers:
            self._hold(BUFFERS, module._buffers, label)
        frozen = [
            name for name, one in module._parameters.items() if one is not None and not one.requires_grad
        ]
        if frozen:
            self._hold(PARAMETERS, Names(module._parameters, dict.fromkeys(frozen)), label)
        for name, one in module._parameters.items():
            if one is not None:
                self._add(one, (label, PARAMETERS, name))
        if noted:
            self._hold(MODULE, attributes, label)
        else:
            self.found.hold(MODE, module, label)
            for name, value in MODULE.entries(attributes):
                if not isinstance(value, dict | set):
                    self._add(value, (label, MODULE, name))
        if self._scope.trains:
            for name, value in list(attributes.items()):
                if name.endswith(_HOOKS) and value:
                    for hook in list(value.values()):
                        self._add(hook, label)
        for name, inner in module._modules.items():
            if inner is not None and id(inner) not in self._seen:
                self._seen.add(id(inner))
                self._alive.append(inner)
                self._module(inner, (label, MODULE, name))
