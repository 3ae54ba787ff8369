"""Ranks of a distributed program on the command line: what starts them, which run, and what is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from vramfit.cli.printing import STANDARD_OUTPUT, apart_from_json, interrupted, write_document
from vramfit.cli.program import check_source, program_command
from vramfit.errors import UsageError

if TYPE_CHECKING:
    from vramfit.analysis import Reconciliation
    from vramfit.analysis.rank_memory import WorldMemory
    from vramfit.options.run_options import RunOptions
    from vramfit.planner.planned_program import PlannedProgram
    from vramfit.virtual.virtual_run import VirtualSettings
    from vramfit.virtual.worlds.launchers import Launched
    from vramfit.virtual.worlds.rank_choice import RankChoice
    from vramfit.virtual.worlds.world_run import World

DOES_NOT_FIT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldOptions:
    """A program of several ranks.

    Attributes:
        launched: what starts it.
        world: the ranks.
        choice: those that run.
        launcher: the command's name, empty for our own options.
    """

    launched: Launched
    world: World
    choice: RankChoice
    launcher: str


def world_of(module: str | None, program: Sequence[str], given: RunOptions) -> WorldOptions | list[str]:
    """The ranks of a program; of one without, what python would be given.

    Raises:
        UsageError: there is no such program, world or rank.
    """
    from vramfit.virtual.ranks.rank_place import PER_NODE
    from vramfit.virtual.worlds.launchers import Launched, launched, without_python
    from vramfit.virtual.worlds.rank_choice import rank_choice
    from vramfit.virtual.worlds.world_run import World

    written = [*(() if module is None else ("-m", module)), *program]
    cards = given.per_node or given.gpus
    started = launched(written, cards)
    if started is None:
        words = without_python(written)
        command = (
            program_command(words[1], words[2:]) if words[:1] == ["-m"] else program_command(None, words)
        )
        if given.ranks is None:
            for option, value in (("--rank", given.rank), ("--per-node", given.per_node)):
                if value is not None:
                    raise UsageError(
                        f"{option} is for a program of several ranks", "Say how many there are: --ranks 8"
                    )
            return command
        check_source(command)
        several = given.gpus if given.gpus > 1 else PER_NODE  # --gpus says what a machine has
        per_node = given.per_node or min(several, given.ranks)
        world = World(size=given.ranks, per_node=per_node)
        started = Launched(
            launcher="", program=tuple(command), per_node=min(per_node, world.size), nodes=world.nodes
        )
    else:
        if given.ranks is not None and given.ranks != started.size:
            raise UsageError(
                f"--ranks is {given.ranks}, and {started.launcher} starts {started.size}",
                "Leave --ranks out, or change the number of processes",
            )
        _check_program(started)
        if started.size == 1 and started.launcher == "torchrun" and given.rank is None:
            return (
                written
                if module is not None
                else ["-m", "torch.distributed.run", *without_python(written)[1:]]
            )
        world = World(size=started.size, per_node=started.per_node)
    return WorldOptions(
        launched=started,
        world=world,
        choice=rank_choice("auto" if given.rank is None else given.rank, world.size),
        launcher=started.launcher,
    )


def _check_program(started: Launched) -> None:
    words = list(started.program)
    command = program_command(words[1], words[2:]) if words[0] == "-m" else program_command(None, words)
    check_source(command)


def settings_of(journal: Path | None = None) -> VirtualSettings:
    """What a verb sets for a program whose report follows on the same output."""
    from vramfit.virtual.virtual_run import VirtualSettings

    return VirtualSettings(journal=journal, ends_line=True)


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is one that starts ranks; its options are not looked at."""
    from vramfit.virtual.worlds.launchers import launcher_of

    return launcher_of(words) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReconciliation:
    """How one rank differs from its recording.

    Attributes:
        rank: its number.
        found: the comparison.
    """

    rank: int
    found: Reconciliation


def only_rank(options: WorldOptions) -> int:
    """The number of the only rank that was asked for: a recording is of one, and is compared with that.

    Others may run beside it, as the stages of its pipeline do.

    Raises:
        UsageError: several were.
    """
    first = options.choice.first(options.world.size)
    if len(first) > 1:
        raise UsageError(
            f"--against has a recording of one rank, and {len(first)} of the {options.world.size} ranks are to run",
            "Say of which rank it is: --rank 0",
        )
    return first[0]


def run_ranks(
    options: WorldOptions, run: RunOptions, json: Path | None = None, planned: PlannedProgram | None = None
) -> WorldMemory:
    """Run the chosen ranks, each with a plan if there is one, and put them side by side.

    Raises:
        UsageError: on real cards.
        VramfitError: as from a run.
        typer.Exit: it was interrupted before the program ran.
    """
    from vramfit.api.ranks_api import memory_of
    from vramfit.virtual.worlds.world_run import run_world

    if run.gpu is None:
        raise UsageError("several ranks are run on virtual GPUs only", "Choose their card with --gpu NAME")
    run = replace(run, environ={**(run.environ or {}), **options.launched.environ})
    settings = settings_of()
    try:
        with apart_from_json(json):
            found = run_world(
                options.launched.command,
                run,
                options.world,
                options.choice,
                progress=lambda text: typer.echo(f"vramfit: {text}", err=True),
                settings=settings if planned is None else replace(settings, hooks=(planned.hook,)),
            )
    except KeyboardInterrupt:
        raise interrupted("before all ranks had run") from None
    if planned is not None:
        found = replace(found, runs={rank: planned.told(one) for rank, one in found.runs.items()})
    return memory_of(found, options.launcher)


def tell(found: WorldMemory, json: Path | None, against: RankReconciliation | None = None) -> None:
    """Print the ranks and then the worst of them as a run of its own; write the JSON that was asked for.

    Args:
        found: the ranks.
        json: the file.
        against: how one of them differs from its recording.
    """
    from vramfit.console import SafeConsole
    from vramfit.report import print_report, to_json

    if json is not None:
        told = None if against is None else {"rank": against.rank, **to_json(against.found)}
        write_document(json, {**to_json(found), "against": told})
    if json == STANDARD_OUTPUT:
        return
    console = SafeConsole()
    print_report(found, console=console, root=Path.cwd())
    worst = found.decisive
    console.print(f"\nRank {worst.rank} by itself\n", highlight=False)
    alone = replace(worst.run, warnings=())  # they are above
    print_report(alone, worst.verdict, console=console, root=Path.cwd())
    if against is not None:
        console.print(f"\nRank {against.rank} beside its recording\n", highlight=False)
        print_report(against.found, console=console, root=Path.cwd())
