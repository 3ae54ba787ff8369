"""Makes the table "this model on that cluster" of docs/parallel.md: Llamas by four ways of training on many cards.

    python studies/clusters.py [--only SIZE[/WAY[/CARD[/CARDS]]] ...] [--fresh]    # a table in the terminal
    python studies/clusters.py --write                                              # the page

The programs are those of examples/parallel. The first rank of each world runs: all others are alike, since 64 divides
every dimension. It runs on a card of the same kind without a limit, to say what it takes, and again on the card itself
where that is more than the card has and what is allocated is not: torch gives cached blocks back before it fails.
Results are kept in build/clusters.jsonl; a stopped run goes on. Forty minutes of one core make all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from study_files import keep, kept, markdown_table

from vramfit.launch.tasks import Task, run_all

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parallel.md"
KEPT = ROOT / "build" / "clusters.jsonl"
BEGIN = "<!-- clusters: made by studies/clusters.py -->\n"
END = "<!-- end of clusters -->"
GIB = 1 << 30
NO_LIMIT = 16 << 40
TOKENS = 4096
IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.llama.modeling_llama",
    "vramfit.virtual.gpu",
)
"""What each process begins with."""

SIZES = {"1b": "1 B", "8b": "8 B", "70b": "70 B"}
CARDS = ("H100", "RTX 4090")
WORLDS = (1, 8, 16, 64)
LEAST = {"70b": 64}
"""Worlds that are too small for a model by its states alone, 16 bytes a parameter, are not tried."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a model is trained on many cards.

    Attributes:
        name: for the command line.
        says: for the table.
        script: of examples/parallel.
        arguments: its own.
        least: cards that it needs.
    """

    name: str
    says: str
    script: str
    arguments: tuple[str, ...] = ()
    least: int = 1


WAYS = (
    Way(name="ddp", says="DDP", script="ddp_llama", arguments=("--autocast",)),
    Way(name="fsdp2", says="FSDP2", script="fsdp2_llama"),
    Way(name="recompute", says="FSDP2, checkpointing", script="fsdp2_llama", arguments=("--checkpointing",)),
    Way(name="tp8", says="TP 8 and FSDP2", script="tp_fsdp_llama", arguments=("--tp", "8"), least=8),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model on one cluster."""

    size: str
    way: str
    card: str
    world: int

    @property
    def path(self) -> str:
        return "/".join((self.size, self.way, self.card, str(self.world)))


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a rank took.

    Attributes:
        allocated: bytes at most, without a limit.
        reserved: bytes at most, without a limit.
        outside: of the context and of NCCL.
        fits: whether it fits the card.
    """

    allocated: int
    reserved: int
    outside: int
    fits: bool


def cells() -> Iterator[Cell]:
    """All of the table."""
    for size in SIZES:
        for way in WAYS:
            for card in CARDS:
                for world in WORLDS:
                    if world >= max(way.least, LEAST.get(size, 1)):
                        yield Cell(size=size, way=way.name, card=card, world=world)


def measure(cell: Cell) -> Taken:
    """Run the first rank of a world, in this process alone."""
    from vramfit.gpus import find_gpu

    card = find_gpu(cell.card)
    device, _ = run(cell, replace(card, total_bytes=NO_LIMIT))
    taken = Taken(
        allocated=device.peak_allocated_bytes,
        reserved=device.peak_reserved_bytes,
        outside=device.context_bytes,
        fits=device.peak_reserved_bytes + device.context_bytes <= card.total_bytes,
    )
    if taken.fits or taken.allocated + taken.outside > card.total_bytes:
        return taken
    _, ran_out = run(cell, card)
    return replace(taken, fits=not ran_out)


def run(cell: Cell, card: Any) -> tuple[Any, bool]:
    """The device of a run, and whether it ran out of memory."""
    import torch

    import vramfit

    way = next(one for one in WAYS if one.name == cell.way)
    script = str(ROOT / "examples" / "parallel" / f"{way.script}.py")
    sys.argv = [script, "--size", cell.size, "--batch-size", "1", "--seq-len", str(TOKENS), "--steps", "2"]
    sys.argv += way.arguments
    sys.path[0] = os.path.dirname(script)
    ran_out = False
    gpu = vramfit.VirtualGPU(card, rank=0, world_size=cell.world, alloc_conf="")
    with contextlib.redirect_stdout(io.StringIO()), gpu:
        try:
            runpy.run_path(script, run_name="__main__")
        except torch.OutOfMemoryError:
            ran_out = True
    return gpu.report.run.devices[0], ran_out


def results(wanted: list[Cell], *, fresh: bool) -> dict[str, Taken]:
    """Results by the path of a cell: kept ones, and those that are missing.

    Raises:
        SystemExit: a cell failed.
    """
    if fresh:
        KEPT.unlink(missing_ok=True)
    for result in run_all(_missing(wanted), imports=IMPORTS):
        if not result.has_value:
            raise SystemExit(f"{result.key}: {result.failure}")
        keep(KEPT, {"path": result.key, **asdict(result.value)})
    return _known()


def _missing(wanted: list[Cell]) -> Iterator[Task]:
    for cell in wanted:
        if cell.path not in _known():  # several of these may run side by side
            print(cell.path, file=sys.stderr, flush=True)
            yield Task(key=cell.path, function=measure, arguments=(cell,))


def _known() -> dict[str, Taken]:
    return {one.pop("path"): Taken(**one) for one in kept(KEPT)}


def table(found: dict[str, Taken]) -> list[str]:
    """A row for each model and way, a column for each cluster."""
    heads = ["Llama", "trained by"]
    columns = [f"{world} x {card}" for card in CARDS for world in WORLDS]
    rows = []
    for size, says in SIZES.items():
        for way in WAYS:
            row = [says, way.says]
            for card in CARDS:
                for world in WORLDS:
                    taken = found.get(Cell(size=size, way=way.name, card=card, world=world).path)
                    row.append("" if taken is None else said(taken))
            rows.append(row)
    return markdown_table([*heads, *columns], rows, right=columns)


def said(taken: Taken) -> str:
    """GiB that are reserved, in bold where they fit."""
    text = f"{taken.reserved / GIB:,.1f}"
    return f"**{text}**" if taken.fits else text


def page(found: dict[str, Taken]) -> str:
    """The text of docs/parallel.md with its table as it has to be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join(table(found)) + "\n" + END + rest.partition(END)[2]


def main(arguments: list[str] | None = None) -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="CELL", help="such as 8b/fsdp2/H100/64 or 8b"
    )
    parser.add_argument("--fresh", action="store_true", help="forget kept results")
    parser.add_argument("--write", action="store_true", help="write docs/parallel.md")
    options = parser.parse_args(arguments)
    wanted = [cell for cell in cells() if cell.path.startswith(tuple(options.only))]
    if not wanted:
        parser.error(f"no cell begins with {' or '.join(options.only)}; they are such as 8b/fsdp2/H100/64")
    found = results(wanted, fresh=options.fresh)
    if options.write:
        PAGE.write_text(page(found), encoding="utf-8")
    else:
        print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
