"""The extension for IPython and notebooks, ``%load_ext vramfit``: the cell magic ``%%vram``, and recordings that show
themselves.

Results of ``vramfit.run`` and ``vramfit.track`` show themselves without it. It does the same for bare traces and runs,
such as ``MemoryTrace.load("run.vft")``: the verdict where there is one, figures and the timeline, static and without
scripts. IPython itself is not imported: it calls what stands here with its shell.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from vramfit.analysis import verdict
from vramfit.api.programs import Report
from vramfit.errors import UsageError, VramfitError
from vramfit.integrations.cell_program import FILE, cell_program
from vramfit.options.run_options import COMMAND_LINE, NOT_OF_A_CELL, OPTIONS, RunOptions, read_options
from vramfit.report.html.page import run_summary, trace_summary
from vramfit.trace import MemoryTrace, Run
from vramfit.trace.tried_remedies import TriedRemedies

_HTML = "text/html"
_MAGIC = "vram"
_CELL = {name: one for name, one in OPTIONS.items() if one[0].help and name not in NOT_OF_A_CELL}
"""Options of a cell."""

_USAGE = "It is written %%vram {} [--remedies SECONDS] [-o VARIABLE]".format(
    " ".join(f"[{COMMAND_LINE.name(name)} {declared.metavar}]" for name, (declared, _) in _CELL.items())
)


class _Source(Protocol):
    """What measures a block: a virtual GPU or a recording."""

    @property
    def report(self) -> Report: ...
    def __enter__(self) -> object: ...
    def __exit__(self, *error: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class CellMagic:
    """``%%vram [--gpu NAME | --device D] [OPTIONS] [-o VARIABLE]``, with the options of `RunOptions` for a cell.

    With ``--remedies SECONDS`` a cell that does not fit a virtual card is followed by what makes it fit.

    Runs the cell as IPython does, in the user's variables, and shows below it what it held: one output, with the
    timeline in a notebook and as text in a terminal. With ``--gpu`` the cell runs on a virtual GPU and computes
    nothing; what it makes holds no values, and what earlier cells made is not on the virtual card. Without, it runs
    for real and is recorded: on this machine's card, or on its CPU, metered.
    """

    shell: Any

    @property
    def __name__(self) -> str:
        """What IPython lists it by."""
        return _MAGIC

    def __call__(self, line: str, cell: str) -> Any:
        """Run a cell; its last expression is the value, as without the magic."""
        __tracebackhide__ = True  # IPython leaves such frames out: the cell's own are what matters
        with self._told():
            options = _options(line)
            source = _source(options.run)
            code = self._compiled(cell)
        name = f"In [{self.shell.execution_count}]"
        entered = False
        try:
            with self._entered(source):
                entered = True
                return self._run(*code)
        finally:
            if entered:
                found = source.report
                found = replace(found, run=replace(found.run, program=(name,)))
                if options.remedy_seconds and found.fits is False:
                    found = replace(found, run=replace(found.run, remedies=self._tried(options, cell)))
                if options.output:
                    self.shell.user_ns[options.output] = found
                self._show(found)

    @contextmanager
    def _entered(self, source: _Source) -> Iterator[None]:
        """A block that lets through what the cell raises; what cannot begin is reported in a line."""
        with self._told():
            source.__enter__()
        try:
            yield
        except BaseException as error:
            source.__exit__(type(error), error, error.__traceback__)
            raise
        source.__exit__(None, None, None)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Let IPython show an error of ours in a line, without its stack."""
        try:
            yield
        except VramfitError as error:
            text = f"{error.message}. {error.hint}" if error.hint else error.message
            try:
                from IPython.core.error import UsageError as Shown
            except ImportError:  # another shell of the same interface
                raise error from None
            raise Shown(text) from None

    def _tried(self, options: CellOptions, cell: str) -> TriedRemedies:
        """What makes the cell fit, tried on it as a program of its own, in a process of its own."""
        from vramfit.planner.remedies.tried import tried_remedies

        *before, _ = self.shell.user_ns.get("In") or [""]
        earlier = [(number, _without_magic(text)) for number, text in enumerate(before) if text]
        number = self.shell.execution_count
        here = f"import sys; sys.path.insert(0, {os.getcwd()!r})"
        program = cell_program(earlier, number, cell, before=here)
        if program.missing:
            names = ", ".join(program.missing)
            return TriedRemedies(why_not=f"the cell uses {names}, which no earlier cell binds")
        with tempfile.TemporaryDirectory(prefix="vramfit-cell-") as folder:
            file = Path(folder) / FILE
            file.write_text(program.source, encoding="utf-8")
            return program.told(tried_remedies([str(file)], options.run, options.remedy_seconds))

    def _compiled(self, cell: str) -> tuple[Any, Any]:
        """All statements, and the last expression where the cell ends with one; as IPython compiles its cells."""
        shell = self.shell
        source = shell.transform_cell(cell)
        file = shell.compile.cache(source)  # so that stacks name the lines of the cell
        tree = shell.transform_ast(shell.compile.ast_parse(source, filename=file))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        try:
            statements = shell.compile(tree, file, "exec")
            value = None if last is None else shell.compile(ast.Expression(last.value), file, "eval")
        except SyntaxError as error:
            if "outside" in str(error) and ("await" in str(error) or "async" in str(error)):
                raise UsageError(
                    "%%vram runs no cell that awaits outside of a function",
                    "Put `with vramfit.track() as trace:` around the part that is to be measured",
                ) from None
            raise
        return statements, value

    def _run(self, statements: Any, value: Any) -> Any:
        __tracebackhide__ = True
        shell = self.shell
        exec(statements, shell.user_global_ns, shell.user_ns)
        return None if value is None else eval(value, shell.user_global_ns, shell.user_ns)

    def _show(self, report: Report) -> None:
        """One output: in a notebook its summary, whose text is a line; in a terminal the report."""
        formatter = self.shell.display_formatter
        if _HTML not in formatter.active_types:
            report.print()
            return
        data, metadata = formatter.format(report)
        self.shell.display_pub.publish(data, metadata)


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong with the line, instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"%%vram: {message}", _USAGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CellOptions:
    """What follows ``%%vram``.

    Attributes:
        run: how the cell is measured.
        output: the variable that keeps the report; None for none.
        remedy_seconds: for which remedies are tried where it does not fit; 0 for not at all.
    """

    run: RunOptions
    output: str | None
    remedy_seconds: float = 0.0


