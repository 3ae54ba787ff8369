"""The code of functions: which names it mentions, and whether it is a program's own or a library's."""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from typing import Any


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function's code mentions, those of functions inside of it too."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(names_in(constant))
    return tuple(names)


def called(function: Any) -> str:
    """What a function or an object is called in words."""
    return str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "the loss")


def root_of(module: str | None) -> str:
    """The package that a module belongs to."""
    return str(module or "builtins").partition(".")[0]


@functools.lru_cache(maxsize=4096)
def is_installed(root: str) -> bool:
    """Whether a package was installed, or comes with Python."""
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
