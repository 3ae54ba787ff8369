"""Trainings by the Trainer, Lightning and Accelerate in which an allocation fails: whether they end as without it.

    python benchmarks/survive/trainers.py [--only Trainer] [--most 400] [--json FILE]

A small language model with dropout. The allocations of a whole training (`failing_allocator`) are told apart by the
place in the trainer's and in torch's Python code that they come from, and the first of each place fails, in a process
of its own; the trainer's own allocations are among them, outside of what is guarded. Parameters, losses and logged
values are compared bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.survive.failing_allocator import FailingAllocator, run_with_it

_LIBRARIES = (
    "transformers",
    "lightning",
    "accelerate",
    "torch/optim",
    "torch/nn/utils",
    "torch/utils/data",
    "vramfit",
)


def of_trainer(allocator: FailingAllocator) -> Any:
    """Parameters and losses after two updates of two batches each."""
    from tests.integrations import test_surviving_trainers as trainings

    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = trainings.with_trainer(Path(folder), allocator.counting())
    return trainer.model.state_dict(), trainings.by_trainer.losses(trainer)


def of_lightning(allocator: FailingAllocator) -> Any:
    """Parameters, losses and what was logged after an epoch of three batches."""
    from tests.integrations import test_surviving_trainers as trainings

    module, _ = trainings.with_lightning(allocator.counting())
    return module.state_dict(), (module.seen, trainings.logged(module))


def of_accelerate(allocator: FailingAllocator) -> Any:
    """Parameters and losses of a loop of one's own, with all that Accelerate prepares."""
    import torch
    from accelerate import Accelerator
    from tests.integrations import test_surviving_trainers as trainings
    from torch.utils.data import DataLoader, TensorDataset

    import vramfit

    model = trainings.by_trainer.language_model(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ids = torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(0))
    losses = []
    with allocator.counting():
        accelerator = Accelerator(cpu=True)
        loader = DataLoader(TensorDataset(ids), batch_size=2, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        with vramfit.survive(
            model,
            optimizer,
            loss=lambda net, batch: net(input_ids=batch[0], labels=batch[0]).loss,
            scheduler=schedule,
            clip_norm=1.0,
        ) as survivor:
            losses += [survivor.step(batch) for batch in loader]
    return accelerator.unwrap_model(model).state_dict(), [float(one) for one in losses]


TRAINERS: dict[str, Callable[[FailingAllocator], Any]] = {
    "Trainer": of_trainer,
    "Lightning": of_lightning,
    "Accelerate": of_accelerate,
}


def places_of(run: Callable[[FailingAllocator], Any], allocator: FailingAllocator) -> list[int]:
    """The first allocation of each place in Python code that allocates."""
    seen: dict[Any, int] = {}
    number = 0

    def note() -> None:
        nonlocal number
        frame, lines = sys._getframe(1), []
        while frame is not None:
            name = frame.f_code.co_filename
            if not lines or any(one in name for one in _LIBRARIES):
                lines.append((name, frame.f_lineno))
            frame = frame.f_back
        seen.setdefault(tuple(lines[:8]), number)
        number += 1

    allocator.set(None)
    with allocator.telling(note):
        run(allocator)
    return sorted(seen.values())


def _ended(run: Callable[[FailingAllocator], Any], allocator: FailingAllocator, plain: Any, at: int) -> int:
    """How a training in a process of its own ends: 0 the same, 1 other, 2 with the error, 3 with another one."""
    import torch

    from vramfit.runtime.oom_forms import chain_of

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended = 3
    try:
        allocator.set(at)
        values, told = run(allocator)
        same = told == plain[1] and all(torch.equal(values[name], value) for name, value in plain[0].items())
        ended = 0 if same else 1
    except BaseException as error:
        ended = 2 if any("DefaultCPUAllocator" in str(one) for one in chain_of(error)) else 3
        if ended == 3:
            traceback.print_exc()
        else:
            where = [
                f"{Path(one.filename).name}:{one.lineno}" for one in traceback.extract_tb(error.__traceback__)
            ]
            print(f"  allocation {at} ended at {' '.join(where[-3:])}", file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(ended)


def tried(name: str, allocator: FailingAllocator, most: int) -> dict[str, Any]:
    """How many of the trainings end the same."""
    run = TRAINERS[name]
    allocator.set(30, 4)
    with contextlib.suppress(RuntimeError):
        run(allocator)  # with imports of what a shortage leads to
    allocator.set(None)
    plain = run(allocator)
    total = allocator.seen
    places = places_of(run, allocator)
    chosen = places[:: max(1, -(-len(places) // most))]
    gc.collect()
    gc.freeze()
    counts: Counter[str] = Counter()
    others = []
    for at in chosen:
        ended = _ended(run, allocator, plain, at)
        counts[("same", "other", "ended", "broken")[min(ended, 3)]] += 1
        if ended not in (0, 2):
            others.append(at)
    return {
        "trainer": name,
        "allocations": total,
        "places": len(places),
        "tried": len(chosen),
        **counts,
        "at": others,
    }


def main() -> int:
    """Print each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", choices=["", *TRAINERS])
    parser.add_argument("--most", type=int, default=400, help="places that are tried of each trainer")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    run_with_it()
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    allocator = FailingAllocator()
    rows = []
    for name in TRAINERS:
        if given.only in ("", name):
            rows.append(tried(name, allocator, given.most))
            print(rows[-1], flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return 3 if any(row.get("other") or row.get("broken") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
