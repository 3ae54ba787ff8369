"""Which line of the program runs now, and what its scope calls an object."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

from torch import nn

from vramfit.holders.naming import local_values
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
    seen: set[int] = set()
    own = local_values(frame)
    for scope in (own, frame.f_globals):
        for name, held in list(scope.items()):
            if not name.isidentifier() or id(held) in seen:
                continue
            seen.add(id(held))
            if isinstance(held, nn.Module):
                yield name, held
            attributes = getattr(held, "__dict__", None)
            if isinstance(attributes, dict) and not isinstance(held, type | ModuleType):
                for attribute, inner in (*attributes.items(), *_registered(attributes)):
                    if isinstance(inner, nn.Module) and attribute.isidentifier():
                        yield f"{name}.{attribute}", inner


def line_of(frame: FrameType) -> Frame:
    """The line at which a frame stands."""
    return Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)


def name_of(value: object, frame: FrameType) -> str:
    """What a frame's scope calls an object: a variable, or an attribute of one; empty where it has no such name."""
    scopes = (local_values(frame), frame.f_globals)
    for scope in scopes:
        for name, held in list(scope.items()):
            if held is value and name.isidentifier():
                return name
    for scope in scopes:
        for name, held in list(scope.items()):
            attributes = getattr(held, "__dict__", None)
            if not isinstance(attributes, dict) or not name.isidentifier():
                continue
            for attribute, inner in (*attributes.items(), *_registered(attributes)):
                if inner is value and isinstance(attribute, str) and attribute.isidentifier():
                    return f"{name}.{attribute}"
    return ""


def _registered(attributes: dict[str, object]) -> Iterator[tuple[str, object]]:
    """The modules that a module has registered, which are no attributes of their own."""
    modules = attributes.get("_modules")
    if isinstance(modules, dict):
        yield from modules.items()
