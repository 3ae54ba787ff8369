"""Ranks of a distributed program, from Python: those that differ run on virtual GPUs, and are told side by side."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from vramfit.analysis.rank_memory import RankSpan, WorldMemory, world_memory
from vramfit.api.programs import Report, command_of
from vramfit.arguments import call_argument, whole_argument
from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec, find_gpu
from vramfit.options.option_keywords import takes_options
from vramfit.options.run_options import KEYWORDS, NOT_OF_RANKS, WorldKeywords, read_options
from vramfit.report import json_text, print_report, render, to_json
from vramfit.trace import Run
from vramfit.virtual.ranks.rank_place import MOST_RANKS, PER_NODE
from vramfit.virtual.worlds.rank_choice import ChoiceKind, rank_choice, standings
from vramfit.virtual.worlds.world_run import World, WorldRun, kinds_of, places_of, run_world

Program = str | os.PathLike[str] | Callable[..., object]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldReport:
    """What ranks of a distributed program take; `run_ranks` makes it.

    >>> _ = Path("ddp.py").write_text('''
    ... import torch, torch.distributed as dist
    ... dist.init_process_group("nccl")
    ... torch.cuda.set_device(dist.get_rank())
    ... torch.empty(dist.get_rank() + 1, 1 << 20, dtype=torch.uint8, device="cuda")
    ... ''')
    >>> found = vramfit.run_ranks("ddp.py", gpu="H100", world_size=2)
    >>> found.worst, found.peak_allocated_bytes
    (1, 2097152)

    Attributes:
        memory: what was found, rank by rank.
    """

    memory: WorldMemory

    @property
    def fits(self) -> bool | None:
        """Whether every rank that ran fits its card; None when that is unknown."""
        return self.memory.fits

    @property
    def worst(self) -> int:
        """The number of the rank that decides."""
        return self.memory.decisive.rank

    @property
    def reports(self) -> dict[int, Report]:
        """The report of each rank that ran, by its number."""
        return {rank.rank: Report(run=rank.run, verdict=rank.verdict) for rank in self.memory.ranks}

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes that tensors held at once on the card of the worst rank."""
        return self.memory.decisive.card.peak_allocated

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes that torch's allocator held at once on the card of the worst rank."""
        return self.memory.decisive.card.peak_reserved

    def to_dict(self) -> dict[str, Any]:
        """The report as ``vramfit run --ranks N --json`` writes it."""
        return to_json(self.memory)

    def to_json(self) -> str:
        """The same as text."""
        return json_text(self.memory)

    def print(self) -> None:
        """Print the ranks side by side, as ``vramfit run --ranks N`` does."""
        from vramfit.console import SafeConsole

        with SafeConsole(force_jupyter=False) as console:
            print_report(self.memory, console=console, root=Path.cwd())

    def __repr__(self) -> str:
        return f"<WorldReport: {render(self.memory, width=10_000).splitlines()[0][2:]}>"

    def __str__(self) -> str:
        """The report as plain text."""
        return render(self.memory)


def memory_of(found: WorldRun, launcher: str = "") -> WorldMemory:
    """Put ranks that ran side by side, with those for which they stand."""
    spans: dict[int, list[RankSpan]] = {}
    if found.choice.kind is ChoiceKind.AUTO:
        kinds = kinds_of(found.runs, found.world)
        order = places_of(found.runs, found.world).order(kinds)
        for one in standings(kinds, lambda rank: _reserved(found.runs[rank]), order):
            span = RankSpan(first=one.first, last=one.last, alike=one.alike, same_place=one.same_place)
            spans.setdefault(one.rank, []).append(span)
    return world_memory(
        {rank: _of_its_card(run) for rank, run in found.runs.items()},
        size=found.world.size,
        per_node=found.world.per_node,
        launcher=launcher,
        spans={rank: tuple(given) for rank, given in spans.items()},
        waited_for=found.waited_for,
    )


def _reserved(run: Run) -> int:
    return max((device.peak_reserved_bytes for device in run.devices), default=0)


def _of_its_card(run: Run) -> Run:
    """A run without the cards of its node that it does not touch."""
    used = tuple(device for device in run.devices if device.context_bytes or device.peak_reserved_bytes)
    return replace(run, devices=used or run.devices[:1])


