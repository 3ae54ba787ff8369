"""``vramfit check``: gates for continuous integration: a budget, or no more than a baseline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vramfit.cli import options
from vramfit.cli.ci import failures_told, tell_check
from vramfit.cli.printing import STANDARD_OUTPUT, apart_from_json, check_outputs, interrupted, write_document
from vramfit.cli.program import Verb, check_source, program_command
from vramfit.cli.ranks import (
    WorldOptions,
    is_launcher,
    run_ranks,
    settings_of,
    world_of,
)
from vramfit.cli.run_parameters import with_run_options
from vramfit.cli.where import load_planned, run_program, with_plan
from vramfit.errors import UsageError, VramfitError
from vramfit.options.run_options import COMMAND_LINE, RunOptions, check_runs, given_options

if TYPE_CHECKING:
    from vramfit.analysis import Gate, PeakState, Tolerance, Verdict
    from vramfit.planner.planned_program import PlannedProgram
    from vramfit.report import Check
    from vramfit.trace import Actual, Run

GATE_FAILED = 3
_SOURCES = {".py", ".pyw"}
_ERROR = 300
"""Characters of a program's error that are shown: the program has printed it whole."""
_NO_BASELINE = "Write one first: vramfit check TARGET --write-baseline"


class CheckCommand(Verb):
    """A command whose own options may follow the target; the program's stand after ``--``."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write the usage as it is meant; the parser knows only one list of arguments."""
        del ctx
        return ["(SCRIPT | -m MODULE | TRACE | SNAPSHOT | REPORT.json)", "[OPTIONS]", "[-- ARGS...]"]


@with_run_options(
    without=("budget", "clock", "kernels", "host_memory"),
    card_follows=True,
    words={
        "gpu": "The card of the program; by default the baseline's, or one of the budget's size.",
        "device": "Run for real instead, recorded: on this machine's card or on its CPU.",
    },
)
def check_command(
    *,
    target: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET [-- ARGS]",
            help="A program, or the trace, snapshot or JSON report of one that ran.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help='What each card may hold at the peak: "20GiB".')
    ] = None,
    of: Annotated[
        str,
        typer.Option(
            metavar="total|reserved|allocated",
            help="What the budget is for: all (reserved, and what lies outside PyTorch), reserved, or allocated.",
        ),
    ] = "total",
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What it took before: a report, a trace or a snapshot."),
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="T", help='How much more than the baseline, "1%" or "50MiB".', show_default="1%"
        ),
    ] = None,
    run: RunOptions,
    module: options.Module = None,
    plan: options.Plan = None,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the result as JSON; - for standard output.",
            rich_help_panel=options.WRITTEN,
        ),
    ] = None,
    junit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the result as JUnit XML.", rich_help_panel=options.WRITTEN),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what it takes now, as a baseline for later.",
            rich_help_panel=options.WRITTEN,
        ),
    ] = None,
    report: options.Page = None,
) -> None:
    """Check that a program stays within a memory budget, or takes no more than it used to.

    Of a program of several ranks (--ranks 8, or the command of torchrun after --) the worst rank is checked.

    The exit code is 3 if it does not, the program's own if it fails for another reason, and 2 if nothing could be
    checked.
    """
    asked = _asked(budget, of, baseline, tolerance, write_baseline)
    planned = None if plan is None else load_planned(plan)
    check_outputs(
        (("--json", json), ("--junit", junit), ("--write-baseline", write_baseline), ("--report", report))
    )
    options.check_alloc_conf(run.alloc_conf)
    subject = _subject(module, target or [], run)
    if isinstance(subject, Path):
        if run.steps is not None or run.time is not None:
            raise UsageError(
                f"{'--steps' if run.steps is not None else '--time'} is for a program, and {subject} is a file of a "
                "run",
                "Leave it out",
            )
        if planned is not None:
            raise UsageError(f"--plan is for a program, and {subject} is a file of a run", "Leave it out")
        with failures_told(subject.name, junit=junit, json=json):
            found = _of_file(subject)
            gates = _gates(asked, found.states)
    else:
        run = _on_card(asked, run)
        run = run if planned is None else planned.options(run)
        with failures_told(_name_of(subject), junit=junit, json=json):
            found = _of_program(subject, run, json, planned)
            _check_end(found)
            gates = _gates(asked, found.states)
    _end(asked, found, gates, _CheckOutputs(json=json, junit=junit, report=report))


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckOptions:
    """What the options ask for."""

    budget: int | None
    of: str
    baseline: Actual | None
    tolerance: Tolerance
    write: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckOutputs:
    """The files to write; None for those that were not requested."""

    json: Path | None
    junit: Path | None
    report: Path | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _CheckedTarget:
    """What was found for the target; without a run where it is a report."""

    name: str
    states: Sequence[PeakState]
    report: dict[str, Any]
    run: Run | None = None
    verdict: Verdict | None = None
    ran_here: bool = False


