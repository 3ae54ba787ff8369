"""Six models, 10,000 requests, one card: bytes moved by ours and by others, beside the true optimum.

    python benchmarks/language/residency.py [--requests N] [--room SIZE] [--seeds N] [--half-lives] [--json FILE]

Requests are Zipf (exponent 1, seed 0 first): who is popular is drawn too. Beside them come requests whose popular
models change every 1,000. All begin on the host; a model that is asked for must be on the card, with room for its
request. What moves are weights over the link, in bytes; no model runs. Times are bytes over the link of an RTX 4090.

The optimum is exact: dynamic programming over all sets of models, with all requests known. Belady's rule knows them
too, and lets the farthest next request leave first, which is the best for equal sizes only. Ollama's way lets the least
recent leave until its own estimate fits, taken as 2.1 times what is used: a report has 59 GB believed where 26,694 MiB
were used, and a model unloaded for nothing (github.com/ollama/ollama/issues/10359).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from vramfit.gpus import find_gpu
from vramfit.inference.residency.eviction import (
    CheapestReturn,
    EvictionPolicy,
    GreedyDualSize,
    LeastRecentlyUsed,
)
from vramfit.inference.residency.placement import Processes, SizedModel, fitting_sets
from vramfit.inference.residency.simulation import FarthestInFuture, optimal_bytes, simulate
from vramfit.units import GIB, MIB, format_bytes, parse_bytes
from vramfit.writing import write_text

SIZES = {"7B": 13.5, "13B": 24.2, "8B int4": 5.3, "vision": 8.1, "speech": 2.9, "embed": 1.2}
"""GiB of weights: float16 of Llama-2 7B and 13B, an 8B at 4 bits, and three smaller ones."""
REQUEST = 16
"""A request takes a sixteenth of the weights: cache and activations of some thousand tokens."""
BELIEVED = 59e9 / (26_694 * MIB)
SHIFT = 1_000
HALF_LIVES = (16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What one way moved."""

    name: str
    bytes: int
    loads: int
    above_optimum: float
    seconds: float


def models() -> dict[str, SizedModel]:
    return {
        name: SizedModel(name=name, weight_bytes=round(size * GIB), request_bytes=round(size * GIB / REQUEST))
        for name, size in SIZES.items()
    }


def zipf(seed: int, count: int, every: int | None = None) -> list[str]:
    """Requests; the ranks are drawn anew after ``every`` of them."""
    chance = random.Random(seed)
    names, found = list(SIZES), []
    while len(found) < count:
        chance.shuffle(names)
        found += chance.choices(
            names, [1 / rank for rank in range(1, len(names) + 1)], k=min(every or count, count - len(found))
        )
    return found


def ways(requests: list[str]) -> dict[str, tuple[Callable[[], EvictionPolicy], float]]:
    return {
        "cheapest return (ours)": (CheapestReturn, 1.0),
        "least recently used": (LeastRecentlyUsed, 1.0),
        "GreedyDual-Size-F": (GreedyDualSize, 1.0),
        "Ollama's way": (LeastRecentlyUsed, BELIEVED),
        "Belady, with sizes": (lambda: FarthestInFuture(requests), 1.0),
    }


def rows(requests: list[str], room: int, link: float) -> list[Row]:
    sized = models()
    best = optimal_bytes(sized, requests, room)
    found = []
    for name, (policy, believed) in ways(requests).items():
        moves = simulate(policy(), sized, requests, room, believed=believed)
        found.append(
            Row(
                name=name,
                bytes=moves.bytes,
                loads=moves.loads,
                above_optimum=moves.bytes / best - 1,
                seconds=moves.bytes / link,
            )
        )
    found.append(Row(name="the optimum", bytes=best, loads=0, above_optimum=0.0, seconds=best / link))
    return found


def show(title: str, found: list[Row], console: Console) -> None:
    table = Table(title=title)
    for head in ("way", "moved", "to optimum", "loads", "link, simulated"):
        table.add_column(head, justify="left" if head == "way" else "right")
    for row in found:
        loads = f"{row.loads:,}" if row.loads else ""
        table.add_row(
            row.name,
            f"{row.bytes / GIB:,.0f} GiB",
            f"{row.above_optimum:+.1%}",
            loads,
            f"{row.seconds:,.0f} s",
        )
    console.print(table)


