"""Decides how many items the next step's batch has, and how the step is run: numbers in, numbers out.

NOTE [Room]: a step may take what is within reach of the process now, less what others have been seen to take away from
one step to the next (their sway), which is forgotten by a few per cent a step. A fall unlike those before it, of a CUDA
context's size or more, says that a neighbour has come and will load what it came for: for some steps more is left to it
than it took so far. A rise of that size says that one has gone, and with it its sway. What leaks is no matter of its
own: it is no longer within reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vramfit.runtime.controller.peak_quantile import PeakQuantile, QuantileSettings
from vramfit.searching.largest import halved, largest_where

CONTEXT_BYTES = 256 << 20
"""What comes with a neighbour at least: its CUDA context, of 300 to 600 MiB on the cards of the catalogue."""

_LOADING = 0.85
"""What is left of the room for a newcomer, each step."""

_CLOSING = 0.999
"""What is left of the part that lay in gaps, each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMode:
    """A way to run a step, such as with checkpointing.

    Attributes:
        memory: what it takes of a plain step's memory, before it was seen.
        time: what it takes of a plain step's time for each token.
    """

    name: str
    memory: float = 1.0
    time: float = 1.0


PLAIN_MODE = StepMode(name="plain")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """How the next step is run.

    Attributes:
        items: of its batch.
        bound_bytes: that it takes at most, by what is known.
    """

    items: int
    mode: StepMode
    bound_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySettings:
    """What a policy may do.

    Attributes:
        start: items of the first step.
        most: items of any.
        growth: times as many tokens as any step before that a step may have.
        calming: of the sway, each step; 0 looks at the last fall alone.
        arrival: part of the room that is left to a neighbour that has just come, for its next step.
        quantile: of the bound.
    """

    start: int = 1
    most: int = 1 << 20
    growth: float = 2.0
    calming: float = 0.97
    arrival: float = 0.12
    quantile: QuantileSettings = QuantileSettings()  # noqa: RUF009  # it is frozen


class SizePolicy:
    """Sizes by a bound on what steps take. See NOTE [Room].

    Args:
        modes: ways to run a step, the plain one first.
    """

    def __init__(self, settings: PolicySettings, modes: Sequence[StepMode] = (PLAIN_MODE,)) -> None:
        self._settings, self._modes = settings, tuple(modes)
        self._peaks: Mapping[str, PeakQuantile] = {
            mode.name: PeakQuantile(settings.quantile) for mode in modes
        }
        self._sway, self._coming = 0.0, 0.0
        self._room: int | None = None
        self._small, self._wasted = 1.0, 0.0
        self._overhead, self._per_token = 0.0, 0.0

    def decide(self, room_bytes: int, length: int) -> StepSize:
        """The size of the next step.

        Args:
            room_bytes: within reach of the process now, beside what is alive.
            length: tokens of the longest item that may come.
        """
        if self._room is not None:
            self._follow(self._room - room_bytes)
        self._room = room_bytes
        room = (room_bytes - max(0.0, self._sway, self._coming)) * self._small * (1 - self._wasted)
        self._wasted *= _CLOSING
        found = [self._largest(mode, room, length) for mode in self._modes]
        return max(found, key=lambda one: (self._speed(one, length), -one.mode.time))

    def observe(self, size: StepSize, length: int, taken_bytes: int, seconds: float = 0.0) -> None:
        """Learn from a step that ended.

        Args:
            taken_bytes: at its highest, beside what was there before it.
        """
        self._peaks[size.mode.name].learn(size.items, length, taken_bytes)
        self._small = min(1.0, self._small * 1.1)
        if seconds > 0:
            self._time(size.items * length * size.mode.time, seconds)

    def ran_out(self, size: StepSize, wasted: float = 0.0) -> None:
        """Learn from a step that ran out of memory: the next one is smaller, and the bound is wider.

        Args:
            wasted: part of the room that lay in gaps when it did; as much is left out of all rooms from here on, and
                less with each step.
        """
        self._peaks[size.mode.name].ran_out()
        self._small = max(0.05, self._small * 0.7)
        self._wasted = min(0.5, max(self._wasted, wasted))

    def _follow(self, fall: int) -> None:
        """Follow what others took away since the last step; less than 0 is what they gave back."""
        settings = self._settings
        if fall < -CONTEXT_BYTES:
            self._sway, self._coming = self._sway / 2, 0.0
        usual = self._sway
        self._sway = max(fall, settings.calming * self._sway)
        self._coming *= _LOADING
        if fall > CONTEXT_BYTES and fall > 1.5 * usual and self._room is not None:
            self._coming = max(self._coming, settings.arrival * (self._room - fall))

    def _largest(self, mode: StepMode, room: float, length: int) -> StepSize:
        """The most items whose bound is within the room; 1 where none is."""
        settings = self._settings
        seen = max(peak.most_tokens for peak in self._peaks.values())
        limit = settings.most
        if seen:
            limit = min(limit, max(1, int(settings.growth * seen / length)))
        else:
            limit = min(limit, settings.start)
        largest = largest_where(lambda items: self._bound(mode, items, length) <= room, halved(limit))
        items = max(1, largest.value)
        return StepSize(items=items, mode=mode, bound_bytes=round(self._bound(mode, items, length)))

    def _bound(self, mode: StepMode, items: int, length: int) -> float:
        known = self._peaks[mode.name]
        if known.count:
            return known.bound(items, length)
        plain = self._peaks[self._modes[0].name]
        # Unseen: what is said of it, half as much again.
        return 1.5 * mode.memory * plain.bound(items, length) if plain.count else 0.0

    def _speed(self, size: StepSize, length: int) -> float:
        """Tokens a second, relative where seconds are not known."""
        tokens = size.items * length
        fits = size.items > 1 or size.bound_bytes <= (self._room or 0)
        seconds = self._overhead + max(self._per_token, 1e-12) * tokens * size.mode.time
        return (
            (tokens / seconds if self._per_token else tokens / (tokens + length) / size.mode.time)
            if fits
            else 0.0
        )

    def _time(self, weighted_tokens: float, seconds: float) -> None:
        """Follow seconds as an overhead and a price a token, by normalised least mean squares."""
        if not self._per_token:
            self._per_token, self._overhead = 0.9 * seconds / weighted_tokens, 0.1 * seconds
            return
        scale = self._per_token * weighted_tokens / seconds
        share = self._overhead / seconds
        error = 1.0 - scale - share
        rate = 0.2 * error / (scale * scale + share * share + 1e-9)
        self._per_token = max(1e-15, self._per_token * (1 + rate * scale))
        self._overhead = max(0.0, self._overhead * (1 + rate * share))