def _asked(
    budget: str | None, of: str, baseline: Path | None, tolerance: str | None, write: Path | None
) -> _CheckOptions:
    """Read the options, before anything is run."""
    from vramfit.analysis import DEFAULT_TOLERANCE, Quantity, Tolerance
    from vramfit.trace import read_actual

    if budget is None and baseline is None and write is None:
        raise UsageError("there is nothing to check", "Give --budget 20GiB, --baseline FILE, or both")
    if of not in {one.value for one in Quantity}:
        raise UsageError(f"--of is {of!r}", "Choose total, reserved or allocated")
    if of != Quantity.TOTAL.value and budget is None:
        raise UsageError("--of needs a budget", "Add --budget 20GiB")
    if tolerance is not None and baseline is None:
        raise UsageError("--tolerance has nothing to compare with", "Name an earlier result: --baseline FILE")
    size = options.size_of("--budget", budget)
    if baseline is not None and not baseline.exists():
        raise UsageError(f"there is no baseline {baseline}", f"{_NO_BASELINE} {baseline}")
    return _CheckOptions(
        budget=size,
        of=of,
        baseline=None if baseline is None else read_actual(baseline),
        tolerance=DEFAULT_TOLERANCE if tolerance is None else Tolerance.parse(tolerance),
        write=write,
    )


def _subject(module: str | None, target: list[str], run: RunOptions) -> Path | list[str] | WorldOptions:
    """The file to look at, or the program to run."""
    of_ranks = any(one is not None for one in (run.ranks, run.per_node, run.rank))
    if module is not None or of_ranks or (target and is_launcher(target)):
        return world_of(module, target, run)
    if not target:
        raise UsageError(
            "no target is given", "Name a script, -m MODULE, or the trace, snapshot or report of a run"
        )
    if Path(target[0]).suffix in _SOURCES:
        return program_command(module, target)
    if len(target) > 1:
        raise UsageError(
            f"{target[0]} is not a program, so it cannot take the argument {target[1]!r}",
            "Check one target at a time; a script's name ends with .py",
        )
    return Path(target[0])


def _on_card(asked: _CheckOptions, run: RunOptions) -> RunOptions:
    """The options with the place to run: as they say, else as the baseline ran, else a card of the budget's size."""
    if run.gpu is None and run.device is None:
        before = {} if asked.baseline is None else asked.baseline.report or {}
        if before.get("source") == "cpu":
            run = replace(run, device="cpu")
        else:
            run = replace(run, gpu=options.card_of(_card_of(asked)))
    check_runs(COMMAND_LINE, set(given_options(run)))
    return replace(run, budget=asked.budget) if run.device == "cpu" else run


