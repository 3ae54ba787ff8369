"""``vramfit watch``'s time to running out of memory on leaking programs that its estimator was not made with.

    python benchmarks/survive/held_out_leaks.py [NAME ...]

Each program runs on a virtual card until memory runs out, by a clock of its own: each part of a step takes a time that
is drawn, so that nothing depends on what else this machine does. A look is taken every second of that clock, wherever
in a step it falls, by the readings and the outlooks that ``vramfit watch`` has. Errors are shares of the time that was
left when it was told, at looks from a quarter to nine tenths of the way; a look that falls less than two steps before
the end counts as two steps. Programs and seeds are fixed, so that the table is the same each time.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

import vramfit
from vramfit.capture.meter_figures import MeterFigures
from vramfit.watching import torch_figures
from vramfit.watching.outlooks import OutlookKeeper
from vramfit.watching.process_reporter import OwnReadings
from vramfit.watching.watch_reading import WatchReading

MIB = 1 << 20
AT = (0.25, 0.5, 0.75, 0.9)


@dataclass
class Watched:
    """A clock, and the looks of a watch at it.

    Attributes:
        told: time, and the seconds to the end that were told then, or None.
        steps: when each step of the program began.
    """

    readings: OwnReadings
    draw: random.Random
    keeper: OutlookKeeper = field(default_factory=OutlookKeeper)
    now: float = 0.0
    due: float = 1.0
    told: list[tuple[float, float | None]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def passes(self, seconds: float, spread: float = 0.1) -> None:
        """Time passes; looks that are due are taken with the memory as it is."""
        self.now += seconds * self.draw.lognormvariate(0, spread)
        while self.due <= self.now:
            reading = self.readings.now()
            if reading is not None:
                seen = replace(reading, time=self.due)
                whole = WatchReading(time=self.due, elapsed=self.due, pid=seen.pid, programs=(seen,))
                (outlook,) = self.keeper.look(whole)
                self.told.append((self.due, outlook.seconds))
            self.due += 1.0

    def inside(self, model: nn.Module, seconds: float, spread: float = 0.1) -> None:
        """Let time pass in each of a model's innermost modules, forward and backward."""
        parts = [one for one in model.modules() if not list(one.children())]
        share = seconds / (2 * len(parts))
        for part in parts:
            part.register_forward_hook(lambda *_: self.passes(share, spread))
            part.register_full_backward_hook(lambda *_: self.passes(share, spread))


Program = Callable[[Watched], Iterator[None]]


def trained(
    watched: Watched,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[torch.Tensor],
    leak: Callable[[int, torch.Tensor, torch.Tensor], None],
    *,
    seconds: float = 0.7,
    spread: float = 0.1,
    every: int = 1,
) -> Iterator[None]:
    """Steps of a training without an end.

    Args:
        leak: of the number of a batch, the batch and its loss.
        every: batches of an update.
    """
    watched.inside(model, seconds, spread)
    for number, batch in enumerate(batches):
        loss = model(batch)
        loss = (loss[0] if isinstance(loss, tuple) else loss).float().square().mean()
        loss.backward()
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        leak(number, batch, loss)
        del loss, batch
        watched.passes(seconds / 5, spread)
        yield


def _held(mib: Callable[[int], float]) -> Callable[..., None]:
    """Keep a tensor of so many MiB of each batch."""
    kept: list[torch.Tensor] = []

    def leak(number: int, *_: torch.Tensor) -> None:
        if (size := mib(number)) > 0:
            kept.append(torch.empty(int(size * MIB), dtype=torch.uint8, device="cuda"))

    return leak


def _images(count: int = 16) -> Iterator[torch.Tensor]:
    while True:
        yield torch.empty(count, 3, 128, 128, device="cuda")


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 32, 64, 128, 256)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 64, 100)).cuda()


def convolutions(watched: Watched) -> Iterator[None]:
    """A convolutional network with SGD; 30 MiB of each step stay."""
    model = _convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained(watched, model, optimizer, _images(), _held(lambda _: 30))


def kept_losses(watched: Watched) -> Iterator[None]:
    """An LSTM with Adam whose losses are kept with what their graphs still hold: the weights' own states."""
    model = nn.LSTM(256, 512, num_layers=2, batch_first=True).cuda()
    kept: list[Any] = []
    batches = (torch.empty(8, 128, 256, device="cuda") for _ in itertools.count())
    optimizer = torch.optim.Adam(model.parameters())

    def leak(_number: int, batch: torch.Tensor, loss: torch.Tensor) -> None:
        kept.append((loss, model(batch[:2])[0].sum()))  # an evaluation with its graph

    return trained(watched, model, optimizer, batches, leak)


