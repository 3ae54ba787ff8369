"""Four small trainings that differ in what a step changes, for tests and the benchmark of survival."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import vramfit
from vramfit.runtime.survival.survivor import Survivor


@dataclass(frozen=True)
class Subject:
    """A training.

    Attributes:
        make: a model with its optimizer, and what else `vramfit.survive` is given.
        loss: of the model and a batch.
        batch: of a number.
    """

    name: str
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    batch: Callable[[int], Any]


def _normed() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 5)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), {"clip_norm": 1.0}


def _recurrent() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.LSTM(4, 6, num_layers=2, dropout=0.3, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return model, optimizer, {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


class _Tied(nn.Module):
    """A language model whose output layer is its embedding, and which draws from NumPy and Python too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())  # noqa: NPY002  # the global generator, as augmentations draw
        return self.out(self.layer(x))  # type: ignore[no-any-return]


def _tied() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = _Tied()
    named = dict(model.named_parameters())
    groups = [{"params": [named.pop("embed.weight")], "lr": 0.01}, {"params": list(named.values())}]
    return model, torch.optim.NAdam(groups, lr=0.02, weight_decay=0.1), {}


def _scaled() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    # The second step finds gradients that are no numbers, and is left out.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=2)
    return model, optimizer, {"scaler": scaler, "clip_norm": 1.0}


def _draws(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


SUBJECTS = (
    Subject(
        "batch norm, dropout, AdamW",
        _normed,
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda number: (
            torch.randn(6, 3, 6, 6, generator=_draws(number)),
            torch.randint(0, 5, (6,), generator=_draws(number)),
        ),
    ),
    Subject(
        "LSTM, SGD with momentum, schedule",
        _recurrent,
        lambda model, batch: model(batch)[0].square().mean(),
        lambda number: torch.randn(3, 5, 4, generator=_draws(number)),
    ),
    Subject(
        "transformer, tied weights, groups, NAdam",
        _tied,
        lambda model, batch: F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten()),
        lambda number: {
            "ids": torch.randint(0, 11, (2, 7), generator=_draws(number)),
            "labels": torch.randint(0, 11, (2, 7), generator=_draws(number + 50)),
        },
    ),
    Subject(
        "mixed precision's scaler, Adagrad",
        _scaled,
        lambda model, batch: model(batch).square().mean() * (1e38 if float(batch[0, 0]) > 9 else 1e-20),
        lambda number: torch.randn(4, 6, generator=_draws(number)) + (10 if number == 1 else 0),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """All that a training leaves.

    Attributes:
        tensors: parameters, buffers and states of the optimizer.
        rest: losses, what draws come next, rates and scale.
    """

    tensors: tuple[torch.Tensor, ...]
    rest: tuple[Any, ...]
    survivor: Survivor | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        more: dict[str, Any],
        losses: list[float],
        survivor: Survivor | None = None,
    ) -> Outcome:
        """What is there now; draws from all generators."""
        states = optimizer.state_dict()
        values = [value for known in states["state"].values() for value in known.values()]
        tensors = [*model.state_dict().values(), *(one for one in values if isinstance(one, torch.Tensor))]
        rest = [
            losses,
            [one for one in values if not isinstance(one, torch.Tensor)],
            [group["lr"] for group in states["param_groups"]],
            more["scaler"].state_dict() if "scaler" in more else None,
            float(torch.rand(())),
            random.random(),
            float(np.random.rand()),  # noqa: NPY002
        ]
        copies = tuple(tensor.detach().clone() for tensor in tensors)
        return cls(tensors=copies, rest=tuple(rest), survivor=survivor)

    def equals(self, other: Outcome) -> bool:
        """Whether both left the same, bit for bit."""
        same = len(self.tensors) == len(other.tensors) and self.rest == other.rest
        return same and all(map(torch.equal, self.tensors, other.tensors))


def train(
    subject: Subject, steps: int, faults: AbstractContextManager[Any] | None = None, **options: Any
) -> Outcome:
    """Some steps from the same start, each inside of `faults`."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model, optimizer, more = subject.make()
    with vramfit.survive(model, optimizer, loss=subject.loss, **more, **options) as survivor:
        losses = []
        for number in range(steps):
            batch = subject.batch(number)
            with faults or nullcontext():
                losses.append(survivor.step(batch))
    return Outcome.of(model, optimizer, more, [float(loss) for loss in losses], survivor)
