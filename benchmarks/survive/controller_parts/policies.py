"""Policies that choose sizes: fixed, additive and multiplicative, least squares, a quantile, and contextual bandits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from controller_parts.simulator import MODES, Card

from vramfit.runtime.controller.peak_quantile import QuantileSettings
from vramfit.runtime.controller.size_policy import PolicySettings, SizePolicy, StepMode, StepSize


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step that ended, or ran out."""

    items: int
    mode: str
    length: int
    taken: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.items * self.length / self.seconds


class Policy(Protocol):
    """Chooses, and is told how it went."""

    def choose(self, room: int, length: int, /) -> tuple[int, str]: ...

    def told(self, done: Done) -> None:
        """A step ended."""

    def ran_out(self, done: Done) -> None: ...


def first_size(card: Card) -> int:
    """Items of the longest that fit at first: what a search before the training finds."""
    moment = replace(card.moments[0], length=4096, factor=1.03)
    items = 1
    while card.peak(moment, items + 1, "plain") <= 0.98 * moment.room:
        items += 1
    return items


class Fixed:
    """As many items as the longest allow at first."""

    def __init__(self, card: Card) -> None:
        self._items = first_size(card)

    def choose(self, room: int, length: int, /) -> tuple[int, str]:
        del room, length
        return self._items, "plain"

    def told(self, done: Done) -> None:
        del done

    def ran_out(self, done: Done) -> None:
        del done


class FixedTokens(Fixed):
    """As many tokens, of whatever length."""

    def choose(self, room: int, length: int, /) -> tuple[int, str]:
        del room
        return max(1, self._items * 4096 // length), "plain"


class AdditiveMultiplicative:
    """A per cent more tokens after each step, half after one that ran out (as TCP does; Chiu and Jain 1989)."""

    def __init__(self, card: Card) -> None:
        self._tokens = first_size(card) * 4096.0
        self._more = self._tokens * 0.01

    def choose(self, room: int, length: int, /) -> tuple[int, str]:
        del room
        return max(1, int(self._tokens / length)), "plain"

    def told(self, done: Done) -> None:
        del done
        self._tokens += self._more

    def ran_out(self, done: Done) -> None:
        del done
        self._tokens /= 2


class ByBound:
    """vramfit's, with a margin of its own errors or another."""

    def __init__(self, card: Card, settings: PolicySettings = PolicySettings()) -> None:  # noqa: B008
        self._policy = SizePolicy(replace(settings, start=first_size(card)), MODES)
        self._last: StepSize | None = None

    def choose(self, room: int, length: int, /) -> tuple[int, str]:
        self._last = self._policy.decide(room, length)
        return self._last.items, self._last.mode.name

    def told(self, done: Done) -> None:
        assert self._last is not None
        self._policy.observe(self._last, done.length, done.taken, done.seconds)

    def ran_out(self, done: Done) -> None:
        del done
        assert self._last is not None
        self._policy.ran_out(self._last)


def least_squares(card: Card) -> ByBound:
    """The most likely peak and 2 % of it, whatever happened before, and no sway."""
    plain = QuantileSettings(window=0, least=0.02, widening=0.0)
    return ByBound(card, PolicySettings(quantile=plain, calming=0.0, arrival=0.0))


class SizeBandit:
    """LinUCB (Li et al. 2010) over tokens and ways to run a step; the context is the room and the length.

    Args:
        width: of its confidence.
    """

    def __init__(self, card: Card, width: float = 0.3) -> None:
        first = first_size(card) * 4096.0
        self._arms = [(first * 2 ** (power / 2), mode) for power in range(-4, 5) for mode in MODES]
        size = 5
        self._inverse = [np.eye(size) for _ in self._arms]
        self._right = [np.zeros(size) for _ in self._arms]
        self._total, self._width, self._arm = card.total, width, 0
        self._context = np.zeros(size)
        self._fastest = 1e-9

    def choose(self, room: int, length: int, /) -> tuple[int, str]:
        free, long = room / self._total, length / 4096
        self._context = np.array([1.0, free, long, free * long, free * free])
        scores = [
            self._context @ inverse @ right + self._width * np.sqrt(self._context @ inverse @ self._context)
            for inverse, right in zip(self._inverse, self._right, strict=True)
        ]
        self._arm = int(np.argmax(scores))
        tokens, mode = self._arms[self._arm]
        return max(1, int(tokens / length)), mode.name

    def told(self, done: Done) -> None:
        self._fastest = max(self._fastest, done.speed)
        self._learn(done.speed / self._fastest)

    def ran_out(self, done: Done) -> None:
        del done
        self._learn(-1.0)

    def _learn(self, reward: float) -> None:
        inverse, context = self._inverse[self._arm], self._context
        projected = inverse @ context
        self._inverse[self._arm] = inverse - np.outer(projected, projected) / (1 + context @ projected)
        self._right[self._arm] = self._right[self._arm] + reward * context


class MarginBandit:
    """Thompson sampling over how much of the quantile's room is taken, and over ways to run a step.

    It has the learnt bound to stand on: the arms are 0.85 to 1.1 of the room, in each way.
    """

    def __init__(self, card: Card, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self._policies: dict[str, SizePolicy] = {
            mode.name: SizePolicy(PolicySettings(start=first_size(card)), (StepMode(name=mode.name),))
            for mode in MODES
        }
        self._arms = [(part, mode.name) for mode in MODES for part in (0.85, 0.9, 0.95, 1.0, 1.05, 1.1)]
        size = 3
        self._inverse = [np.eye(size) for _ in self._arms]
        self._right = [np.zeros(size) for _ in self._arms]
        self._total, self._fastest, self._arm = card.total, 1e-9, 0
        self._context = np.zeros(size)
        self._last: StepSize | None = None

    def choose(self, room: int, length: int, /) -> tuple[int, str]:
        self._context = np.array([1.0, room / self._total, length / 4096])
        scores = []
        for inverse, right in zip(self._inverse, self._right, strict=True):
            sampled = self._draw.multivariate_normal(inverse @ right, 0.02 * inverse)
            scores.append(float(sampled @ self._context))
        self._arm = int(np.argmax(scores))
        part, mode = self._arms[self._arm]
        self._last = self._policies[mode].decide(int(room * part), length)
        return self._last.items, mode

    def told(self, done: Done) -> None:
        assert self._last is not None
        self._policies[done.mode].observe(self._last, done.length, done.taken, done.seconds)
        self._fastest = max(self._fastest, done.speed)
        self._learn(done.speed / self._fastest)

    def ran_out(self, done: Done) -> None:
        assert self._last is not None
        self._policies[done.mode].ran_out(self._last)
        self._learn(-1.0)

    def _learn(self, reward: float) -> None:
        inverse, context = self._inverse[self._arm], self._context
        projected = inverse @ context
        self._inverse[self._arm] = inverse - np.outer(projected, projected) / (1 + context @ projected)
        self._right[self._arm] = self._right[self._arm] + reward * context


POLICIES = {
    "fixed items": Fixed,
    "fixed tokens": FixedTokens,
    "AIMD": AdditiveMultiplicative,
    "least squares": least_squares,
    "quantile (vramfit)": ByBound,
    "bandit over sizes (LinUCB)": SizeBandit,
    "bandit over margins (Thompson)": MarginBandit,
}
