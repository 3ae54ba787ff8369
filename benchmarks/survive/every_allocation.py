"""Training steps that run out of memory at each of their allocations in turn: what three ways of retrying leave.

    python benchmarks/survive/every_allocation.py [--only PATTERN] [--json FILE]

Four small trainings on the CPU take three steps. In each run one allocation fails: of the forward and backward passes,
of the optimizer's first step, which makes its states, or of a later one. Afterwards parameters, buffers, states of the
optimizer, losses, rates, and what random generators would draw next are compared with a run in which none failed.

- `vramfit.survive`.
- accelerate's `find_executable_batch_size` around the step, as it is.
- Composer's automatic micro-batches: forward, backward and the optimizer's step inside of one retried block, the batch
  in twice as many pieces after each shortage, gradients set to zero (mosaicml/composer, composer/trainer/trainer.py,
  `_train_batch`), written anew here.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tests.runtime.faults import Faults
from tests.runtime.subjects import SUBJECTS, Outcome, Subject, train
from torch import nn

from vramfit.techniques.micro_batching import find_cut, spans_of
from vramfit.writing import write_text

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one way leaves of one training.

    Attributes:
        allocations: that failed, each in a run of its own.
        equal: runs that left what a run without a shortage leaves, bit for bit.
        different: that went on with something else, and said nothing.
        worst: of those, the largest difference of a tensor, as a part of its largest value; what random layers draw
            differs in all that do not set the generators back.
        ended: that ended with an error.
        errors: of those, by type.
    """

    training: str
    way: str
    allocations: int
    equal: int
    different: int
    worst: float
    ended: int
    errors: dict[str, int]


def retried(subject: Subject, faults: Faults | None, attempt: Callable[..., None]) -> Outcome:
    """Some steps with a way of retrying that is given the model, its optimizer and more, and a batch."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that augmentations draw from
    model, optimizer, more = subject.make()
    losses: list[float] = []
    for number in range(STEPS):
        batch = subject.batch(number)
        with faults or nullcontext():
            attempt(subject, model, optimizer, more, batch, losses)
    return Outcome.of(model, optimizer, more, losses)


def plain_step(
    subject: Subject,
    model: nn.Module,
    optimizer: Any,
    more: dict[str, Any],
    pieces: list[Any],
    losses: list[float],
) -> None:
    """A whole step over pieces of a batch, as loops write it."""
    scaler = more.get("scaler")
    sizes = [find_cut(piece).size for piece in pieces]
    total = 0.0
    for piece, size in zip(pieces, sizes, strict=True):
        loss = subject.loss(model, piece) * (size / sum(sizes))
        (loss if scaler is None else scaler.scale(loss)).backward()
        total += float(loss.detach())
    if scaler is not None:
        scaler.unscale_(optimizer)
    if "clip_norm" in more:
        nn.utils.clip_grad_norm_(model.parameters(), more["clip_norm"])
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if "scheduler" in more:
        more["scheduler"].step()
    optimizer.zero_grad()
    losses.append(total)


def cut(batch: Any, size: int) -> list[Any]:
    """A batch in pieces of a size."""
    found = find_cut(batch)
    return [found.piece(batch, *span) for span in spans_of(found.size, -(-found.size // size))]


def by_accelerate(
    subject: Subject, model: nn.Module, optimizer: Any, more: dict[str, Any], batch: Any, losses: list[float]
) -> None:
    """accelerate's own decorator around the step."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=find_cut(batch).size)
    def step(batch_size: int) -> None:
        plain_step(subject, model, optimizer, more, cut(batch, batch_size), losses)

    step()


def by_composer(
    subject: Subject, model: nn.Module, optimizer: Any, more: dict[str, Any], batch: Any, losses: list[float]
) -> None:
    """The optimizer's step inside of the retried block."""
    size = find_cut(batch).size
    while True:
        try:
            plain_step(subject, model, optimizer, more, cut(batch, size), losses)
        except RuntimeError as error:
            if "out of memory" not in str(error) or size == 1:
                raise
        else:
            return
        size = max(1, size // 2)
        optimizer.zero_grad()
        gc.collect()


WAYS: dict[str, Callable[[Subject, Faults | None], Outcome]] = {
    "vramfit.survive": lambda subject, faults: train(subject, STEPS, faults),
    "accelerate": lambda subject, faults: retried(subject, faults, by_accelerate),
    "Composer": lambda subject, faults: retried(subject, faults, by_composer),
}


def difference(found: torch.Tensor, plain: torch.Tensor) -> float:
    """The largest one, as a part of the largest value."""
    if not plain.is_floating_point() or found.shape != plain.shape or not plain.numel():
        return 0.0
    return float((found - plain).abs().max() / plain.abs().max().clamp(min=1e-30))


def row_of(subject: Subject, way: str) -> Row:
    """Fail at each allocation in turn."""
    run = WAYS[way]
    none = Faults()
    plain = run(subject, none)
    equal = different = 0
    worst = 0.0
    errors: dict[str, int] = {}
    for at in track(range(none.seen), f"{subject.name}, {way}", console=Console(stderr=True), transient=True):
        try:
            found = run(subject, Faults(at))
        except Exception as error:  # whatever a way of retrying runs into
            name = type(error).__name__
            errors[name] = errors.get(name, 0) + 1
            continue
        if found.equals(plain):
            equal += 1
        else:
            different += 1
            worst = max(worst, *map(difference, found.tensors, plain.tensors))
    return Row(
        training=subject.name,
        way=way,
        allocations=none.seen,
        equal=equal,
        different=different,
        worst=worst,
        ended=sum(errors.values()),
        errors=errors,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="trainings whose name holds this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    gc.freeze()
    table = Table(title="one allocation fails, each in turn")
    for name in ("training", "way", "allocations", "equal", "different", "by up to", "ended with an error"):
        table.add_column(name, justify="left" if name in ("training", "way") else "right")
    rows = []
    for subject in SUBJECTS:
        if given.only in subject.name:
            for way in WAYS:
                row = row_of(subject, way)
                rows.append(row)
                ended = ", ".join(f"{count} {name}" for name, count in row.errors.items())
                table.add_row(
                    row.training,
                    way,
                    str(row.allocations),
                    str(row.equal),
                    str(row.different),
                    f"{row.worst:.0%}" if row.different else "",
                    ended or "0",
                )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if given.json:
        write_text(given.json, json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.equal == row.allocations for row in rows if row.way == "vramfit.survive") else 3


if __name__ == "__main__":
    sys.exit(main())
