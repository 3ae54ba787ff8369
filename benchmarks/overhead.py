"""What recording costs, and what a plan's attaching: a training loop with and without, side by side in one process.

    python benchmarks/overhead.py [--of recording|attaching] [--device cpu|cuda] [--pairs N] [--json FILE]

Each pair runs the same steps once plain and once recorded, in alternating order, so that other load on the machine
affects both. A pair gives one ratio; the table shows their median and how far they spread. On the CPU the
time is processor time, so that other programs on the machine do not count.

On the CPU the tensors are metered one op at a time in Python: the smaller the ops, the more that costs. On a card
torch records in C++, and at most 2 % is the goal.

Attaching is that of ``python -m vramfit.with_plan`` with a plan that changes nothing: what waits for the model is gone
after the first pass, so the steps after it should cost what they cost without it; at most 2 % is the goal, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import vramfit
from vramfit.attaching.attached_script import AttachedScript
from vramfit.attaching.first_training import attach_at_first_training
from vramfit.errors import VramfitError
from vramfit.writing import write_text

SCHEMA = "vramfit.overhead/1"
CARD_GOAL = 1.02
"""Ratio that recording a card, and attaching anywhere, shall stay below."""

RECORDING, ATTACHING = "recording", "attaching"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """A training loop: a small transformer of some width and depth, with AdamW.

    Attributes:
        name: what to call it.
        width, layers: of the model.
        batch, length: of the input.
        steps: that one side of a pair runs.
    """

    name: str
    width: int
    layers: int
    batch: int
    length: int
    steps: int


CPU_LOOPS = (
    Loop(name="tiny ops", width=64, layers=4, batch=4, length=32, steps=6),
    Loop(name="small", width=256, layers=4, batch=8, length=64, steps=3),
    Loop(name="medium", width=512, layers=4, batch=8, length=128, steps=1),
)
CARD_LOOPS = (
    Loop(name="small", width=512, layers=8, batch=8, length=256, steps=20),
    Loop(name="GPT-2 size", width=768, layers=12, batch=8, length=1024, steps=10),
)


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.feed(self.norm_2(x))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What recording a loop costs.

    Attributes:
        loop: its name.
        device: where it ran.
        events: of the trace, for each step.
        step_ms: median milliseconds of a plain step.
        recorded_ms: median milliseconds of a recorded one.
        ratio: median over the pairs of recorded over plain.
        low, high: the pairs' quartiles.
        pairs: how many.
    """

    loop: str
    device: str
    events: float
    step_ms: float
    recorded_ms: float
    ratio: float
    low: float
    high: float
    pairs: int


