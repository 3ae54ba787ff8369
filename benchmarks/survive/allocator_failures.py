"""Trainings in which an allocation of torch's own allocator fails, one after the other: what `vramfit.survive` leaves.

    python benchmarks/survive/allocator_failures.py [--only PATTERN] [--most 80] [--in-a-row 1] [--json FILE]

More than thirty trainings of different kinds and with different optimizers (in tests/runtime) take four steps on the
CPU. In each run one allocation fails, wherever it is made: in a kernel, in the backward pass, in the optimizer
(`failing_allocator`). Each run is a process of its own, forked from one that is warm. Afterwards all that a training
holds is compared bit for bit with a plain loop in which nothing failed: ``equal``, ``ended`` by an error that says so,
``refused`` when `survive` was entered, or ``different``, which must not be.

Packages of optimizers that are not installed are left out, which is said: schedulefree, prodigyopt, lion-pytorch,
pytorch-optimizer.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.survive.failing_allocator import FailingAllocator, run_with_it

_EQUAL, _DIFFERENT, _ENDED, _REFUSED, _BROKEN = range(5)
_WORDS = ("equal", "different", "ended", "refused", "broken")


@dataclass(kw_only=True)
class Row:
    """What came of one training.

    Attributes:
        allocations: that a run without a failure makes inside of its steps.
        tried: of them, those that failed, each in a run of its own.
        outcomes: how the runs ended: equal, different, ended, refused; broken is an error that says nothing of memory.
        different: numbers of allocations after which something else was left.
        broken: numbers of allocations after which another error came.
    """

    training: str
    allocations: int = 0
    tried: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    different: list[int] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    seconds: float = 0.0


def _one(training: Any, allocator: FailingAllocator, plain: Any, verbose: bool) -> int:
    """How a run with a failure ends."""
    from tests.runtime.trainings import run, same

    from vramfit.errors import UsageError
    from vramfit.runtime.oom_forms import recognised

    try:
        left = run(training, allocator)
    except UsageError:
        return _REFUSED
    except BaseException as error:
        clear = recognised(error) is not None
        if verbose or not clear:
            traceback.print_exc()
        return _ENDED if clear else _BROKEN
    where = same(left, plain)
    if where and verbose:
        print(f"{training.name}: {where}", file=sys.stderr)
    return _DIFFERENT if where else _EQUAL


def _forked(
    training: Any, allocator: FailingAllocator, plain: Any, at: int, in_a_row: int, verbose: bool
) -> int:
    """The same in a process of its own."""
    child = os.fork()
    if not child:
        ended = _BROKEN
        try:
            allocator.set(at, in_a_row)
            ended = _one(training, allocator, plain, verbose)
        finally:
            sys.stderr.flush()
            os._exit(ended)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else _BROKEN


def row_of(
    training: Any, allocator: FailingAllocator, most: int, in_a_row: int, *, at: int | None, verbose: bool
) -> Row:
    """Let allocations of one training fail, each in turn, or as many of them as asked for."""
    from tests.runtime.trainings import run, same

    from vramfit.errors import UsageError

    began, row = time.perf_counter(), Row(training=training.name)
    allocator.set(None)
    try:
        plain = run(training, allocator, survives=False)
        allocator.set(None)
        again = run(training, allocator)
    except UsageError as error:
        if verbose:
            print(f"{training.name}: {error}", file=sys.stderr)
        row.outcomes = {"refused": 1}
        return row
    row.allocations = allocator.seen
    where = same(again, plain)
    if where:
        print(f"{training.name}: without any failure, {where}", file=sys.stderr)
        row.outcomes = {"different": 1}
        return row
    step = max(1, row.allocations // most)
    numbers = range(0, row.allocations, step) if at is None else [at]
    counts: Counter[str] = Counter()
    for number in numbers:
        ended = _forked(training, allocator, plain, number, in_a_row, verbose)
        counts[_WORDS[min(ended, _BROKEN)]] += 1
        if ended == _DIFFERENT:
            row.different.append(number)
        elif ended >= _BROKEN:
            row.broken.append(number)
    row.tried, row.outcomes = len(numbers), dict(counts)
    row.seconds = time.perf_counter() - began
    return row


def _warm(training: Any, allocator: FailingAllocator) -> None:
    """Run once with failures that lead up the ladder, so that processes forked later have imported what that takes."""
    from tests.runtime.trainings import run

    with contextlib.suppress(RuntimeError):
        run(training, allocator)


def main() -> int:
    """Run them, and show a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="trainings whose name this regular expression is found in")
    parser.add_argument("--most", type=int, default=80, help="allocations that fail in each training")
    parser.add_argument("--in-a-row", type=int, default=1, help="allocations that fail one after the other")
    parser.add_argument("--at", type=int, help="this allocation alone, with what is different about it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    run_with_it()
    warnings.filterwarnings("ignore")
    import torch
    from rich.console import Console
    from rich.table import Table
    from tests.runtime.trainings import TRAININGS
    from tests.runtime.trainings_of_optimizers import of_optimizers

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    allocator = FailingAllocator()
    others, missing = of_optimizers()
    table = Table(title="one allocation of torch's own allocator fails, each in turn")
    for name in ("training", "allocations", "failed", *_WORDS):
        table.add_column(name, justify="left" if name == "training" else "right")
    allocator.set(20, 4)
    _warm(TRAININGS[0], allocator)
    gc.collect()
    gc.freeze()
    rows = []
    for training in (*TRAININGS, *others):
        if re.search(given.only, training.name):
            verbose = given.at is not None
            row = row_of(training, allocator, given.most, given.in_a_row, at=given.at, verbose=verbose)
            rows.append(row)
            found = [row.outcomes.get(name, 0) for name in _WORDS]
            table.add_row(row.training, str(row.allocations), str(row.tried), *map(str, found))
            print(
                row.training, row.outcomes, *row.different[:5], *row.broken[:5], file=sys.stderr, flush=True
            )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for name in missing:
        print(f"{name} is not installed: its optimizers were left out")
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row.outcomes)
    print(f"{len(rows)} trainings, {sum(row.tried for row in rows)} runs: {dict(total)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 3 if total["different"] or total["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
