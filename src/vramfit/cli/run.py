"""``vramfit run``: a program on the virtual GPU or for real, and what it says about its memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from vramfit.cli import options
from vramfit.cli.printing import apart_from_json, check_outputs, interrupted
from vramfit.cli.program import check_source
from vramfit.cli.ranks import (
    RankReconciliation,
    WorldOptions,
    only_rank,
    run_ranks,
    settings_of,
    tell,
    world_of,
)
from vramfit.cli.run_parameters import with_run_options
from vramfit.cli.run_remedies import RemedyTries, remedies_choice
from vramfit.cli.where import (
    DEFAULT_TOLERANCE,
    compare,
    load_planned,
    read_reference,
    run_program,
    with_plan,
)
from vramfit.options.run_options import RunOptions

if TYPE_CHECKING:
    from vramfit.analysis import Reconciliation, Verdict
    from vramfit.cli.where import Reference
    from vramfit.planner.planned_program import PlannedProgram
    from vramfit.trace import Run

DOES_NOT_FIT = 3
DIFFERS = 3


@with_run_options()
def run_command(
    *,
    program: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCRIPT [ARGS]", help="The program; all after it is its own.", show_default=False
        ),
    ] = None,
    run: RunOptions,
    module: options.Module = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the report as JSON; - is standard output (the program's goes to standard error).",
            rich_help_panel=options.WRITTEN,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the memory trace.", rich_help_panel=options.WRITTEN),
    ] = None,
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a torch memory snapshot, for pytorch.org/memory_viz.",
            rich_help_panel=options.WRITTEN,
        ),
    ] = None,
    report: options.Page = None,
    plan: options.Plan = None,
    remedies: Annotated[
        str | None,
        typer.Option(
            metavar="auto|none|SECONDS",
            help="Try what makes it fit, in the program's own words: where it does not (auto), never, or for so long.",
            show_default="auto",
            rich_help_panel=options.WITH_PLAN,
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Compare with a real run: its torch snapshot, its memory_stats() as JSON, or both (give it twice).",
            rich_help_panel=options.COMPARED,
        ),
    ] = None,
    against_device: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The device of that run to compare; by default those of the same index.",
            rich_help_panel=options.COMPARED,
        ),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="T",
            help='How far they may differ, "0.5%" or "50MiB": the exit code is 3 beyond.',
            show_default=DEFAULT_TOLERANCE,
            rich_help_panel=options.COMPARED,
        ),
    ] = None,
) -> None:
    """Run a program on a virtual GPU, or record a real run: does it fit, and where are the bytes?

    With --gpu it runs on a virtual GPU and computes nothing. Without, it runs for real, recorded: on this machine's
    card, or with --device cpu on its CPU, whose tensors are then placed as a card's allocator would place them.

    A program of several ranks is run with --ranks 8, or by its own command: -- torchrun --nproc-per-node 8 train.py,
    accelerate launch, deepspeed. One rank of each kind runs, and the report is of the worst.

    The exit code is that of the program; 3 if it ran out of memory, or differs from --against by more than the
    tolerance; 2 if it could not be started as asked or a report could not be written after it ran.
    """
    command = world_of(module, program or [], run)
    options.check_alloc_conf(run.alloc_conf)
    outputs = _Outputs(json=json, trace=trace, snapshot=snapshot, report=report)
    outputs.check()
    reference = read_reference(against or [], against_device, tolerance)
    tries = remedies_choice(remedies)
    planned = None if plan is None else load_planned(plan)
    if planned is not None:
        run = planned.options(run)
    if isinstance(command, WorldOptions):
        _run_ranks(command, run, reference, outputs, planned)
    check_source(command)

    journal = outputs.journal
    try:
        with apart_from_json(json):
            found_run = run_program(command, run, with_plan(settings_of(journal), planned))
    except KeyboardInterrupt:
        raise interrupted() from None
    if planned is not None:
        found_run = planned.told(found_run, command)
    found, misfit = compare(reference, found_run)
    plain = planned is None and reference is None
    verdict = _tell(found_run, found, outputs, RemedyTries(tries, command, run) if plain else None)
    if journal is not None:
        journal.unlink(missing_ok=True)
    if misfit is not None:
        raise misfit
    raise typer.Exit(exit_code(found_run, verdict, found))


def _run_ranks(
    world: WorldOptions,
    options: RunOptions,
    reference: Reference | None,
    outputs: _Outputs,
    planned: PlannedProgram | None,
) -> NoReturn:
    """Run ranks of a distributed program, tell of them, and end; files but the page are of the worst of them.

    Raises:
        UsageError: a recording is to be compared, and it is not said of which rank it is, or it has no device of it.
    """
    recorded = None if reference is None else only_rank(world)
    found = run_ranks(world, options, outputs.json, planned)
    against, misfit = None, None
    if recorded is not None:
        compared, misfit = compare(reference, found.rank(recorded).run)
        against = None if compared is None else RankReconciliation(rank=recorded, found=compared)
    try:
        tell(found, outputs.json, against)
    finally:
        worst = found.decisive
        own = against.found if against is not None and against.rank == worst.rank else None
        _write(worst.run, worst.verdict, own, replace(outputs, json=None, report=None))
        if outputs.report is not None:
            from vramfit.report import write_page

            write_page(outputs.report, found, root=Path.cwd())
    if misfit is not None:
        raise misfit
    codes = [exit_code(rank.run, rank.verdict) for rank in (found.decisive, *found.ranks)]
    differs = DIFFERS if against is not None and not against.found.within else 0
    raise typer.Exit(next((code for code in (*codes, differs) if code), 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outputs:
    """The files to write; None for those that were not requested."""

    json: Path | None
    trace: Path | None
    snapshot: Path | None
    report: Path | None

    @property
    def journal(self) -> Path | None:
        """Where the trace is written meanwhile: beside it, should this process be killed as well."""
        if self.trace is None or _is_device(self.trace):
            return None
        return self.trace.with_name(f"{self.trace.name}.journal")

    def check(self) -> None:
        """Find what cannot be written before the program runs for minutes.

        Raises:
            UsageError: two options name the same file, or the trace is not named as one.
            WriteError: a file cannot be written.
        """
        named = (
            ("--json", self.json),
            ("--trace", self.trace),
            ("--snapshot", self.snapshot),
            ("--report", self.report),
        )
        check_outputs(named)
        if self.trace is not None:
            from vramfit.trace.fileformat import check_trace_name

            check_trace_name(self.trace)


def _tell(run: Run, found: Reconciliation | None, outputs: _Outputs, tries: RemedyTries | None) -> Verdict:
    """Judge a run and print the report; try remedies, write the files, and print what was tried.

    The report is printed before anything else is run, and what was tried even where a file cannot be written.
    """
    from vramfit.analysis import verdict as judge

    verdict = judge(run)
    seconds = 0.0 if tries is None else tries.seconds(run, verdict)
    if not seconds or tries is None:
        try:
            _write(run, verdict, found, outputs)
        finally:
            _show(run, verdict, found, outputs.json)
        return verdict
    if outputs.json != Path("-"):
        _show(run, verdict, found, outputs.json)
    run = replace(run, remedies=tries.tried(seconds, run))
    try:
        _write(run, verdict, found, outputs)
    finally:
        if outputs.json == Path("-"):
            _show(run, verdict, found, outputs.json)
        else:
            _show_remedies(run)
    return verdict


def _show_remedies(run: Run) -> None:
    from vramfit.console import SafeConsole
    from vramfit.report import print_report

    console = SafeConsole()
    console.print()
    print_report(run.remedies, console=console, root=Path.cwd())


def _is_device(path: Path) -> bool:
    """Whether a path is a pipe or a device such as /dev/stdout, beside which nothing can lie."""
    return path.exists() and not path.is_file()


def exit_code(run: Run, verdict: Verdict, found: Reconciliation | None = None) -> int:
    """The exit code of a run: 3 if it ended by running out of memory or cannot fit, else the program's own.

    A program that catches the error and leaves by itself keeps the code that it chose. A signal's number
    counts from 128, as in a shell. Where the program ended well, it is 3 if it differs too much from what it
    was compared with.
    """
    if verdict.fits is False and (run.exit_code == 0 or (run.oom is not None and not run.oom.handled)):
        return DOES_NOT_FIT
    if run.exit_code == 0 and found is not None and not found.within:
        return DIFFERS
    return run.exit_code if run.exit_code >= 0 else 128 - run.exit_code


def _show(run: Run, verdict: Verdict, found: Reconciliation | None, json: Path | None) -> None:
    """Print the report, or its JSON where ``--json -`` is given."""
    if json == Path("-"):
        from vramfit.report import json_text

        typer.echo(json_text(run, verdict, found), nl=False)
        return
    from vramfit.console import SafeConsole
    from vramfit.report import print_report

    console = SafeConsole()
    print_report(run, verdict, console=console, root=Path.cwd())
    if found is not None:
        console.print()
        print_report(found, console=console, root=Path.cwd())


def _write(run: Run, verdict: Verdict, found: Reconciliation | None, outputs: _Outputs) -> None:
    """Write the requested files, each whole or not at all."""
    from vramfit.report import json_text, write_text

    if outputs.json is not None and outputs.json != Path("-"):
        write_text(outputs.json, json_text(run, verdict, found))
    if outputs.trace is not None:
        run.trace.save(outputs.trace)
    if outputs.snapshot is not None:
        from vramfit.trace import write_snapshot

        write_snapshot(run.trace, outputs.snapshot)
    if outputs.report is not None:
        from vramfit.report import write_page

        write_page(outputs.report, run, verdict, root=Path.cwd())
