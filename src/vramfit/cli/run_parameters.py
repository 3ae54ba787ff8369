"""Gives verbs the options of a run: a typer option for each that `RunOptions` declares, read into one object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any

import typer

from vramfit.cli.options import gpu_names
from vramfit.options.declaration import Option
from vramfit.options.run_options import COMMAND_LINE, OPTIONS, RunOptions, read_options

Verb = Callable[..., None]


def with_run_options(
    *,
    without: Collection[str] = (),
    words: Mapping[str, str] | None = None,
    card_follows: bool = False,
) -> Callable[[Verb], Verb]:
    """Replace a verb's parameter of type `RunOptions` by an option of the command line for each of its fields.

    Args:
        without: options that the verb does not have.
        words: help in place of the declared one, where an option means something special for the verb.
        card_follows: as of `read_options`.
    """

    def decorate(verb: Verb) -> Verb:
        signature = inspect.signature(verb, eval_str=True)
        names = [name for name, (declared, _) in OPTIONS.items() if declared.help and name not in without]
        parameters: list[inspect.Parameter] = []
        target = ""
        for parameter in signature.parameters.values():
            if parameter.annotation is RunOptions:
                target = parameter.name
                parameters += (_parameter(name, (words or {}).get(name)) for name in names)
            else:
                parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

        def command(**given: Any) -> None:
            values = dict(_given(names, given))
            options = read_options(COMMAND_LINE, values, without=without, card_follows=card_follows)
            verb(**{target: options}, **given)

        command.__name__, command.__doc__, command.__module__ = verb.__name__, verb.__doc__, verb.__module__
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
        )
        command.__annotations__ = {}
        return command

    return decorate


def _parameter(name: str, words: str | None) -> inspect.Parameter:
    """An option as typer reads it."""
    declared, default = OPTIONS[name]
    details: dict[str, Any] = {
        "help": words or declared.help,
        "min": declared.least,
        "max": declared.most,
        "rich_help_panel": declared.panel or None,
        "autocompletion": gpu_names if name == "gpu" else declared.completion,
    }
    if declared.metavar:
        details["metavar"] = declared.metavar
    if declared.default_words is not None:
        details["show_default"] = declared.default_words
    is_flag = declared.kind is bool
    flag = (COMMAND_LINE.name(name),) if is_flag or "_" in name else ()
    kind, start = _kind(declared, default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=start,
        annotation=Annotated[kind, typer.Option(*flag, **details)],
    )


def _kind(declared: Option, default: Any) -> tuple[Any, Any]:
    """The type that typer is given, and the default: flags are off, and several values begin with none."""
    if declared.kind is bool:
        return bool, False
    if default is None or default == ():
        return declared.kind | None, None
    return declared.kind, default


def _given(names: Collection[str], given: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Take the options out of what typer gives, which has None, or an empty list, for one that was not written."""
    for name in names:
        value = given.pop(name)
        if value is None or value == []:
            continue
        if OPTIONS[name][0].negated:
            value = not value
        yield name, value
