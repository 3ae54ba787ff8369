"""A training on a card with neighbours, in numbers: what each step takes, and what is free for it.

Ranges, each drawn once a seed unless it says otherwise:

- a card of 24 to 80 GiB, of which parameters and the optimizer's states take 20 to 40 %;
- a step of n items of length L takes a constant of 0.1 to 1 % of the card, and b n L (1 + L / q), q from 2,000 to
  20,000 (attention); b such that 64 to 512 items of 512 tokens fill the card;
- what the allocator adds: each step the absolute value of a normal, of a deviation of 0.3 to 1.5 %, and 1 to 3 % more
  in one step of 500;
- lengths: of each step log-normal (deviation 0.25) around a median that walks (0.02 a step, as a logarithm) between 256
  and 2,048 tokens; none is over 4,096;
- neighbours: one comes every 300 to 800 steps (exponential) and stays 50 to 300; first its context of 500 MiB, then it
  grows over 3 to 20 steps to 10 to 35 % of the card, then it sways by up to 1 % of the card from step to step. It
  leaves at once. What it takes during a step counts against that step;
- a leak of 0.5 to 3 MiB a step, in every other seed; the process is restarted when it has 10 % of the card;
- a step takes an overhead of 5 to 20 % of a full step's time, and a time for each token;
- two other ways to run a step: checkpointing takes 0.3 to 0.45 of the memory and 1.2 to 1.45 of the time a token,
  offloading 0.15 to 0.25 and 1.6 to 2.5. Policies are told 0.38, 4/3, 0.2 and 2;
- a step that runs out takes its time and 0.5 to 2 times as much to recover, and does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vramfit.runtime.controller.size_policy import StepMode

GIB, MIB = 1 << 30, 1 << 20
MODES = (
    StepMode(name="plain"),
    StepMode(name="checkpointing", memory=0.38, time=4 / 3),
    StepMode(name="activation-offload", memory=0.2, time=2.0),
)
LONGEST = 4096


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A step as it will be.

    Attributes:
        room: within reach when it begins.
        real_room: when it is at its highest.
        length: of its items.
        factor: what the allocator makes of its bytes.
        left: whether a neighbour has just gone.
    """

    room: int
    real_room: int
    length: int
    factor: float
    left: bool


class Card:
    """A training of `steps` steps, the same for all policies of a seed."""

    def __init__(self, seed: int, steps: int) -> None:
        draw = self._draw = np.random.default_rng(seed)
        self.total = int(draw.uniform(24, 80) * GIB)
        self.static = int(self.total * draw.uniform(0.2, 0.4))
        self.constant = self.total * draw.uniform(0.001, 0.01)
        self.quadratic = draw.uniform(2_000, 20_000)
        full = draw.uniform(64, 512)
        self.per_token = (self.total - self.static) / (full * 512 * (1 + 512 / self.quadratic))
        self.noise = draw.uniform(0.003, 0.015)
        self.overhead = draw.uniform(0.05, 0.2) * full * 512
        self.recovery = draw.uniform(0.5, 2.0)
        names = [mode.name for mode in MODES]
        memory = [1.0, draw.uniform(0.3, 0.45), draw.uniform(0.15, 0.25)]
        slowness = [1.0, draw.uniform(1.2, 1.45), draw.uniform(1.6, 2.5)]
        self.memory = dict(zip(names, memory, strict=True))
        self.slowness = dict(zip(names, slowness, strict=True))
        self.leak = draw.uniform(0.5, 3.0) * MIB if seed % 2 else 0.0
        self.moments = list(self._moments(steps))

    def _moments(self, steps: int) -> list[Moment]:
        draw = self._draw
        taken, left = self._neighbours(steps + 1)
        median, found, leaked = np.log(draw.uniform(256, 2048)), [], 0.0
        for step in range(steps):
            median = float(np.clip(median + draw.normal(0, 0.02), np.log(256), np.log(2048)))
            length = int(np.clip(np.exp(median + draw.normal(0, 0.25)), 16, LONGEST))
            factor = 1 + abs(draw.normal(0, self.noise))
            if draw.random() < 1 / 500:
                factor += draw.uniform(0.01, 0.03)
            leaked = 0.0 if leaked > 0.1 * self.total else leaked + self.leak
            room = self.total - self.static - leaked
            found.append(
                Moment(
                    room=int(room - taken[step]),
                    real_room=int(room - max(taken[step], taken[step + 1])),
                    length=length,
                    factor=factor,
                    left=bool(left[step]),
                )
            )
        return found

    def _neighbours(self, steps: int) -> tuple[np.ndarray, np.ndarray]:
        draw = self._draw
        taken, left = np.zeros(steps), np.zeros(steps, bool)
        every = draw.uniform(300, 800)
        step = int(draw.exponential(every))
        while step < steps:
            stay, ramp = int(draw.uniform(50, 300)), int(draw.uniform(3, 20))
            size = draw.uniform(0.1, 0.35) * self.total
            for here in range(step, min(step + stay, steps)):
                grown = min(1.0, (here - step) / ramp)
                sway = draw.uniform(-0.005, 0.005) * self.total if grown == 1 else 0.0
                taken[here] = 500 * MIB + grown * size + sway
            if step + stay < steps:
                left[step + stay] = True
            step += stay + int(draw.exponential(every)) + 1
        return taken, left

    def peak(self, moment: Moment, items: int, mode: str) -> int:
        """Bytes that a step takes at its highest, beside what is there before it."""
        length = moment.length
        tokens = items * length * (1 + length / self.quadratic)
        return int((self.constant + self.memory[mode] * self.per_token * tokens) * moment.factor)

    def seconds(self, moment: Moment, items: int, mode: str) -> float:
        return float(self.overhead + self.slowness[mode] * items * moment.length) / 1e5

    def best(self, moment: Moment) -> tuple[int, str]:
        """What one who knows the future takes."""
        found = []
        for mode in self.memory:
            each = self.memory[mode] * self.per_token * moment.length * (1 + moment.length / self.quadratic)
            items = max(1, int((moment.real_room / moment.factor - self.constant) / each))
            while items > 1 and self.peak(moment, items, mode) > moment.real_room:
                items -= 1
            found.append((items * moment.length / self.seconds(moment, items, mode), items, mode))
        _, items, mode = max(found)
        return items, mode
