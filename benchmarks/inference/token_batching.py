"""Batches of 100,000 texts on one virtual card: ours, crossfit's regression, and a plain budget of tokens.

    python benchmarks/inference/token_batching.py [--texts N] [--gpu NAME] [--attention eager|sdpa] [--json FILE]

Lengths are log-normal (seed 0, median 200, longest 8,192); the encoder has the shapes of BERT-base. Peaks of shapes are
measured on the virtual card and kept in a file. Each way then runs all of its batches there, one after another in one
process (where they are thousands, each shape once): a batch that runs out of memory counts as such, is halved and comes
again. Times are simulated, for the card that is named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from token_peers import (
    GIB,
    PeerBatch,
    budget_batches,
    crossfit_batches,
    crossfit_estimate,
    crossfit_shapes,
)
from virtual_encoder import Encoder, Ran, ShapeFile, on_card

import vramfit
from vramfit.gpus import find_gpu
from vramfit.inference.token_batches import TokenBatch, TokenBatches
from vramfit.writing import write_text

MEDIAN, LONGEST, SPREAD = 200, 8192, 1.0
BUDGET = 0.98
"""Part of the card beside the context that our batches may take: the margin of a plan."""

MANY = 1000
"""Batches of which each shape is run once, where they are more."""

CACHE = Path("build") / "token_batching.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """What came of one way to make batches.

    Attributes:
        ooms: batches that ran out of memory.
        padding: part of the computed tokens, of batches that ran.
        in_order: whether every text had its result in its place.
        shapes: measured before.
    """

    name: str
    batches: int
    padding: float
    ooms: int
    seconds: float
    shapes: int
    in_order: bool


def drawn_lengths(texts: int) -> list[int]:
    """Log-normal lengths, seed 0, with one of the longest."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SPREAD, texts)
    lengths = np.clip(drawn.round().astype(int), 1, LONGEST)
    lengths[int(lengths.argmax())] = LONGEST
    return [int(length) for length in lengths]


def our_shapes() -> list[tuple[int, int]]:
    """Powers of two and what lies between, from one item of 16 tokens to the longest."""
    lengths = [2**power for power in range(4, 14)] + [96, 192, 384, 768, 1536, 3072, 6144]
    return [(2**power, length) for power in range(13) for length in lengths]


class Runner:
    """Runs batches and keeps the account."""

    def __init__(self, run: Callable[[int, int], Ran], lengths: list[int]) -> None:
        self._run, self._lengths = run, lengths
        self._results = vramfit.batches([1], peak=lambda _items, _length: 1, budget=1).ordered()
        self.seconds, self.ooms, self.batches, self.computed = 0.0, 0, 0, 0

    def run(self, numbers: list[int], length: int) -> Ran:
        """One batch; its texts are done where it fits."""
        ran = self._run(len(numbers), length)
        self.seconds += ran.seconds
        if not ran.fits:
            self.ooms += 1
            return ran
        self.batches += 1
        self.computed += len(numbers) * length
        self._results.add(numbers, [self._lengths[number] for number in numbers])
        return ran

    def way(self, name: str, shapes: int) -> Way:
        """The account."""
        return Way(
            name=name,
            batches=self.batches,
            padding=1 - sum(self._lengths) / self.computed,
            ooms=self.ooms,
            seconds=self.seconds,
            shapes=shapes,
            in_order=list(self._results.ready()) == self._lengths,
        )


def run_ours(runner: Runner, plan: TokenBatches[int]) -> None:
    """Our batches, corrected by what they take."""

    def call(batch: TokenBatch) -> list[int]:
        if not runner.run(list(batch), batch.length).fits:
            raise torch.OutOfMemoryError("the batch does not fit")
        return list(batch)

    plan.run(call)


def run_peers(runner: Runner, lengths: list[int], batches: list[PeerBatch]) -> None:
    """Another way's batches, halved where they run out of memory."""
    waiting = batches[::-1]
    while waiting:
        batch = waiting.pop()
        if not runner.run(batch.numbers, batch.length).fits:
            if len(batch.numbers) == 1:
                raise SystemExit(f"a text of {batch.length} tokens does not fit the card")
            waiting += batch.halves(lengths)[::-1]


