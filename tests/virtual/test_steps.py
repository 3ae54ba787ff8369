"""What counts as a step, and when its memory is steady: the counter alone, beside small loops of real optimizers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from vramfit.capture.attribution import ModuleStack, PhaseTracker, ProgramPhase
from vramfit.capture.step_counter import StepCounter
from vramfit.launch.stopping import Stopping
from vramfit.options.limits import Limits
from vramfit.patching import PatchStack
from vramfit.trace import Category, EventKind, TraceBuilder
from vramfit.trace.outcome import End, Unit

Loop = Callable[["Watched"], None]


class Demand:
    """Steps ask for what the test says: the same again and again, unless told otherwise."""

    def __init__(self) -> None:
        self.asked: list[Hashable] = []
        self.peak = 0

    def take(self) -> tuple[Hashable, Hashable]:
        return (self.asked.pop(0) if self.asked else "the same"), self.peak


class Watched:
    """A counter that is told what a program does, as the virtual GPU and the recorders tell it."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        builder = TraceBuilder()
        self.demand = Demand()
        self.stopping = Stopping(folder, limits)
        self.modules = ModuleStack(builder)
        self.phases = PhaseTracker(builder, lambda index: None)
        self.counter = StepCounter(self.modules, self.phases, self.demand, self.stopping)
        self.done = 0

    def forward(self, module: nn.Module) -> None:
        self.modules.enter(module)
        try:
            self.phases.begin(ProgramPhase.FORWARD)
        finally:
            self.modules.leave()
        self.done += 1

    def train(self, module: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        self.forward(module)
        self.phases.begin(ProgramPhase.BACKWARD)
        for optimizer in optimizers:
            self.phases.begin(ProgramPhase.OPTIMIZER)
            optimizer.step()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[[Limits], Watched]]:
    with PatchStack() as patches:

        def make(limits: Limits) -> Watched:
            watched = Watched(tmp_path, limits)
            watched.phases.rounds.follow(patches)
            watched.counter.install(patches)
            return watched

        yield make
    assert torch.optim.Optimizer.__init__.__module__ == "torch.optim.optimizer", "the patch is gone"


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def one_optimizer(watched: Watched) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    while True:
        watched.train(model, optimizer)


def accumulated(watched: Watched) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    while True:
        for _ in range(3):
            watched.train(model)
        watched.train(model, optimizer)


def two_after_each_other(watched: Watched) -> None:
    critic, generator = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = optimizer_of(critic), optimizer_of(generator)
    while True:
        watched.train(critic, first)
        watched.train(generator, second)


def five_critics(watched: Watched) -> None:
    critic, generator = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = optimizer_of(critic), optimizer_of(generator)
    while True:
        for _ in range(5):
            watched.train(critic, first)
        watched.train(generator, second)


def one_of_two_is_never_used(watched: Watched) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    used, unused = optimizer_of(model), optimizer_of(other)
    while True:
        watched.train(model, used)
        assert unused is not None


def evaluated_first(watched: Watched) -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    for _ in range(20):
        watched.forward(model)
    while True:
        watched.train(model, optimizer)


def inference(watched: Watched) -> None:
    small, large = nn.Linear(2, 2), nn.Linear(20, 20)
    watched.forward(small)
    while True:
        watched.forward(large)
        watched.forward(small)


@pytest.mark.parametrize(
    ("loop", "unit", "passes"),
    [
        (one_optimizer, Unit.OPTIMIZER, 3),
        (accumulated, Unit.OPTIMIZER, 12),
        (two_after_each_other, Unit.OPTIMIZER, 6),
        (five_critics, Unit.OPTIMIZER, 18),
        (one_of_two_is_never_used, Unit.OPTIMIZER, 12),  # ten until the other is given up
        (evaluated_first, Unit.OPTIMIZER, 23),
        (inference, Unit.FORWARD, 7),
    ],
)
def test_what_a_step_is(watch: Callable[[Limits], Watched], loop: Loop, unit: Unit, passes: int) -> None:
    watched = watch(Limits(steps=3))
    with pytest.raises(SystemExit) as stopped:
        loop(watched)
    assert stopped.value.code == 0
    found = watched.stopping.progress
    assert (found.end, found.steps, found.unit) == (End.STEPS, 3, unit)
    assert watched.done == passes, "it ends where the next step begins"
    assert found.module == ("Linear" if unit is Unit.FORWARD else "")


def test_three_steps_alike_are_steady(watch: Callable[[Limits], Watched]) -> None:
    watched = watch(Limits(steady=True))
    watched.demand.asked = ["first", "second", "second", "third", "same", "same", "same", "never"]
    with pytest.raises(SystemExit):
        one_optimizer(watched)
    assert (watched.stopping.progress.steps, watched.stopping.progress.steady) == (7, 3)


def test_a_peak_that_rises_is_not_steady(watch: Callable[[Limits], Watched]) -> None:
    watched = watch(Limits(steady=True))
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    for _ in range(10):
        watched.demand.peak += 1
        watched.train(model, optimizer)
    assert (watched.stopping.progress.steps, watched.stopping.progress.steady) == (10, 1)
    with pytest.raises(SystemExit):
        one_optimizer(watched)
    assert watched.stopping.progress.steps == 12


def test_the_last_pass_of_a_program_counts(watch: Callable[[Limits], Watched]) -> None:
    watched = watch(Limits())
    model = nn.Linear(2, 2)
    for _ in range(4):
        watched.forward(model)
    watched.counter.close()
    assert (watched.stopping.progress.steps, watched.stopping.progress.unit) == (4, Unit.FORWARD)


def test_a_program_that_catches_the_end_is_told_again(watch: Callable[[Limits], Watched]) -> None:
    watched = watch(Limits(steps=1))
    caught = 0
    model = nn.Linear(2, 2)
    optimizer = optimizer_of(model)
    for _ in range(4):
        try:
            watched.train(model, optimizer)
        except BaseException:
            caught += 1
            watched.forward(model)  # where it is handled, it does no harm
    assert caught == 3


def test_the_order_of_requests_tells_steps_apart() -> None:
    def asked(*sizes: int, stream: int = 0) -> bytes:
        builder = TraceBuilder()
        builder.append(EventKind.ALLOC, device=0, size=999)
        for size in sizes:
            builder.append(EventKind.ALLOC, device=0, size=size, stream=stream, category=Category.OTHER)
            builder.append(EventKind.FREE_REQUESTED, device=0, size=size)
        return builder.requests(1)

    assert asked(512, 1024) == asked(512, 1024)
    assert len({asked(512, 1024), asked(1024, 512), asked(512), asked(512, 1024, stream=1)}) == 4