def show_seeds(seeds: int, count: int, room: int, link: float, console: Console) -> None:
    """The mean over further seeds, and how often ours moved more than by recency."""
    table = Table(title=f"seeds 1 to {seeds}, mean above the optimum")
    table.add_column("way")
    sums: dict[str, list[float]] = {}
    kinds = {"stationary": None, "shifting": SHIFT}
    more = []
    for kind, every in kinds.items():
        table.add_column(kind, justify="right")
        worse = 0
        for seed in range(1, seeds + 1):
            found = {row.name: row for row in rows(zipf(seed, count, every), room, link)}
            worse += found["cheapest return (ours)"].bytes > found["least recently used"].bytes
            for name, row in found.items():
                sums.setdefault(f"{kind} {name}", []).append(row.above_optimum)
        more.append(f"{worse} of {seeds} {kind}")
    for name in found:
        table.add_row(name, *(f"{sum(sums[f'{kind} {name}']) / seeds:+.1%}" for kind in kinds))
    console.print(table)
    console.print(f"Ours moved more than least recently used in {' and '.join(more)}.")


def show_half_lives(seeds: int, count: int, room: int, console: Console) -> None:
    table = Table(title=f"half-lives, mean above the optimum over seeds 1 to {seeds}")
    table.add_column("requests")
    kinds = {"stationary": None, "shifting": SHIFT}
    sized = models()
    drawn = {
        kind: [zipf(seed, count, every) for seed in range(1, seeds + 1)] for kind, every in kinds.items()
    }
    best = {kind: [optimal_bytes(sized, one, room) for one in several] for kind, several in drawn.items()}
    for kind in kinds:
        table.add_column(kind, justify="right")
    for half_life in HALF_LIVES:
        cells = []
        for kind, several in drawn.items():
            above = [
                simulate(CheapestReturn(half_life), sized, one, room).bytes / least - 1
                for one, least in zip(several, best[kind], strict=True)
            ]
            cells.append(f"{sum(above) / seeds:+.2%}")
        table.add_row(str(half_life), *cells)
    console.print(table)


def show_sets(room: int, context: int, console: Console) -> None:
    """What fits together, in one process and in one each."""
    for processes in Processes:
        best = fitting_sets(
            list(models().values()), room + context, context_bytes=context, processes=processes
        )
        names = ", ".join(one.name for one in best[0])
        console.print(f"Processes: {processes.value}. Of {len(best)} largest sets the first: {names}.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--room", default="32GiB", help="for weights and requests, without the context")
    parser.add_argument("--seeds", type=int, default=5, help="further seeds; 0 for none")
    parser.add_argument(
        "--half-lives", action="store_true", help="compare half-lives of the estimate instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    console, room, link = Console(), parse_bytes(options.room), find_gpu("RTX 4090").host_link
    if options.half_lives:
        show_half_lives(max(1, options.seeds), options.requests, room, console)
        return 0
    all_fit = sum(one.weight_bytes for one in models().values()) + max(
        one.request_bytes for one in models().values()
    )
    console.print(
        f"{len(SIZES)} models, {format_bytes(all_fit)} with the largest request; room {options.room}."
    )
    show_sets(room, 490 * MIB, console)
    told = {}
    for title, every in (("Zipf, seed 0", None), (f"Zipf, seed 0, ranks drawn anew every {SHIFT:,}", SHIFT)):
        found = rows(zipf(0, options.requests, every), room, link)
        show(f"{options.requests:,} requests: {title}", found, console)
        told[title] = [asdict(row) for row in found]
    whole = simulate(CheapestReturn(), models(), zipf(0, options.requests), all_fit)
    console.print(
        f"Where all fit ({format_bytes(all_fit)}): {whole.evictions} evictions, {whole.loads} loads."
    )
    if options.seeds:
        show_seeds(options.seeds, options.requests, room, link, console)
    if options.json is not None:
        write_text(options.json, json.dumps(told, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