def _card_of(asked: _CheckOptions) -> str:
    """The card to run on where none is named: the baseline's, else one of the budget's size."""
    if asked.baseline is not None:
        from vramfit.analysis import states
        from vramfit.gpus import find_gpu

        for state in states(asked.baseline):
            with contextlib.suppress(VramfitError):
                find_gpu(state.gpu)
                return state.gpu
        total = (asked.baseline.report or {}).get("total_bytes")
        if isinstance(total, int) and total > 0:  # a card that was named by its size alone
            return f"{total}B"
    if asked.budget is not None:
        return f"{_total_for(asked.budget, asked.of)}B"
    raise UsageError(
        "no card is given, and neither the baseline nor a budget implies one",
        'Choose one with --gpu, such as --gpu "RTX 4090"; vramfit gpus lists them',
    )


def _total_for(budget: int, of: str) -> int:
    """Memory of a card for a budget; one of reserved or allocated bytes lies beside the CUDA context."""
    from vramfit.analysis import Quantity
    from vramfit.gpus import find_gpu

    context = 0 if of == Quantity.TOTAL.value else find_gpu(f"{budget}B").typical_context_bytes
    return budget + context


def _of_file(file: Path) -> _CheckedTarget:
    from vramfit.analysis import run_from_trace, states, verdict
    from vramfit.report import to_json
    from vramfit.trace import read_actual

    actual = read_actual(file)
    if actual.trace is None:
        return _CheckedTarget(name=file.name, states=states(actual), report=dict(actual.report or {}))
    run = run_from_trace(actual.trace, name=file.name)
    judged = verdict(run)
    return _CheckedTarget(
        name=file.name, states=states(actual), report=to_json(run, judged), run=run, verdict=judged
    )


def _name_of(subject: list[str] | WorldOptions) -> str:
    return " ".join(subject if isinstance(subject, list) else subject.launched.program)


def _of_program(
    subject: list[str] | WorldOptions, options: RunOptions, json: Path | None, planned: PlannedProgram | None
) -> _CheckedTarget:
    """Run a program, with a plan if there is one; of one with several ranks the worst is what is checked."""
    from vramfit.analysis import verdict

    if isinstance(subject, list):
        check_source(subject)
        try:
            with apart_from_json(json):
                run = run_program(subject, options, with_plan(settings_of(), planned))
        except KeyboardInterrupt:
            raise interrupted() from None
        if planned is not None:
            run = planned.told(run, subject)
        return _of_run(run, verdict(run), " ".join(run.program))
    worst = run_ranks(subject, options, json, planned).decisive
    name = f"{' '.join(worst.run.program)}, rank {worst.rank} of {subject.world.size}"
    return _of_run(worst.run, worst.verdict, name)


def _of_run(run: Run, judged: Verdict, name: str) -> _CheckedTarget:
    from vramfit.analysis import no_card
    from vramfit.report import to_json

    return _CheckedTarget(
        name=name,
        states=tuple(_states_of_run(run, judged, name)) or (no_card(name),),
        report=to_json(run, judged),
        run=run,
        verdict=judged,
        ran_here=True,
    )


def _states_of_run(run: Run, judged: Verdict, name: str) -> Iterator[PeakState]:
    from dataclasses import replace

    from vramfit.analysis import state_from_trace

    for device in run.devices:
        state = state_from_trace(run.trace, device.index, name=name, outside=device.context_bytes)
        ran_out = judged.fits is False and run.oom is not None and run.oom.device == device.index
        yield replace(state, gpu=device.gpu, ran_out=ran_out)


def _check_end(found: _CheckedTarget) -> None:
    """Make sure that a program came so far that it can be judged.

    Raises:
        VramfitError: the program failed, or was ended from outside; its exit code says which.
    """
    from vramfit.analysis import Outcome
    from vramfit.cli.run import exit_code
    from vramfit.report.text import elide_middle

    run, judged = found.run, found.verdict
    if run is None or judged is None:
        return
    if run.progress.is_cut and not run.progress.was_asked_for:
        error = VramfitError(
            f"the program was {run.progress.end.value} before its end",
            "Nothing was checked: give it time, or end it with --steps or --time",
        )
        error.exit_code = exit_code(run, judged)
        raise error
    if judged.outcome is Outcome.FAILED:
        reason = f": {elide_middle(run.error, _ERROR)}" if run.error else ""
        error = VramfitError(
            f"the program failed (exit code {run.exit_code}){reason}",
            "Nothing was checked: fix the program first",
        )
        error.exit_code = exit_code(run, judged) or 1
        raise error