def hooked(watched: Watched) -> Iterator[None]:
    """A transformer with AdamW; a forward hook keeps the outputs of a layer in every third step."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    kept, calls = [], itertools.count()

    def hook(_module: nn.Module, _given: Any, output: torch.Tensor) -> None:
        if next(calls) % 3 == 0:
            kept.append(output.detach().clone())

    model.layers[2].register_forward_hook(hook)
    batches = (torch.empty(64, 512, 256, device="cuda") for _ in itertools.count())
    return trained(
        watched, model, torch.optim.AdamW(model.parameters()), batches, lambda *_: None, seconds=1.1
    )


def noisy(watched: Watched) -> Iterator[None]:
    """Leaks of 0 to 80 MiB, steps whose times vary by 40 %."""
    model = _convolutions()
    leak = _held(lambda _: 80 * watched.draw.random())
    optimizer = torch.optim.RMSprop(model.parameters())
    return trained(watched, model, optimizer, _images(8), leak, spread=0.4)


def lengths(watched: Watched) -> Iterator[None]:
    """Sequences of 64 to 1,024 tokens; 20 MiB of each step stay."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).cuda()
    batches = (
        torch.empty(8, 64 * watched.draw.randint(1, 16), 256, device="cuda") for _ in itertools.count()
    )
    return trained(watched, model, torch.optim.AdamW(model.parameters()), batches, _held(lambda _: 20))


def bursts(watched: Watched) -> Iterator[None]:
    """Nothing stays of nine steps, 300 MiB of the tenth."""
    model = _convolutions()
    optimizer = torch.optim.AdamW(model.parameters())
    return trained(
        watched, model, optimizer, _images(), _held(lambda number: 300.0 * (number % 10 == 9)), seconds=0.3
    )


def slow(watched: Watched) -> Iterator[None]:
    """4 MiB of each step stay, of steps of half a second."""
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).cuda()
    batches = (torch.empty(512, 512, device="cuda") for _ in itertools.count())
    return trained(
        watched, model, torch.optim.Adagrad(model.parameters()), batches, _held(lambda _: 4), seconds=0.4
    )


def accumulated(watched: Watched) -> Iterator[None]:
    """Gradients of six batches are added up; 15 MiB of each batch stay."""
    model = _convolutions()
    optimizer = torch.optim.NAdam(model.parameters())
    return trained(watched, model, optimizer, _images(), _held(lambda _: 15), seconds=0.3, every=6)


def evaluated(watched: Watched) -> Iterator[None]:
    """After 40 steps come 20 batches without an optimizer, larger ones; 20 MiB of each step stay."""
    model = _convolutions()
    steps = trained(
        watched, model, torch.optim.AdamW(model.parameters()), _images(), _held(lambda _: 20), seconds=0.5
    )
    while True:
        for _ in range(40):
            next(steps)
            yield
        for _ in range(20):
            with torch.no_grad():
                model(torch.empty(48, 3, 128, 128, device="cuda"))


def adversarial(watched: Watched) -> Iterator[None]:
    """Two networks with an optimizer each, in turn; 25 MiB of each round stay."""
    makes = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 4096)).cuda()
    judges = nn.Sequential(nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
    optimizers = [torch.optim.Adam(one.parameters()) for one in (makes, judges)]
    leak = _held(lambda _: 25)
    for model in (makes, judges):
        watched.inside(model, 0.3)
    for number in itertools.count():
        for optimizer in optimizers:
            loss = judges(makes(torch.empty(2048, 64, device="cuda"))).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        leak(number)
        watched.passes(0.2)
        yield


def cached_keys(watched: Watched) -> Iterator[None]:
    """Inference without an optimizer: keys and values of 16 layers, to which those of each token are joined."""
    caches = [torch.empty(2, 8, 8, 1, 128, dtype=torch.float16, device="cuda") for _ in range(16)]
    with torch.no_grad():
        while True:
            for at, cache in enumerate(caches):
                token = torch.empty(2, 8, 8, 16, 128, dtype=torch.float16, device="cuda")
                caches[at] = torch.cat([cache, token], dim=3)
                del cache
                watched.passes(0.02)
            yield


def answers(watched: Watched) -> Iterator[None]:
    """A service without steps of an optimizer that keeps one of eight answers; inputs of any length up to 2,048."""
    model = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)).cuda()
    watched.inside(model, 0.4, 0.5)
    kept = []
    with torch.no_grad():
        for number in itertools.count():
            found = model(torch.empty(32, watched.draw.randint(16, 2048), 512, device="cuda"))
            if number % 8 == 0:
                kept.append(found)
            del found
            watched.passes(0.3, 0.5)
            yield