def reserved(ran: dict[tuple[int, int], Ran]) -> dict[tuple[int, int], int]:
    """What the allocator held for shapes."""
    return {shape: one.reserved_bytes for shape, one in ran.items()}


def allocated(ran: dict[tuple[int, int], Ran]) -> dict[tuple[int, int], int]:
    """What tensors took at their highest, which is what crossfit measures."""
    return {shape: one.allocated_bytes for shape, one in ran.items()}


def budgets_of_tokens(peaks: dict[tuple[int, int], int], lengths: list[int]) -> Iterator[tuple[str, int]]:
    """Budgets as they are set by hand: what fits of texts of the usual length, and what fits of the longest."""
    usual = min((length for _, length in peaks), key=lambda one: abs(one - statistics.median(lengths)))
    yield "tokens, as fit at the median", max(items * length for items, length in peaks if length == usual)
    yield (
        "tokens, as fit at the longest",
        max(items * length for items, length in peaks if length == max(lengths)),
    )


def compare(gpu: str, encoder: Encoder, texts: int, cache: Path) -> Iterator[Way]:
    """All ways, one after another."""
    lengths = drawn_lengths(texts)
    spec = find_gpu(gpu)
    file = ShapeFile(gpu, encoder, cache)
    ours = reserved(file.measure_all(our_shapes()))
    with on_card(gpu, encoder) as card:
        budget = int(BUDGET * card.free_bytes)
    plan = vramfit.batches(lengths, peak=ours, budget=budget)

    with file.measuring() as measure:
        shapes = len(ours) + plan.confirm(lambda *shape: measure(*shape).reserved_bytes or None)
    with on_card(gpu, encoder) as card:
        runner = Runner(card.run, lengths)
        run_ours(runner, plan)
        yield runner.way("vramfit.batches", shapes)
    grid = allocated(file.measure_all(crossfit_shapes(LONGEST)))
    whole = int(spec.total_bytes / GIB)  # it reads whole gigabytes: "8GB"
    with on_card(gpu, encoder) as card:
        runner = Runner(card.run, lengths)
        run_peers(runner, lengths, crossfit_batches(lengths, crossfit_estimate(grid), whole / 2.5))
        yield runner.way("crossfit's regression", len(grid))
    for name, tokens in budgets_of_tokens(ours, lengths):
        batches = budget_batches(lengths, tokens)
        with contextlib.ExitStack() as stack:
            # Thousands of small batches that fit by far: each shape is run once.
            small = len(batches) > MANY
            run = (
                stack.enter_context(file.measuring())
                if small
                else stack.enter_context(on_card(gpu, encoder)).run
            )
            runner = Runner(run, lengths)
            run_peers(runner, lengths, batches)
        yield runner.way(f"{tokens:,} {name}", 0)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--gpu", default="RTX 4060")
    parser.add_argument("--attention", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    encoder = Encoder(attention=given.attention, layers=given.layers)
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title=f"{given.texts:,} texts, BERT-base in float16, {given.attention}, {given.gpu}")
    for name in ("way", "batches", "padding", "out of memory", "seconds (simulated)", "measured", "in order"):
        table.add_column(name, justify="left" if name == "way" else "right")
    ways = []
    for way in compare(given.gpu, encoder, given.texts, given.cache):
        ways.append(way)
        console.print(f"{way.name}: {way.batches} batches, {way.ooms} out of memory", style="dim")
        table.add_row(
            way.name,
            f"{way.batches:,}",
            f"{100 * way.padding:.1f} %",
            f"{way.ooms:,}",
            f"{way.seconds:,.1f}",
            f"{way.shapes:,}",
            "yes" if way.in_order else "no",
        )
    console.print(table)
    if given.json:
        write_text(given.json, json.dumps([asdict(way) for way in ways], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
