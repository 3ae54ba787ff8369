"""The Python face of ``vramfit run``: run a program on a virtual GPU, or recorded, and get its report as a value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from vramfit.analysis import (
    Breakdown,
    Need,
    Reconciliation,
    Tolerance,
    Verdict,
    check_device,
    peak,
    reconcile,
    verdict,
)
from vramfit.api.program_run import run_program
from vramfit.arguments import (
    path_argument,
    paths_argument,
)
from vramfit.errors import UsageError
from vramfit.options.option_keywords import takes_options
from vramfit.options.run_options import KEYWORDS, SEVERAL, RunKeywords, RunOptions, read_options
from vramfit.report import json_text, print_report, render, to_json
from vramfit.report.forms import Material, write_as
from vramfit.report.html.page import run_summary, summary_lines
from vramfit.trace import Actual, MemoryTrace, Run, read_actual

_MARKS = "✓✗~! "
"""What headlines begin with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a program did, on a virtual GPU or for real; `run` makes it.

    >>> report = vramfit.run("mlp.py", device="cpu")
    >>> report.fits, report.exit_code, report.peak_allocated_bytes
    (None, 0, 0)

    Attributes:
        run: the facts: devices, warnings, out-of-memory, exit code.
        verdict: whether it fits, and why not.
        against: how it differs from the real run that it was compared with; None if it was not.
    """

    run: Run
    verdict: Verdict
    against: Reconciliation | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the program fits its cards; None when that is unknown."""
        return self.verdict.fits

    @property
    def need(self) -> Need | None:
        """What the program needs of a card that ran out: in all, or at least; None where it did not run out."""
        return self.verdict.need

    @property
    def trace(self) -> MemoryTrace:
        """Every allocation and free."""
        return self.run.trace

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes that tensors held at once on the fullest device."""
        return max((d.peak_allocated_bytes for d in self.run.devices), default=0)

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that torch's allocator held at once on the fullest device."""
        return max((d.peak_reserved_bytes for d in self.run.devices), default=0)

    @property
    def exit_code(self) -> int:
        """The program's exit code."""
        return self.run.exit_code

    def peak(self, device: int = 0) -> Breakdown:
        """Where the bytes are at the peak of a device."""
        return peak(self.run.trace, device)

    def reconcile(
        self, *files: str | os.PathLike[str], device: int | None = None, tolerance: str = "1%"
    ) -> Report:
        """The report with ``against``: how the run differs from a real one.

        Args:
            files: the real run's snapshot or trace, its figures as JSON, or one of each; docs/json.md lists the forms.
            device: the device of the real run to compare; by default those of the same index.
            tolerance: how far they may differ, ``"0.5%"`` or ``"50MiB"``; ``against.within`` says whether they do.

        Raises:
            TraceFormatError: a file is of none of these forms.
            UsageError: the two have no device in common.
        """
        return self._beside(
            read_actual(*paths_argument("against", files)), device, Tolerance.parse(tolerance)
        )

    def _beside(self, actual: Actual, device: int | None, tolerance: Tolerance) -> Report:
        return replace(self, against=reconcile(self.run, actual, device=device, tolerance=tolerance))

    def to_dict(self) -> dict[str, Any]:
        """The report as ``vramfit run --json`` writes it."""
        return to_json(self.run, self.verdict, self.against)

    def to_json(self) -> str:
        """The same as text."""
        return json_text(self.run, self.verdict, self.against)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run in the form that the file's ending asks for, as ``vramfit export`` does.

        ``.html`` is the page, ``.json`` this report, ``.vft`` the trace, ``.pickle`` a torch snapshot,
        ``.perfetto.json`` for ui.perfetto.dev, ``.csv``, ``.svg`` and ``.png`` the timeline.

        Raises:
            UsageError: the ending is that of no form.
            WriteError: it cannot be written.
        """
        write_as(path, Material(source=self.run, judged=self.verdict, root=Path.cwd()))

    def print(self) -> None:
        """Print the report as ``vramfit run`` does."""
        from vramfit.console import SafeConsole

        # In a notebook rich would make an output of every line, each as HTML and once more as text; and what is
        # written line by line would be an output each.
        with SafeConsole(force_jupyter=False) as console:
            print_report(self.run, self.verdict, console=console, root=Path.cwd())
            if self.run.remedies is not None:
                console.print()
                print_report(self.run.remedies, console=console)
            if self.against is not None:
                console.print()
                print_report(self.against, console=console, root=Path.cwd())

    def __repr__(self) -> str:
        return f"<Report: {summary_lines(self.run, self.verdict)[0].lstrip(_MARKS)}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and the timeline, without scripts."""
        return run_summary(self.run, self.verdict)

    def __str__(self) -> str:
        """The report as plain text."""
        text = render(self.run, self.verdict)
        return text if self.against is None else f"{text}\n{render(self.against)}"


@takes_options(without=SEVERAL)
def run(
    program: str | os.PathLike[str],
    *arguments: str,
    module: bool = False,
    against: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    tolerance: str = "1%",
    **options: Unpack[RunKeywords],
) -> Report:
    """Run a program on virtual GPUs, or for real and recorded, in a process of its own.

    >>> _ = Path("train.py").write_text("import torch; torch.nn.Linear(4096, 4096).cuda()")
    >>> report = vramfit.run("train.py", gpu="RTX 4090")
    >>> report.fits, report.peak_allocated_bytes
    (True, 67125248)

    Args:
        program: a script, or the name of a module with ``module=True``.
        arguments: the program's own.
        module: run ``program`` as ``python -m`` does.
        against: files that tell of a real run of the same program, to compare with; see `Report.reconcile`.
        tolerance: how far they may differ.
        options: those of `RunOptions`.

    Raises:
        UnknownGpuError: no such card.
        UsageError: no such script, no such device, or nothing in common with the real run.
        TraceFormatError: a file of the real run cannot be read.
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
    """
    chosen = read_options(KEYWORDS, options, without=SEVERAL)
    command = command_of(program, arguments, chosen.cwd, module=module)
    bound = Tolerance.parse(tolerance)
    actual = None if against is None else read_actual(*paths_argument("against", against))
    if actual is not None:
        check_device(actual, None)  # a wrong file should not cost a run
    report = report_of(command, chosen)
    return report if actual is None else report._beside(actual, None, bound)


def report_of(command: Sequence[str], options: RunOptions) -> Report:
    """The report of a program; see `run_program`."""
    outcome = run_program(command, options)
    return Report(run=outcome, verdict=verdict(outcome))


def command_of(
    program: object, arguments: Sequence[object], folder: str | None, *, module: bool, or_else: str = ""
) -> list[str]:
    """What python would be given.

    Args:
        or_else: what could be passed in place of a script, for errors.

    Raises:
        UsageError: there is no such script.
    """
    name = path_argument("program", program)
    own = [path_argument(f"arguments[{at}]", one) for at, one in enumerate(arguments)]
    if module:
        return ["-m", name, *own]
    if not (Path(folder or ".") / name).is_file():
        raise UsageError(
            f"there is no script {name}", f"Pass the path of a Python file,{or_else} or module=True"
        )
    return [name, *own]