def _options(line: str) -> CellOptions:
    """Read what follows ``%%vram``."""
    parser = _Parser(prog="%%vram", add_help=False, allow_abbrev=False)
    for name, (declared, default) in _CELL.items():
        action = "append" if default == () else "store"
        kind = declared.kind if declared.kind is int else str
        parser.add_argument(
            COMMAND_LINE.name(name), dest=name, metavar=declared.metavar, type=kind, action=action
        )
    parser.add_argument("-o", "--output", metavar="VARIABLE")
    parser.add_argument("--remedies", metavar="SECONDS", type=float, default=0.0)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"%%vram: {error}", 'Quote names with spaces: --gpu "RTX 4090"') from None
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    output, seconds = given.pop("output", None), given.pop("remedies")
    if seconds and not (0 < seconds < math.inf and "gpu" in given):
        raise UsageError(
            f"--remedies {seconds:g} is not possible here", "Write it as --gpu NAME --remedies 60, in seconds"
        )
    if output is not None and not output.isidentifier():
        raise UsageError(f"-o {output} is not the name of a variable", "Write it as -o report")
    run = read_options(COMMAND_LINE, given, without=NOT_OF_A_CELL)
    return CellOptions(run=run, output=output, remedy_seconds=seconds)


def _without_magic(text: str) -> str:
    """A cell's text without the line of our magic, which leaves its numbers of lines as the cell has them."""
    first, _, rest = text.partition("\n")
    return rest if first.startswith(f"%%{_MAGIC}") else text


def _source(options: RunOptions) -> _Source:
    if options.gpu is not None:
        from vramfit.api.in_process import VirtualGPU

        return VirtualGPU(options)
    from vramfit.api.tracking import Track

    return Track(device=options.device, budget=options.budget, alloc_conf=options.alloc_conf)


def load_ipython_extension(shell: Any) -> None:
    """Add the magic and begin to show traces and runs; IPython calls it for ``%load_ext``."""
    formatter = shell.display_formatter.formatters[_HTML]
    formatter.for_type(MemoryTrace, trace_summary)
    formatter.for_type(Run, lambda run: run_summary(run, verdict(run)))
    shell.register_magic_function(CellMagic(shell), magic_kind="cell", magic_name=_MAGIC)


def unload_ipython_extension(shell: Any) -> None:
    """End it; IPython calls it for ``%unload_ext``."""
    formatter = shell.display_formatter.formatters[_HTML]
    for kind in (MemoryTrace, Run):
        formatter.pop(kind, None)
    shell.magics_manager.magics["cell"].pop(_MAGIC, None)
