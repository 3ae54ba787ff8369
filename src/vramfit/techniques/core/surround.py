"""Puts code around the forward pass of a module, in place, and takes it away again.

NOTE [Surrounded modules]: the module keeps its identity and gets another class, a subclass of its own whose `forward`
passes through the surroundings. An attribute ``forward`` on the module would hold the module itself, so that a deep
copy (an average of weights, a best model kept) would run the original; a hook cannot run the forward pass twice, as
checkpointing must. With the class, parameters, names in ``state_dict``, hooks, ``isinstance`` and ``copy.deepcopy``
stay as they were, and ``torch.save`` of the whole module finds the plain class by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError

_LIST = "_vramfit_surroundings"
_OWN_FORWARD = "_vramfit_own_forward"
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class Around(Protocol):
    """What surrounds a forward pass. It is copied and pickled with the module: keep it plain, without the module."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``forward(*args, **kwargs)``, or something in its place."""
        ...


def surround(module: nn.Module, around: Around) -> None:
    """Put `around` around the module's forward pass, outside what surrounds it already.

    Raises:
        UsageError: the module's class cannot be changed (a scripted or compiled module).
    """
    if _LIST not in vars(module):
        plain = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise UsageError(
                f"a scripted {plain.__name__} cannot be changed", "Apply the plan before torch.jit.script"
            )
        own = vars(module).pop("forward", None)
        module.__dict__[_LIST] = []
        if own is not None:
            module.__dict__[_OWN_FORWARD] = own
        module.__class__ = _surrounded(plain)
    surroundings: list[Around] = vars(module)[_LIST]
    surroundings.append(around)


def release(module: nn.Module, around: Around) -> None:
    """Take one surrounding away; with the last one the module gets its own class back."""
    surroundings: list[Around] = vars(module).get(_LIST, [])
    surroundings[:] = [known for known in surroundings if known is not around]
    if surroundings or _LIST not in vars(module):
        return
    plain = plain_class(module)
    if type(module) is not plain:
        module.__class__ = plain
    del module.__dict__[_LIST]
    own = vars(module).pop(_OWN_FORWARD, None)
    if own is not None:
        module.__dict__["forward"] = own


def surroundings_of(module: nn.Module) -> tuple[Around, ...]:
    """What surrounds a module's forward pass, the innermost first."""
    return tuple(vars(module).get(_LIST, ()))


def has_own_forward(module: nn.Module) -> bool:
    """Whether a surrounded module had a forward pass of its own on the instance, as other libraries' hooks put it."""
    return _OWN_FORWARD in vars(module)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before anything surrounded it."""
    kind = type(module)
    plain: type[nn.Module] = vars(kind).get("_vramfit_plain", kind)
    return plain


def _surrounded(plain: type[nn.Module]) -> type[nn.Module]:
    """The class of surrounded modules of a plain class; the same one each time."""
    known = _CLASSES.get(plain)
    if known is not None:
        return known

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = vars(self).get(_OWN_FORWARD) or functools.partial(plain.forward, self)
        for around in vars(self)[_LIST]:
            call = functools.partial(_through, around, self, call)
        return call(*args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced: Any = plain.__reduce_ex__(self, protocol)
        rebuild, arguments, *rest = reduced
        named = tuple(plain if argument is type(self) else argument for argument in arguments)
        return (_rebuild, (plain, rebuild, named), *rest)

    known = type(
        plain.__name__,
        (plain,),
        {
            "forward": forward,
            "__reduce_ex__": reduce_ex,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
            "_vramfit_plain": plain,
        },
    )
    _CLASSES[plain] = known
    return known


def _through(
    around: Around, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return around(module, forward, args, kwargs)


def _rebuild(plain: type[nn.Module], rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> nn.Module:
    """Make an empty surrounded module; pickle and copy fill in its state."""
    made: nn.Module = rebuild(*arguments)
    made.__class__ = _surrounded(plain)
    return made