@takes_options(without=NOT_OF_RANKS, own=("gpu",))
def run_ranks(
    program: Program,
    *arguments: Any,
    gpu: str | os.PathLike[str] | GpuSpec,
    world_size: int,
    ranks: str | int | Sequence[int] = "auto",
    per_node: int | None = None,
    module: bool = False,
    progress: Callable[[str], object] | None = None,
    **options: Unpack[WorldKeywords],
) -> WorldReport:
    """Run ranks of a distributed program on virtual GPUs, each in a process of its own, and find the worst.

    The program finds RANK, WORLD_SIZE and the other variables of torchrun, and joins by ``init_process_group`` as on
    cards; nothing is sent. docs/parallel.md tells which values of other ranks are assumed.

    >>> _ = Path("ddp.py").write_text('''
    ... import os, torch, torch.distributed as dist
    ... dist.init_process_group("nccl")
    ... device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    ... model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096).to(device))
    ... model(torch.ones(8, 4096, device=device)).sum().backward()
    ... ''')
    >>> found = vramfit.run_ranks("ddp.py", gpu="H100", world_size=8)
    >>> found.fits, found.worst, sorted(found.reports)
    (True, 0, [0, 7])

    Args:
        program: a script, the name of a module with ``module=True``, or a function of a module or script, which is
            called in each rank's process.
        arguments: the program's own; a function may be given any that can be pickled.
        gpu: a card's name, a size (``"24GiB"``), a TOML file or a `GpuSpec`.
        world_size: how many ranks the program has.
        ranks: those that run: ``"auto"`` (one of each kind), ``"all"``, a number, or several.
        per_node: ranks of a node; 8, or as many as there are.
        module: run ``program`` as ``python -m`` does.
        progress: called with a line before each rank.
        options: those of `RunOptions` for virtual cards.

    Raises:
        UnknownGpuError: no such card.
        UsageError: no such program, rank or world.
        EnvironmentUnfitError: this torch cannot carry the virtual GPU.
    """
    size = whole_argument("world_size", world_size, least=1, most=MOST_RANKS)
    node = min(PER_NODE, size) if per_node is None else whole_argument("per_node", per_node, least=1)
    world, choice = World(size=size, per_node=node), rank_choice(ranks, size)
    chosen = read_options(KEYWORDS, {"gpu": find_gpu(gpu), **options}, without=NOT_OF_RANKS)
    told = None if progress is None else call_argument("progress", progress)
    with ExitStack() as stack:
        if callable(program):
            made = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vramfit-function-")))
            command = [str(_script_of(program, arguments, made))]
        else:
            command = command_of(program, arguments, chosen.cwd, module=module, or_else=" a function,")
        return WorldReport(memory=memory_of(run_world(lambda _: command, chosen, world, choice, told)))


def _script_of(function: Callable[..., object], arguments: Sequence[object], folder: Path) -> Path:
    """A script that calls a function, found again by its module or by the file of the program that defines it.

    Raises:
        UsageError: it can be found by neither, or its arguments cannot be pickled.
    """
    name, home = getattr(function, "__qualname__", ""), getattr(function, "__module__", None)
    if not name or "<" in name or home is None:
        raise UsageError(
            f"{name or function!r} cannot be found from another process",
            "Give a function at the top of a file, or a script",
        )
    source = getattr(getattr(function, "__code__", None), "co_filename", "")
    if home == "__main__" and not Path(source).is_file():
        raise UsageError(
            f"{name} is of no file: a notebook's functions cannot be found from another process",
            "Write it into a file, and import it from there",
        )
    try:
        given = pickle.dumps(tuple(arguments))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the arguments of {name} cannot be pickled: {error}", "Make them in the function"
        ) from None
    path = os.path.abspath(source)
    home_values = (
        f"runpy.run_path({path!r}, run_name='__ranks__')"
        if home == "__main__"
        else f"vars(importlib.import_module({home!r}))"
    )
    first, *rest = name.split(".")
    lines = (
        "import functools, importlib, pickle, runpy, sys",
        f"sys.path[:0] = {[os.path.dirname(path), *_search_path()]!r}",
        f"function = functools.reduce(getattr, {rest!r}, {home_values}[{first!r}])",
        f"function(*pickle.loads({given!r}))",
    )
    script = folder / "ranks_function.py"
    script.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return script


def _search_path() -> list[str]:
    """Where this process finds modules."""
    import sys

    return [os.path.abspath(entry) for entry in sys.path]
