"""The command line of the program to run: what belongs to vramfit and what to the program."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vramfit.cli.verbs import Verb
from vramfit.errors import UsageError, VramfitError


class ProgramCommand(Verb):
    """A command whose options end at the program, as those of python do.

    The first argument that is no option is the script, and all after it is the script's, ``--help`` too; so
    is all that follows ``-m MODULE``.
    """

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


def end_options_at_module(arguments: list[str], with_value: set[str]) -> list[str]:
    """Insert ``--`` after ``-m MODULE`` where that stands among our own options.

    Args:
        arguments: what follows the verb.
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

    Args:
        command: as `program_command` gives it.

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
