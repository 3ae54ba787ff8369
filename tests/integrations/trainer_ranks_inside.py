"""One rank of trainings by the Trainer: ``python -m tests.integrations.trainer_ranks_inside FOLDER``.

Trains without a shortage and without the callback, then with it, and with allocations that fail on one rank. Prints
the shortages of all ranks, and ``equal`` if all parameters, losses and norms are the same, bit for bit, on all ranks.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.integrations.test_transformers_plan import language_model, losses, trainer_for
from tests.runtime.faults import Faults
from torch import nn
from transformers import Trainer, TrainerCallback

from vramfit.integrations.surviving_trainer import TrainerSurvivalCallback

UPDATES: dict[str, Any] = {
    "optim": "adamw_torch",
    "gradient_accumulation_steps": 2,
    "max_steps": 2,
    "per_device_train_batch_size": 3,
}


class Counting(nn.Module):
    """A language model with a buffer that each forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = language_model(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(2, dtype=torch.bool))

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        self.odd.logical_not_()
        return self.inner(input_ids=input_ids, labels=labels, **kwargs)


class FaultsInStep(TrainerCallback):
    """Faults in the optimizer's step."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Begin."""
        self.faults.__enter__()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """End."""
        self.faults.__exit__(None, None, None)


class FaultsInPass(Trainer):
    """Faults in the forward and backward pass; what loads and gathers beside them is not guarded."""

    faults: Faults

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One batch."""
        with self.faults:
            return super().training_step(*args, **kwargs)


def trained(folder: Path, at: tuple[int, ...] | None) -> tuple[dict[str, torch.Tensor], list[float], Faults]:
    """Parameters and buffers, what was logged, and the faults of this rank."""
    trainer = trainer_for(Counting(), folder, kind=FaultsInPass, **UPDATES)
    trainer.faults = Faults(*(at or ()))
    if at is not None:
        trainer.add_callback(TrainerSurvivalCallback(trainer, vote_seconds=60))
        trainer.add_callback(FaultsInStep(trainer.faults))
    trainer.train()
    return trainer.model.state_dict(), losses(trainer), trainer.faults


def main() -> None:
    """Print what is compared."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    plain, told, _ = trained(folder, None)
    rank, equal, raised = dist.get_rank(), True, 0
    # Forward of the first batch, backward of the second, and what comes in the second update; on one rank each.
    for at in ((), (5,), (260,), (700,)):
        found, said, faults = trained(folder, at if len(at) == 0 or at[0] % 2 == rank else ())
        same = said == told and all(torch.equal(found[name], value) for name, value in plain.items())
        print(at, faults.seen, same, file=sys.stderr)
        equal &= same
        raised += faults.raised
    mine = torch.tensor([int(equal), -raised])
    dist.all_reduce(mine[:1], dist.ReduceOp.MIN)
    dist.all_reduce(mine[1:])
    if rank == 0:
        print(-int(mine[1]), "equal" if mine[0] else "different")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