def _end(asked: _CheckOptions, found: _CheckedTarget, gates: Sequence[Gate], outputs: _CheckOutputs) -> None:
    """Write the files, print the result, and exit with the code for it."""
    passed = all(gate.passed for gate in gates)
    try:
        if asked.write is not None and any(state.is_used for state in found.states):
            _write_baseline(asked.write, found)
        elif asked.write is not None:
            typer.echo(f"Did not write the baseline {asked.write}: nothing was measured", err=True)
        if outputs.report is not None:
            _write_report(outputs.report, found)
    finally:
        check = _check(asked, found, gates)
        _tell(check, found, outputs.json)
        seconds = found.run.seconds_wall if found.ran_here and found.run is not None else 0.0
        tell_check(check, seconds=seconds, junit=outputs.junit, json=outputs.json)
    raise typer.Exit(0 if passed else GATE_FAILED)


def _gates(asked: _CheckOptions, found: Sequence[PeakState]) -> tuple[Gate, ...]:
    from vramfit.analysis import Quantity, baseline_gates, budget_gates, card_gates, states, used_gates

    if unused := used_gates(found):
        return unused
    gates = card_gates(found)
    if asked.budget is not None:
        gates += budget_gates(found, asked.budget, Quantity(asked.of))
    if asked.baseline is not None:
        gates += baseline_gates(found, states(asked.baseline), asked.tolerance)
    return gates


def _check(asked: _CheckOptions, found: _CheckedTarget, gates: Sequence[Gate]) -> Check:
    from vramfit.analysis import diff_states, states
    from vramfit.report import Check
    from vramfit.trace.outcome import UNTOLD

    run = found.run
    return Check(
        target=found.name,
        gates=gates,
        diffs=() if asked.baseline is None else diff_states(states(asked.baseline), found.states),
        progress=UNTOLD if run is None else run.progress,
        states=found.states,
        oom=None if run is None else run.oom,
    )


def _tell(check: Check, found: _CheckedTarget, json: Path | None) -> None:
    """Print what was found; where a budget is not kept, also where the bytes are."""

    from vramfit.analysis import Bound
    from vramfit.report import Explanation, print_report, to_json

    if json is not None:
        write_document(json, to_json(check))
    if json == STANDARD_OUTPUT:
        return
    from vramfit.console import SafeConsole

    console = SafeConsole()
    print_report(check, console=console, root=Path.cwd())
    missed = any(gate.bound is not Bound.BASELINE and not gate.passed for gate in check.gates)
    if missed and found.run is not None and found.verdict is not None:
        console.print()
        if found.ran_here:
            print_report(found.run, found.verdict, console=console, root=Path.cwd())
        else:
            explained = Explanation(run=found.run, verdict=found.verdict, peaks=())
            print_report(explained, console=console, root=Path.cwd())


def _write_baseline(path: Path, found: _CheckedTarget) -> None:
    """Write the result for the target in the form of ``vramfit run --json``."""
    if not found.report:
        raise UsageError(
            f"{found.name} holds only figures, which are not enough for a baseline",
            "Write one from a program, a trace or a snapshot",
        )
    write_document(path, found.report)
    typer.echo(f"Wrote the baseline {path}", err=True)


def _write_report(path: Path, found: _CheckedTarget) -> None:
    """Write the page of the run."""
    if found.run is None:
        raise UsageError(
            f"{found.name} holds no record of the run, so no page can be written",
            "Give a program, a trace or a snapshot",
        )
    from vramfit.report import write_page

    write_page(path, found.run, found.verdict, root=Path.cwd())
