"""What forward passes write beside gradients: noted before a pass, put back after it, and compared.

NOTE [State of a forward pass]: queues, counters, centres, codebooks and running means live in buffers, in attributes
of modules, in frozen parameters, in containers and objects that these hold, in generators, and in what a loss function
closes over or names. Some programs write such a tensor in place, some put another in its place, and ``.data`` hides a
write from autograd's count of versions. So the contents of containers are noted by reference, the values of tensors
by copies, and what was written is found by comparing values.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.techniques.core.array_values import (
    array_has,
    bytes_of_array,
    copy_of_array,
    is_array,
    write_array,
)
from vramfit.techniques.core.random_generators import is_generator, same_states, set_state, state_of
from vramfit.techniques.core.surround import plain_class

_PLAIN = (int, float, complex, bool, str, bytes, type(None))

_OWN = frozenset(vars(nn.Module())) - {"training"}
"""What each module has of its own: hooks, and the dictionaries of parameters, buffers and modules."""

_OURS = "_vramfit"

_GLOBAL = "the global "

_LONG = 100_000
"""Entries from which on a container is data rather than state."""

_DEEP = 6
"""Containers inside containers that are followed."""

_LARGE = 1 << 24
"""Values of a tensor outside the model from which on it is data."""

_LIBRARIES = frozenset(
    {"torch", "numpy", "transformers", "vramfit", "accelerate", "lightning", "diffusers", "timm"}
)


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
"""In place of a value that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A value that a forward pass wrote; those of generators are `GeneratorState`.

    Attributes:
        before: the value at first; `MISSING` if there was none.
        after: the value afterwards; `MISSING` if it was deleted.
    """

    before: Any
    after: Any

    @property
    def in_place(self) -> bool:
        """Whether a tensor is the same one, written in place; known where values were not copied."""
        both = isinstance(self.before, _Reference) and isinstance(self.after, _Reference)
        return both and self.before.tensor is self.after.tensor

    @property
    def replaced(self) -> bool:
        """Whether another tensor stands in the place; known where values were not copied."""
        return isinstance(self.after, _Reference) and not self.in_place


@dataclass(frozen=True, slots=True, eq=False)
class GeneratorState:
    """The state of a generator: of torch, Python or NumPy."""

    value: Any

    @classmethod
    def of(cls, generator: Any) -> GeneratorState:
        """The state now."""
        return cls(state_of(generator))

    def restore(self, generator: Any) -> None:
        """Set it again."""
        set_state(generator, self.value)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayState:
    """The values of an array that is no tensor, see `is_array`."""

    value: Any

    @classmethod
    def of(cls, values: Any) -> ArrayState:
        """The values now."""
        return cls(copy_of_array(values))

    def restore(self, values: Any) -> None:
        """Write them again."""
        write_array(values, self.value)


def attribute_of(name: str) -> str:
    """The module's attribute that a value belongs to: ``head.stats`` of ``head.stats[count]``."""
    return name.partition("[")[0]


def only_written(
    passed: Callable[[frozenset[str]], tuple[Mapping[str, torch.Tensor], Mapping[str, Written]]],
    names: frozenset[str],
) -> bool:
    """Whether values are never read: a pass that begins with what another wrote there gives the same.

    Args:
        passed: takes a pass from the state that all begin with, and returns its gradients and what it wrote; the
            attributes that it is given are left as it wrote them.
        names: of attributes.
    """
    (grads, first), (others, second) = passed(names), passed(frozenset())

    def after(name: str, one: Mapping[str, Written], other: Mapping[str, Written]) -> Any:
        return one[name].after if name in one else other[name].before

    return (
        grads.keys() == others.keys()
        and all(same_values(grad, others[name]) for name, grad in grads.items())
        and all(
            same_values(after(name, first, second), after(name, second, first)) for name in (*first, *second)
        )
    )


