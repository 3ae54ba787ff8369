"""Which line of the program runs now, and what its scope calls an object."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from vramfit.holders.naming import instance_dict, is_a, local_values
from vramfit.trace.frames import Origin, origin
from vramfit.trace.model import Frame


def frames_here() -> Iterator[FrameType]:
    """The Python frames of this thread, from the caller of the caller outwards."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def program_frame() -> FrameType | None:
    """The innermost frame of the program's own files; None where only libraries run."""
    return next((frame for frame in frames_here() if origin(frame.f_code.co_filename) is Origin.USER), None)


def is_called_by_library() -> bool:
    """Whether a library other than torch made the call that is under way, on its own or for the program."""
    origins = (origin(frame.f_code.co_filename) for frame in frames_here())
    return next((one for one in origins if one is not Origin.RUNTIME), Origin.USER) is Origin.LIBRARY


def program_line() -> Frame | None:
    """The line of the program's own files that runs now, innermost; None where only libraries run."""
    frame = program_frame()
    return None if frame is None else line_of(frame)


def program_lines() -> tuple[Frame, ...]:
    """The lines of the program's own files that run now, innermost first."""
    return tuple(line_of(frame) for frame in frames_here() if origin(frame.f_code.co_filename) is Origin.USER)


def model_name_here(optimizer: Any) -> str:
    """What the innermost scope of the program calls the module with all parameters of an optimizer; empty if unknown.

    Of several, as a model in its wrapper, the one with the shortest name.
    """
    frame = program_frame()
    if frame is None:
        return ""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [
        name
        for name, value in _named_modules(frame)
        if owned and owned <= {id(parameter) for parameter in value.parameters()}
    ]
    return min(found, key=len, default="")


def _named_modules(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """The modules that a frame's scope has names for, and those that are attributes of what it has names for."""
    own = local_values(frame)
    for name, held in _names_in(frame):
        if is_a(held, nn.Module):
            yield name, held
        if name in own:
            for attribute, inner in _attributes(held):
                if is_a(inner, nn.Module):
                    yield f"{name}.{attribute}", inner


def _names_in(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """What the names of a frame's scope are bound to, its own first; what they hide of the module's is left out."""
    own = local_values(frame)
    for name, held in list(own.items()):
        if name.isidentifier():
            yield name, held
    if own is frame.f_globals:
        return
    hidden = {*own, *frame.f_code.co_varnames, *frame.f_code.co_cellvars, *frame.f_code.co_freevars}
    for name, held in list(frame.f_globals.items()):
        if name.isidentifier() and name not in hidden:
            yield name, held


def _attributes(held: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object has itself, and the modules that it has registered, as ``object.name`` finds them.

    What a property of its class hides is left out: nothing of the program's is called here.
    """
    attributes = instance_dict(held)
    if not isinstance(attributes, dict):
        return
    for name, value in (*attributes.items(), *_registered(attributes)):
        of_class = inspect.getattr_static(type(held), name, None) if isinstance(name, str) else None
        if isinstance(name, str) and name.isidentifier() and not hasattr(type(of_class), "__set__"):
            yield name, value


def line_of(frame: FrameType) -> Frame:
    """The line at which a frame stands."""
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def name_of(value: object, frame: FrameType) -> str:
    """What a frame's scope calls an object: a variable, or an attribute of one; empty where it has no such name."""
    named = list(_names_in(frame))
    for name, held in named:
        if held is value:
            return name
    for name, held in named:
        for attribute, inner in _attributes(held):
            if inner is value:
                return f"{name}.{attribute}"
    return ""


def _registered(attributes: dict[str, object]) -> Iterator[tuple[str, object]]:
    """The modules that a module has registered, which are no attributes of their own."""
    modules = attributes.get("_modules")
    if isinstance(modules, dict):
        yield from modules.items()
