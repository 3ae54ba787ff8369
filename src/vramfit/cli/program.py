"""How verbs read their command line and show their help, and what of the line belongs to the program to run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
import typer.core

from vramfit.errors import UsageError, VramfitError
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


class ProgramCommand(Verb):
    """A command whose options end at the program, as those of python do.

    The first argument that is no option is the script, and all after it is the script's, ``--help`` too; so
    is all that follows ``-m MODULE``.
    """

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """End our own options after ``-m MODULE``; the parser itself ends them at the script."""
        return super().parse_args(ctx, end_options_at_module(args, self._options_with_value()))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write the usage as it is meant; the parser knows only one list of arguments."""
        del ctx
        return ["[OPTIONS]", "(SCRIPT | -m MODULE)", "[ARGS]..."]

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Nothing of ours behind the program: what stands there is its own, and mostly files."""
        if ctx.params.get("program") or ctx.params.get("module"):
            return []
        return super().shell_complete(ctx, incomplete)

    def _options_with_value(self) -> set[str]:
        names: set[str] = set()
        for parameter in self.params:
            if parameter.param_type_name == "option" and not getattr(parameter, "is_flag", False):
                names.update(parameter.opts)
        return names


class PlannedCommand(ProgramCommand):
    """A command about a program, whose arguments are its own, or about a workload, which options may follow."""

    allow_interspersed_args = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """End our own options at a program; those after a workload's name are ours."""
        with_value = self._options_with_value()
        found = end_options_at_module(args, with_value)
        place = first_argument(args, with_value) if found == args else None
        if place is not None and not names_workload(args[place]):
            found = [*args[:place], "--", *args[place:]]
        return super(ProgramCommand, self).parse_args(ctx, found)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write the usage as it is meant."""
        del ctx
        return ["[OPTIONS]", "(SCRIPT | -m MODULE | FILE.py:WORKLOAD)", "[ARGS]..."]

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Nothing of ours behind a program."""
        if ctx.params.get("workload") and not names_workload(ctx.params["workload"]):
            return []
        return super(ProgramCommand, self).shell_complete(ctx, incomplete)


class TargetCommand(Verb):
    """A command whose options end at the process or the command that it is about."""

    allow_interspersed_args = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Let options stand behind the number of a process too: what follows that cannot be a command's."""
        if len(args) > 1 and args[0].isdecimal() and args[1].startswith("-") and "--" not in args:
            args = [*args[1:], args[0]]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write the usage as it is meant; the parser knows only one list of arguments."""
        del ctx
        return ["[OPTIONS]", "(PID | -- COMMAND [ARGS]...)"]

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Nothing of ours behind the command."""
        return [] if ctx.params.get("target") else super().shell_complete(ctx, incomplete)


def end_options_at_module(arguments: list[str], with_value: set[str]) -> list[str]:
    """Insert ``--`` after ``-m MODULE`` where that stands among our own options.

    Args:
        with_value: our options that take the next argument as their value.
    """
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--" or not argument.startswith("-") or argument == "-":
            break
        if argument == "-m":
            if position + 1 == len(arguments):
                break  # the parser says that it lacks its value
            return [*arguments[: position + 2], "--", *arguments[position + 2 :]]
        if argument.startswith("-m"):
            return [*arguments[:position], "-m", argument[2:], "--", *arguments[position + 1 :]]
        position += 2 if argument in with_value else 1
    return arguments


def names_workload(text: str) -> bool:
    """Whether an argument has the form ``FILE.py:NAME``."""
    file, _, name = text.rpartition(":")
    return bool(file) and name.isidentifier()


def first_argument(arguments: list[str], with_value: set[str]) -> int | None:
    """Where the first argument that is no option of ours stands; None where there is none, or ``--`` comes first."""
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        if argument == "--":
            return None
        if not argument.startswith("-") or argument == "-":
            return position
        position += 2 if argument in with_value else 1
    return None


def program_command(module: str | None, program: list[str]) -> list[str]:
    """What python would be given: the script and its arguments, or ``-m``, the module and its arguments.

    Raises:
        UsageError: there is no program, or it is not a file that can be read.
    """
    if module is not None:
        if not module.strip() or module.startswith("-"):
            raise UsageError(
                "-m needs the name of a module",
                "Write it as in python: vramfit run --gpu NAME -m package.module",
            )
        return ["-m", module, *program]
    if not program:
        raise UsageError(
            "no script is given", 'Write it last: vramfit run --gpu "RTX 4090" train.py, or use -m MODULE'
        )
    _check_script(Path(program[0]))
    return program


def planned_program(
    target: str | None, arguments: list[str] | None, module: str | None, *, has_card: bool
) -> list[str]:
    """The command line of the program that a verb is about; empty where it is a workload.

    Args:
        has_card: whether a card was chosen: a hint says where it belongs if it stands behind the program.

    Raises:
        UsageError: there is neither, or both.
    """
    if module is None and target is not None and names_workload(target):
        if arguments:
            raise UsageError(
                f"{arguments[0]} stands behind a workload, which has no arguments", "Leave it out"
            )
        return []
    words = [] if target is None else [target, *(arguments or [])]
    if module is None and not words:
        raise UsageError(
            "there is no program and no workload",
            'Write it last: vramfit plan --gpu "RTX 4090" train.py',
        )
    command = program_command(module, words)
    if not has_card and any(word == "--gpu" or word.startswith("--gpu=") for word in command[1:]):
        raise UsageError(
            "--gpu stands behind the program, and is the program's own there",
            f'Write it first: vramfit plan --gpu "RTX 4090" {command[0]}',
        )
    check_source(command)
    return command


def _check_script(script: Path) -> None:
    if script.is_dir():
        raise UsageError(
            f"{script} is a folder, not a script", "Give the script in it, or run a package with -m PACKAGE"
        )
    if not script.exists():
        raise UsageError(f"there is no script {script}", _beside(script))
    try:
        with script.open("rb"):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot read {script}: {(error.strerror or str(error)).lower()}",
            "Check the permissions of the file",
        ) from error


def check_source(command: list[str]) -> None:
    """Find a script that python could not compile, before an interpreter is started for it.

    Only the source of the script itself is looked at; what it imports is found out by running it.

    Raises:
        VramfitError: the source has a syntax error or cannot be decoded; the program itself failed, so the
            exit code is 1.
    """
    script = Path(command[0])
    if command[0] == "-m" or not script.is_file():  # a pipe can be read only once, by the program
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program's own interpreter shows them
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f" line {error.lineno}" if error.lineno else ""
        raise VramfitError(
            f"{script}{line}: {error.msg}", f"Correct it there: python -m py_compile {script} shows the place"
        ) from None
    except ValueError as error:  # null bytes, before Python 3.11.4
        raise VramfitError(f"{script}: {error}", "Give a file of Python source") from None
    except (OSError, RecursionError, MemoryError, OverflowError):
        return  # the program's own interpreter says so, if it ends there as well


def _beside(script: Path) -> str:
    """Scripts of about that name in the folder, or what else could be wrong."""
    import difflib

    folder = script.parent
    if not folder.is_dir():
        return f"There is no folder {folder} either: check the path"
    names = sorted(path.name for path in folder.glob("*.py"))
    if close := difflib.get_close_matches(script.name, names, n=3, cutoff=0.6):
        return f"Did you mean {', '.join(close)}?"
    return "Check the path; it is relative to the current folder"