def holes(watched: Watched) -> Iterator[None]:
    """Little leaks, but each step asks for a larger piece than before, beside a small one that stays: holes grow."""
    model = _convolutions()
    kept: list[torch.Tensor] = []

    def leak(number: int, *_: torch.Tensor) -> None:
        large = torch.empty((24 + 2 * number) * MIB, dtype=torch.uint8, device="cuda")
        kept.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
        del large

    return trained(watched, model, torch.optim.SGD(model.parameters(), lr=0.1), _images(), leak)


def steady_training(watched: Watched) -> Iterator[None]:
    """200 steps of a training over sequences of 64 to 1,024 tokens, of which nothing stays."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).cuda()
    batches = (torch.empty(8, 64 * watched.draw.randint(1, 16), 256, device="cuda") for _ in range(200))
    return trained(watched, model, torch.optim.AdamW(model.parameters()), batches, _held(lambda _: 0))


def steady_service(watched: Watched) -> Iterator[None]:
    """200 answers to inputs of any length up to 1,024, of which nothing stays."""
    model = nn.Sequential(nn.Linear(512, 4096), nn.GELU(), nn.Linear(4096, 512)).cuda()
    watched.inside(model, 0.4, 0.5)
    with torch.no_grad():
        for _ in range(200):
            model(torch.empty(32, watched.draw.randint(16, 1024), 512, device="cuda"))
            watched.passes(0.3, 0.5)
            yield


LINEAR = (
    (convolutions, "6GiB", 1),
    (kept_losses, "4GiB", 2),
    (hooked, "4GiB", 3),
    (noisy, "8GiB", 4),
    (lengths, "6GiB", 5),
    (bursts, "10GiB", 6),
    (slow, "2GiB", 7),
    (accumulated, "6GiB", 8),
    (evaluated, "8GiB", 9),
    (adversarial, "4GiB", 10),
    (cached_keys, "8GiB", 11),
)
"""Leaks that are linear, of other kinds of programs than docs/watch.md has in its first table."""

OTHERS = ((answers, "6GiB", 12), (holes, "8GiB", 13))
"""Holes between blocks grow to many times the leak, in leaps."""

STEADY = ((steady_training, "6GiB", 14), (steady_service, "6GiB", 15))
"""No leak: whether a time is told all the same."""


def run(program: Program, gpu: str, seed: int) -> tuple[Watched, float]:
    """A program to its end: what was told, and when memory ran out, or it ended by itself."""
    with vramfit.VirtualGPU(gpu, profile="none", alloc_conf="") as card:
        readings = OwnReadings(MeterFigures(card.meter, "virtual"))
        watched = Watched(readings, random.Random(seed))
        gap, torch_figures._STEP_GAP = torch_figures._STEP_GAP, 0.0  # by this clock steps are far apart
        try:
            for _ in program(watched):
                watched.steps.append(watched.now)
        except torch.OutOfMemoryError:
            pass
        finally:
            torch_figures._STEP_GAP = gap
            readings.close()
    return watched, watched.now


def row(program: Program, gpu: str, seed: int) -> tuple[str, float]:
    """A line of the table, and the worst error."""
    watched, out = run(program, gpu, seed)
    step = statistics.median(b - a for a, b in itertools.pairwise(watched.steps))
    seen = [(when, told) for when, told in watched.told if 0.25 * out <= when <= 0.9 * out]
    errors = {
        when: (told - (out - when)) / max(out - when, 2 * step) for when, told in seen if told is not None
    }
    silent = 1 - len(errors) / len(seen)
    cells = []
    for at in AT:
        near = min(errors, key=lambda when: abs(when - at * out), default=None)
        cells.append("nothing" if near is None else f"{errors[near]:+.1%}")
    worst = max((abs(one) for one in errors.values()), default=float("nan"))
    within = sum(abs(one) <= 0.2 for one in errors.values()) / max(1, len(errors))
    figures = [program.__name__, str(len(watched.steps)), f"{out:.0f}", *cells]
    figures += [f"{worst:.1%}", f"{within:.0%}", f"{silent:.0%}"]
    return f"| {' | '.join(figures)} |", worst


def main(names: list[str]) -> None:
    """Print the table."""
    warnings.filterwarnings("ignore", message="Full backward hook")
    heads = [
        "program",
        "steps",
        "seconds",
        *(f"at {at:.0%}" for at in AT),
        "worst",
        "within 20 %",
        "nothing told",
    ]
    print("| " + " | ".join(heads) + " |")
    print("|---" + "|---:" * (len(heads) - 1) + "|")
    for program, gpu, seed in (*LINEAR, *OTHERS):
        if not names or program.__name__ in names:
            print(row(program, gpu, seed)[0], flush=True)
    for program, gpu, seed in STEADY:
        if not names or program.__name__ in names:
            watched, _ = run(program, gpu, seed)
            told = sum(seconds is not None for _, seconds in watched.told)
            print(f"\n{program.__name__}: a time told in {told} of {len(watched.told)} looks", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
