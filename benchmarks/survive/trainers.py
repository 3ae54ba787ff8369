"""Trainings by the Trainer and by Lightning that run out of memory at one allocation: whether they end as without it.

    python benchmarks/survive/trainers.py [EVERY]

A small language model with dropout; every so-many-th allocation of a whole training fails (60 by default for the
Trainer, 18 for Lightning), the trainer's own included, which are not guarded. Parameters, losses and logged values are
compared bit for bit.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from tests.integrations import test_surviving_trainers as trainings
from tests.runtime.faults import Faults


def of_trainer(faults: Faults | None) -> Any:
    """Parameters and losses."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = trainings.with_trainer(Path(folder), faults)
    return trainer.model.state_dict(), trainings.by_trainer.losses(trainer)


def of_lightning(faults: Faults | None) -> Any:
    """Parameters, losses and what was logged."""
    module, _ = trainings.with_lightning(faults)
    return module.state_dict(), (module.seen, trainings.logged(module))


def tried(run: Callable[[Faults | None], Any], every: int) -> str:
    """How many of the trainings end the same."""
    plain, told = run(None)
    count = Faults()
    run(count)
    same, other, ended = 0, 0, []
    for at in range(0, count.seen, every):
        try:
            found, said = run(Faults(at))
        except torch.OutOfMemoryError:
            ended.append(at)
            continue
        equal = said == told and all(torch.equal(found[name], value) for name, value in plain.items())
        same, other = same + equal, other + (not equal)
    return f"{count.seen} allocations: {same} the same, {other} other, {len(ended)} ended with the error (at {ended})"


def main(every: int = 0) -> None:
    """Print both."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print("Trainer:", tried(of_trainer, every or 60), flush=True)
    print("Lightning:", tried(of_lightning, every or 18))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