def trainer(loop: Loop, device: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    """A model, its optimizer, and one side of a pair."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(loop.width) for _ in range(loop.layers))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(loop.batch, loop.length, loop.width, device=device)

    def steps() -> None:
        for _ in range(loop.steps):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if device != "cpu":
            torch.cuda.synchronize()

    return model, optimizer, steps


def measure(loop: Loop, device: str, pairs: int, progress: Callable[[], object] = lambda: None) -> Measured:
    """Run a loop with recording on and off.

    Args:
        loop: what to run.
        device: ``cpu`` or ``cuda``.
        pairs: how often each way.
        progress: called after each pair.
    """
    model, optimizer, steps = trainer(loop, device)
    steps()
    plain, recorded, events = [], [], 0
    clock = time.process_time if device == "cpu" else time.perf_counter
    for pair in range(pairs):
        for on in (False, True) if pair % 2 else (True, False):
            if not on:
                plain.append(_seconds(steps, clock))
                continue
            with vramfit.track(model, optimizer, device=device) as tracked:
                recorded.append(_seconds(steps, clock))
            events = len(tracked.trace)
        progress()
    return _measured(loop, device, plain, recorded, events=events)


def _measured(
    loop: Loop, device: str, plain: Sequence[float], other: Sequence[float], *, events: int
) -> Measured:
    """What the seconds of pairs come to."""
    ratios = [one / two for one, two in zip(other, plain, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else (ratios[0],) * 3
    return Measured(
        loop=loop.name,
        device=device,
        events=events / loop.steps,
        step_ms=1e3 * statistics.median(plain) / loop.steps,
        recorded_ms=1e3 * statistics.median(other) / loop.steps,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        pairs=len(ratios),
    )


def measure_attached(
    loop: Loop, device: str, pairs: int, progress: Callable[[], object] = lambda: None
) -> Measured:
    """Run a loop to which a plan that changes nothing was attached, and the plain one; arguments as of `measure`."""
    _, _, plain_steps = trainer(loop, device)
    plain_steps()
    watch = attach_at_first_training(lambda finder: AttachedScript((), None, finder), _refuse)
    _, _, attached_steps = trainer(loop, device)
    attached_steps()
    assert watch.script.live is not None
    sides, clock = (plain_steps, attached_steps), time.process_time if device == "cpu" else time.perf_counter
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 else (1, 0):
            seconds[side].append(_seconds(sides[side], clock))
        progress()
    watch.script.live.undo()
    return _measured(loop, device, *seconds, events=0)


def _refuse(error: VramfitError) -> NoReturn:
    raise error


def _seconds(steps: Callable[[], None], clock: Callable[[], float]) -> float:
    began = clock()
    steps()
    return clock() - began


def table(found: Sequence[Measured], of: str = RECORDING) -> Table:
    """The measurements for people.

    Args:
        of: whose cost they are.
    """
    page = Table(title=f"What {of} costs", title_justify="left")
    for name in ("loop", "device"):
        page.add_column(name)
    for name in ("events/step", "plain", "recorded" if of == RECORDING else "attached", "ratio", "quartiles"):
        page.add_column(name, justify="right")
    for one in found:
        page.add_row(
            one.loop,
            one.device,
            f"{one.events:,.0f}",
            f"{one.step_ms:.2f} ms",
            f"{one.recorded_ms:.2f} ms",
            f"{one.ratio:.3f}",
            f"{one.low:.3f} to {one.high:.3f}",
        )
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON where that was asked for; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--of", choices=(RECORDING, ATTACHING), default=RECORDING, help="whose cost")
    parser.add_argument("--pairs", type=int, default=15, help="how often each loop runs each way")
    parser.add_argument("--threads", type=int, default=1, help="threads of CPU kernels")
    parser.add_argument("--only", help="the loop of this name alone")
    parser.add_argument("--json", type=Path, help="write the measurements there")
    options = parser.parse_args(arguments)
    loops = CPU_LOOPS if options.device == "cpu" else CARD_LOOPS
    chosen = [loop for loop in loops if options.only in (None, loop.name)]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no CUDA card here: --device cpu")
    if options.pairs < 1 or options.threads < 1:
        parser.error("--pairs and --threads count from 1")
    if not chosen:
        parser.error(f"there is no loop {options.only!r}: {', '.join(loop.name for loop in loops)}")
    torch.set_num_threads(options.threads)
    found = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for loop in chosen:
            task = progress.add_task(loop.name, total=options.pairs)
            found.append(
                (measure if options.of == RECORDING else measure_attached)(
                    loop, options.device, options.pairs, lambda task=task: progress.advance(task)
                )
            )
    console = Console()
    console.width = max(console.width, 100)  # the table's own width, where the output is a file
    console.print(table(found, options.of))
    if options.json is not None:
        facts = {"schema": SCHEMA, "of": options.of, "torch": torch.__version__, "threads": options.threads}
        try:
            write_text(
                options.json, json.dumps({**facts, "loops": [asdict(one) for one in found]}, indent=2) + "\n"
            )
        except VramfitError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    held = options.device == "cuda" or options.of == ATTACHING
    missed = held and any(one.ratio > CARD_GOAL for one in found)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