def same_values(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit; NaN equals NaN."""
    if isinstance(one, GeneratorState) and isinstance(other, GeneratorState):
        return same_states(one.value, other.value)
    if isinstance(one, ArrayState) and isinstance(other, ArrayState):
        return array_has(one.value, other.value)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or other.is_meta:
            return one is other
        if torch.equal(one, other):
            return True
        floating = one.is_floating_point() or one.is_complex()
        return (
            floating
            and bool(torch.equal(one.isnan(), other.isnan()))
            and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
        )
    return type(one) is type(other) and bool(one == other or one != one)  # nan


class ForwardState:
    """The state of a model, and of what computes its loss, at one moment. See NOTE [State of a forward pass].

    Args:
        model: its buffers, frozen parameters and attributes, those of all its modules.
        loss: a function whose closure and globals are followed; None for the model alone.
        only: names of attributes of the model's modules, to note nothing but them; None for all.
        values: whether values of tensors are copied; otherwise only which tensors there are is noted, and how often
            each was written in place. What was written in place is then seen, and not put back.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None = None,
        *,
        only: frozenset[str] | None = None,
        values: bool = True,
    ) -> None:
        self._model, self._loss, self._only, self._copied = model, loss, only, values
        walk = self._walked()
        self._contents = walk.contents
        copies: dict[int, Any] = {}
        self._values: dict[str, Any] = {}
        self._live = {name: value for name, value in walk.values.items() if not isinstance(value, _PLAIN)}
        with torch.no_grad():
            for name, value in walk.values.items():
                if isinstance(value, torch.Tensor) and not values:
                    self._values[name] = _Reference(value, _version_of(value))
                elif isinstance(value, torch.Tensor):
                    self._values[name] = copies.setdefault(id(value), value.detach().clone())
                else:
                    self._values[name] = _noted(value)

    def _walked(self) -> _Walk:
        walk = _Walk(self._only)
        walk.model(self._model)
        if self._loss is not None:
            walk.follow("", self._loss, 0)
        return walk

    @property
    def names(self) -> tuple[str, ...]:
        """Of all values that were noted."""
        return tuple(self._values)

    def value(self, name: str) -> Any:
        """A value as it was noted; `MISSING` where there was none."""
        return self._values.get(name, MISSING)

    def restore(self, skipped: frozenset[str] = frozenset()) -> None:
        """Put everything back, whether it was written in place or replaced; it can be done any number of times.

        Args:
            skipped: names of the model's attributes that stay as they are.
        """
        for contents in self._contents:
            contents.restore(skipped)
        with torch.no_grad():
            for name, live in self._live.items():
                if attribute_of(name) in skipped:
                    continue
                before = self._values[name]
                if isinstance(before, GeneratorState | ArrayState):
                    before.restore(live)
                elif not self._copied:
                    continue
                elif live.shape != before.shape or live.dtype != before.dtype:
                    live.data = before.clone()
                elif self._only is not None or not same_values(
                    live, before
                ):  # to compare takes memory and time
                    live.detach().copy_(before)

    def written(self) -> dict[str, Written]:
        """What differs now, by name; tensors are copies."""
        found: dict[str, Written] = {}
        now = self._walked().values
        for name in dict.fromkeys((*self._values, *now)):
            before = self._values.get(name, MISSING)
            after = _noted(now[name]) if name in now else MISSING
            if isinstance(after, torch.Tensor) and not self._copied:
                after = _Reference(after, _version_of(after))
            if not same_values(before, after):
                copied = after.detach().clone() if isinstance(after, torch.Tensor) else after
                found[name] = Written(before=before, after=copied)
        return found


