"""What a program's files say, for rules that read it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

_NAMELESS = "<string>"
"""What code that was compiled from a text is called, whatever the text; since Python 3.13 the text of ``python -c``
can be looked up by it."""


def source_of(filename: str) -> str:
    """The text of a file, of a cell of a notebook and the like; empty where it cannot be known."""
    return "" if filename == _NAMELESS else "".join(linecache.getlines(filename))


def has_source(function: Callable[..., Any]) -> bool:
    """Whether what `inspect.getsource` gives of a function is that function's."""
    code = getattr(function, "__code__", None)
    return code is None or code.co_filename != _NAMELESS
