"""How verbs show their help: paragraphs that flow, arguments as they are typed, and no types where there is a flag."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
import typer.core

from vramfit.errors import UsageError
from vramfit.writing import refused

_COMPLETION = ("install_completion", "show_completion")
"""Options that typer adds."""


class Verb(typer.core.TyperCommand):
    """A command whose help reads well at 80 columns.

    typer keeps the line ends of all paragraphs of a docstring but the first, prints defaults in words in parentheses,
    and gives flags the type ``<bool>`` and arguments that of Python.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = flowing(self.help)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The options and each argument by its name, in brackets if it can be left out."""
        del ctx
        arguments = [parameter for parameter in self.params if parameter.param_type_name == "argument"]
        names = [str(one.metavar or one.name or "").strip() for one in arguments]
        return [
            "[OPTIONS]",
            *(name if one.required else f"[{name}]" for one, name in zip(arguments, names, strict=True)),
        ]

    def get_params(self, ctx: Any) -> Any:
        """Those of the verb, and ``--help``."""
        found = super().get_params(ctx)
        for parameter in found:
            _tidy(parameter)
        return found


class Verbs(typer.core.TyperGroup):
    """All commands, in the order in which they were given."""

    def get_params(self, ctx: Any) -> Any:
        """Those of all verbs together; typer adds the ones for completion after the group is made."""
        found = super().get_params(ctx)
        for parameter in found:
            _tidy(parameter)
            callback = parameter.callback
            if parameter.name in _COMPLETION and callback is not None and not isinstance(callback, _Told):
                parameter.callback = _Told(callback)
        return found


@dataclass(frozen=True, slots=True)
class _Told:
    """What typer does for ``--install-completion`` and ``--show-completion``, with errors like those of all else."""

    callback: Callable[..., Any]

    def __call__(self, ctx: Any, param: Any, value: Any) -> Any:
        try:
            return self.callback(ctx, param, value)
        except typer.Exit as end:
            if not end.exit_code:
                raise
            raise UsageError(
                "there is no completion for this shell, or it could not be recognised",
                "Call it from bash, zsh, fish or PowerShell",
            ) from None
        except OSError as error:
            raise refused(error.filename or "the completion", error) from error


def flowing(text: str | None) -> str | None:
    """The paragraphs of a docstring, each in one line, to be wrapped where the terminal ends."""
    if text is None:
        return None
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _tidy(parameter: Any) -> None:
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = _no_type
    default = getattr(parameter, "show_default", None)
    if isinstance(default, str):
        parameter.help = f"{parameter.help} By default: {default}."
        parameter.show_default = False


def _no_type(ctx: Any) -> None:
    """Takes the place of what gives the type of an argument, of which its name says enough."""
    del ctx
