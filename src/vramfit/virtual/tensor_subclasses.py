"""Tensor classes of other people on the virtual card.

NOTE [Tensor classes]
There are two kinds, and torch treats them differently.

1. *Wrappers* (torchao's quantised tensors, DTensor) have a dispatch of their own and hold plain tensors. They take
   themselves apart: our mode sees what is inside. `parts` gives those tensors.
2. *Annotated* tensors (MONAI's MetaTensor, torchvision's TVTensor) are plain tensors with a class on top, which
   ``as_subclass`` gives them. A virtual tensor already has a class, FakeTensor, which makes it virtual. So
   `Twins` makes a class from the program's own that is virtual as well; while an op is handled its tensors go
   back to FakeTensor, so that nothing below has to know.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from vramfit.torch_internals.dispatch import is_traceable_wrapper_subclass
from vramfit.torch_internals.fake_tensors import FakeTensor

# Methods of FakeTensor that stay those of the program's class.
_OWN = frozenset({"__init__", "__repr__"})


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is a wrapper around others."""
    return bool(is_traceable_wrapper_subclass(tensor))


def parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The virtual tensors that hold a tensor's memory: itself, or those inside a wrapper."""
    if type(tensor) is FakeTensor:
        yield tensor
    elif is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from parts(getattr(tensor, name))


class Twins:
    """The virtual counterparts of a program's annotated tensor classes. See NOTE [Tensor classes].

    What makes a tensor virtual stands in its ``__dict__``, which these classes copy from tensor to tensor as notes of
    their own; so it is set aside while a tensor wears such a class.
    """

    def __init__(self) -> None:
        self._twins: dict[type, type] = {}
        self._origins: dict[type, type] = {}
        self._states = WeakIdKeyDictionary()

    def __contains__(self, cls: object) -> bool:
        """Whether a class is one of the twins."""
        return cls in self._origins

    @property
    def classes(self) -> tuple[type, ...]:
        """All twins so far."""
        return tuple(self._origins)

    def among(self, types: Iterable[type]) -> bool:
        """Whether a twin is among classes."""
        return not self._origins.keys().isdisjoint(types)

    def origin(self, cls: type) -> type:
        """The program's class behind a twin; any other class itself."""
        return self._origins.get(cls, cls)

    def put_on(self, tensor: torch.Tensor, cls: type) -> None:
        """Give a fresh FakeTensor, without notes of the program, a class of the program or that class's twin."""
        self._states[tensor] = {name: tensor.__dict__.pop(name) for name in tuple(vars(tensor))}
        tensor.__class__ = self._twin(cls)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Device of a tensor that wears a twin."""
        with self.as_fake((tensor,)):
            device: torch.device = tensor.fake_device  # type: ignore[attr-defined]
            return device

    @contextmanager
    def as_fake(self, tensors: Iterable[Any]) -> Iterator[None]:
        """Take the program's class off tensors, and put it on again."""
        changed = [(tensor, type(tensor)) for tensor in tensors if type(tensor) in self._origins]
        try:
            for tensor, _ in changed:
                tensor.__class__ = FakeTensor
                tensor.__dict__.update(self._states[tensor])
            yield
        finally:
            for tensor, cls in changed:
                state = self._states[tensor]
                for name in state:
                    state[name] = tensor.__dict__.pop(name)
                tensor.__class__ = cls

    def _twin(self, cls: type) -> type:
        if cls in self._origins:
            return cls
        found = self._twins.get(cls)
        if found is None:
            found = self._twins[cls] = type(cls)(cls.__name__, (cls,), self._members(cls))
            self._origins[found] = cls
        return found

    def _members(self, cls: type) -> dict[str, Any]:
        """What makes a FakeTensor virtual, for a class that does not derive from it.

        It must not derive from FakeTensor: ``super().__torch_function__`` in the program's class has to reach torch's,
        which FakeTensor switches off.
        """
        members: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        for name, value in vars(FakeTensor).items():
            if isinstance(value, FunctionType) and name not in _OWN:
                members[name] = self._through_fake(value)
            elif isinstance(value, property) and value.fget is not None:
                members[name] = property(self._through_fake(value.fget))
        members["__deepcopy__"] = self._deepcopy
        members["__torch_dispatch__"] = vars(FakeTensor)["__torch_dispatch__"]
        return members

    @property
    def _deepcopy(self) -> Callable[..., Any]:
        def deepcopy(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
            if id(tensor) in memo:
                return memo[id(tensor)]
            cls, notes = type(tensor), dict(vars(tensor))
            with self.as_fake((tensor,)):
                out = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self.put_on(out, cls)
            memo[id(tensor)] = out
            out.__dict__.update(copy.deepcopy(notes, memo))
            return out

        return deepcopy

    def _through_fake(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method of FakeTensor, to be called with a tensor that is one while the method runs."""

        @functools.wraps(method)
        def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            with self.as_fake((tensor,)):
                return method(tensor, *args, **kwargs)

        return call