@dataclass(frozen=True, slots=True)
class _Reference:
    """A tensor, and how often it had been written in place."""

    tensor: torch.Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and (
            self.tensor is other.tensor and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _noted(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        return value
    return ArrayState.of(value) if is_array(value) else GeneratorState.of(value)


@dataclass(slots=True)
class _Contents:
    """A container as it was, under the name that its entries begin with."""

    prefix: str
    container: Any
    kept: Any
    keys: Callable[[str], bool] | None = None
    """Which keys of a mapping belong to what was noted; None for all."""

    def restore(self, skipped: frozenset[str]) -> None:
        container, kept = self.container, self.kept
        if attribute_of(self.prefix) in skipped:
            return
        if isinstance(container, types.CellType):
            container.cell_contents = kept
        elif isinstance(container, dict):
            for key in [key for key in container if key not in kept]:
                if (self.keys is None or self.keys(key)) and f"{self.prefix}{key}" not in skipped:
                    del container[key]
            for key, value in kept.items():
                if f"{self.prefix}{key}" not in skipped and container.get(key, MISSING) is not value:
                    container[key] = value
        elif isinstance(container, set):
            container.clear()
            container.update(kept)
        elif isinstance(container, _Attributes):
            container.restore(kept)
        elif list(map(id, container)) != list(map(id, kept)):
            container.clear()
            container.extend(kept)


@dataclass(frozen=True, slots=True)
class _Attributes:
    """Attributes of an object or a class that lie in no dictionary which could be written."""

    owner: Any

    def now(self) -> dict[str, Any]:
        """Those of a class that are values, those in the slots of an object."""
        owner = self.owner
        if isinstance(owner, type):
            own = vars(owner).items()
            return {key: one for key, one in own if not key.startswith("__") and isinstance(one, _OF_CLASSES)}
        names = {name for kind in type(owner).__mro__ for name in _slots_of(kind)}
        return {name: getattr(owner, name) for name in sorted(names) if hasattr(owner, name)}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """As they were."""
        for name in self.now().keys() - kept.keys():
            delattr(self.owner, name)
        for name, value in kept.items():
            if getattr(self.owner, name, MISSING) is not value:
                setattr(self.owner, name, value)


_OF_CLASSES = (*_PLAIN, torch.Tensor, list, dict, set, collections.deque)


def _slots_of(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return tuple(
        name
        for name in ((names,) if isinstance(names, str) else names)
        if name not in ("__dict__", "__weakref__")
    )


class _Walk:
    """Follows a model and functions; see NOTE [State of a forward pass].

    Attributes:
        contents: of containers, to be put back.
        values: tensors, generators and plain values, by name.
    """

    def __init__(self, only: frozenset[str] | None) -> None:
        self._only = only
        self._seen: set[int] = set()
        self.contents: list[_Contents] = []
        self.values: dict[str, Any] = {}

    def model(self, model: nn.Module) -> None:
        """A model with all its modules; their functions name globals."""
        self._seen.update(map(id, model.modules()))
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            self._module(prefix, module)
            if self._only is None:
                self._class(plain_class(module), 0)

    def _class(self, kind: type, depth: int) -> None:
        """A class of the program's own: its values, and what its functions name."""
        for one in kind.__mro__:
            if id(one) in self._seen or _of_library(one):
                continue
            self._seen.add(id(one))
            self._attributes(f"{one.__name__}, a class[", _Attributes(one), depth)
            for function in vars(one).values():
                if isinstance(function, types.FunctionType):
                    self._function(function, depth)

    def _attributes(self, prefix: str, attributes: _Attributes, depth: int) -> None:
        kept = attributes.now()
        self.contents.append(_Contents(prefix, attributes, kept))
        for key, value in kept.items():
            self._value(f"{prefix}{key}]", value, depth + 1)

    def _module(self, prefix: str, module: nn.Module) -> None:
        self._mapping(prefix, module._buffers, lambda key: self._wanted(f"{prefix}{key}"))
        frozen = {key for key, one in module._parameters.items() if one is not None and not one.requires_grad}
        self._mapping(
            prefix, module._parameters, lambda key: key in frozen and self._wanted(f"{prefix}{key}")
        )
        self._mapping(
            prefix,
            module.__dict__,
            lambda key: key not in _OWN and not key.startswith(_OURS) and self._wanted(f"{prefix}{key}"),
        )

    def _wanted(self, name: str) -> bool:
        return self._only is None or name in self._only

    def _mapping(self, prefix: str, mapping: dict[str, Any], wanted: Callable[[str], bool]) -> None:
        kept = {key: value for key, value in mapping.items() if wanted(key)}
        self.contents.append(_Contents(prefix, mapping, kept, wanted))
        for key, value in kept.items():
            self._value(f"{prefix}{key}", value, 0)

    def follow(self, name: str, function: Any, depth: int) -> None:
        """What a function closes over, names, or is bound to."""
        if isinstance(function, functools.partial):
            self.follow(name, function.func, depth)
            for value in (*function.args, *function.keywords.values()):
                self._value(f"an argument of {_called(function.func)}", value, depth + 1)
        elif isinstance(function, types.MethodType):
            self.follow(name, function.__func__, depth)
            self._value(f"what {_called(function)} is bound to", function.__self__, depth + 1)
        elif isinstance(function, types.FunctionType):
            self._function(function, depth)
        else:
            self._value(_called(function), function, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if id(function) in self._seen or depth > _DEEP or _of_library(function):
            return
        self._seen.add(id(function))
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            name = f"{key} of {_called(function)}"
            if isinstance(value, _PLAIN):
                self.contents.append(_Contents(name, cell, value))
            self._value(name, value, depth + 1)
        self._container(_called(function), vars(function), depth)
        names = _globals_in(function.__code__) & set(function.__globals__)
        plain = {
            key: function.__globals__[key] for key in names if isinstance(function.__globals__[key], _PLAIN)
        }
        if plain:
            self.contents.append(_Contents(_GLOBAL, function.__globals__, plain, lambda key: key in plain))
        for key in sorted(names):
            self._value(f"{_GLOBAL}{key}", function.__globals__[key], depth + 1)

    def _value(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self.values[name] = value
            return
        if isinstance(value, torch.Tensor):
            inside = not isinstance(value, nn.Parameter) or not value.requires_grad
            if inside and not value.is_meta and (depth == 0 or value.numel() <= _LARGE):
                self.values[name] = value
            return
        if is_generator(value) or (is_array(value) and (depth == 0 or bytes_of_array(value) <= _LARGE)):
            self.values[name] = value
            return
        if id(value) in self._seen or depth > _DEEP:
            return
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.follow(name, value, depth)
            return
        if isinstance(value, type):
            self._class(value, depth)
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                self._seen.add(id(module))
                self._module(f"{name}.{path}." if path else f"{name}.", module)
        else:
            self._container(name, value, depth)

    def _container(self, name: str, value: Any, depth: int) -> None:
        """Lists, dictionaries, sets and objects of the program's own."""
        if isinstance(value, dict):
            if len(value) > _LONG or type(value).__module__.partition(".")[0] in _LIBRARIES:
                return
            self.contents.append(_Contents(f"{name}[", value, dict(value)))
            entries = [(f"{name}[{key}]", one) for key, one in value.items()]
        elif isinstance(value, list | collections.deque):
            self.values[f"{name}[length]"] = len(value)
            if len(value) > _LONG:
                return
            self.contents.append(_Contents(f"{name}[", value, list(value)))
            entries = [(f"{name}[{number}]", one) for number, one in enumerate(value)]
        elif isinstance(value, tuple):
            entries = [(f"{name}[{number}]", one) for number, one in enumerate(value)]
        elif isinstance(value, set):
            self.contents.append(_Contents(f"{name}[", value, set(value)))
            self.values[f"{name}[length]"] = len(value)
            return
        elif isinstance(value, types.SimpleNamespace) or not (
            isinstance(value, types.ModuleType) or _of_library(type(value))
        ):
            self._class(type(value), depth)
            self._attributes(f"{name}[", _Attributes(value), depth)
            kept = dict(getattr(value, "__dict__", {}))
            if hasattr(value, "__dict__"):
                self.contents.append(_Contents(f"{name}[", vars(value), kept))
            entries = [(f"{name}[{key}]", one) for key, one in kept.items()]
        else:
            return
        for entry, one in entries:
            self._value(entry, one, depth + 1)


@functools.lru_cache(maxsize=1024)
def _globals_in(code: types.CodeType) -> frozenset[str]:
    """The globals that a function names, and those that functions inside it do."""
    own = {str(one.argval) for one in dis.get_instructions(code) if "GLOBAL" in one.opname}
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(own.union(*map(_globals_in, inner)))


def _of_library(value: type | types.FunctionType) -> bool:
    """Whether a class or a function is no program's own."""
    root = str(value.__module__).partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names


def _called(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "the loss")
