"""Programs for `leak_table.py`: innocent ones, and ones into which a leak was planted, each an endless training."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor, nn

WIDTH = 512
ROWS = 1024
"""Rows of a batch: an output takes 2 MiB."""
EPOCH = 3
"""Steps of an epoch."""
PASSES = 10
"""Forward passes of an evaluation."""

Program = Callable[[], object]


class Plant(Enum):
    """When a program leaks."""

    INNOCENT = "innocent"
    STEP = "by step"
    EPOCH = "by epoch"
    EVALUATION = "in evaluation"
    HOST = "on the host"


@dataclass(frozen=True, kw_only=True)
class LeakProgram:
    """A program of the table.

    Attributes:
        run: trains until it is ended.
        lines: of its source.
    """

    name: str
    plant: Plant
    run: Program
    file: str
    lines: range


PROGRAMS: list[LeakProgram] = []


def planted(plant: Plant) -> Callable[[Program], Program]:
    """Put a program into the table."""

    def add(run: Program) -> Program:
        source, first = inspect.getsourcelines(run)
        file = inspect.getsourcefile(run) or ""
        name = run.__name__.replace("_", " ")
        PROGRAMS.append(
            LeakProgram(name=name, plant=plant, run=run, file=file, lines=range(first, first + len(source)))
        )
        return run

    return add


def net(*, layers: int = 2, width: int = WIDTH) -> nn.Sequential:
    """Linear layers with ReLU between them, on the card."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1]).cuda()


def batch(rows: int = ROWS, width: int = WIDTH) -> Tensor:
    """Inputs on the card."""
    return torch.randn(rows, width, device="cuda")


@dataclass
class Training:
    """A model with its optimizer, trained step by step."""

    model: nn.Module = field(default_factory=net)
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __post_init__(self) -> None:
        """Make the optimizer."""
        self.optimizer = self.make(self.model.parameters(), lr=1e-3)

    def loss(self, rows: int = ROWS) -> Tensor:
        """Of a batch."""
        loss: Tensor = self.model(batch(rows)).square().mean()
        return loss

    def step(self, rows: int = ROWS, *, retain: bool = False) -> Tensor:
        """Train a step; the loss."""
        loss = self.loss(rows)
        self.optimizer.zero_grad()
        loss.backward(retain_graph=retain)
        self.optimizer.step()
        return loss

    def steps(self) -> Iterator[int]:
        """Train without an end; gives the number of each step, from 1, when it is over."""
        for number in itertools.count(1):
            self.step()
            yield number
