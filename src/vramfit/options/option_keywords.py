"""Gives functions that take the options of a run as keywords a signature and a docstring that list them."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

from vramfit.options.run_options import OPTIONS, RunKeywords, RunOptions

Function = TypeVar("Function", bound=Callable[..., object])

_LINE = re.compile(r"^( *)options: .*\n(?:\1 +.*\n)*", re.MULTILINE)
"""The line of a docstring in whose place the options are listed."""

_ATTRIBUTE = re.compile(r"^ {8}(\w+): ")


def takes_options(
    *, without: Collection[str] = (), own: Collection[str] = ()
) -> Callable[[Function], Function]:
    """List the options of a run in a function's signature and docstring, for ``help()`` and for editors.

    Args:
        without: options that the function does not take.
        own: options that stand among its own parameters.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        kinds = typing.get_type_hints(RunKeywords)
        names = [name for name in kinds if name not in without and name not in own]
        parameters = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name][1], annotation=kinds[name]
            )
            for name in OPTIONS
            if name in names
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        described = dict(_descriptions())
        listed = "".join(described[name] for name in OPTIONS if name in names)
        function.__doc__ = _LINE.sub(lambda _found: listed, function.__doc__ or "", count=1)
        return function

    return decorate


def _descriptions() -> Iterator[tuple[str, str]]:
    """Each option with its lines of the docstring of `RunOptions`."""
    lines = (RunOptions.__doc__ or "").splitlines()
    start = next(at for at, line in enumerate(lines) if line.strip() == "Attributes:") + 1
    name, text = "", ""
    for line in lines[start:]:
        found = _ATTRIBUTE.match(line)
        if found is None:
            text += f"{line}\n" if line.strip() else ""
            continue
        if name:
            yield name, text
        name, text = found[1], f"{line}\n"
    if name:
        yield name, text
