"""Guesses at combinations of techniques from what each did alone, so that only promising ones are run.

NOTE [Estimates]: a peak is a maximum, so what techniques do to it neither adds nor multiplies: an optimizer on the host
saves nothing where activations are the peak, and everything once they are gone. What a step is made of does combine:
bfloat16 halves the parameters, the gradients and the activations, an offloaded optimizer takes the states away, micro-
batches divide the activations alone. A `MemoryEstimate` has these parts, a technique changes each by a factor, and the
peak is put together again at the end. Guesses rank what is run next; nothing is ever promised by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeAlias

from vramfit.planner.activation_ilp import solver
from vramfit.planner.activation_ilp.decisions import IlpOptions, choosable, interval_peaks, recompute_seconds
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Profile

Part: TypeAlias = tuple[str, str]
Parts: TypeAlias = frozenset[Part]

_WIDTH = 48
"""Combinations that are carried on."""

_DEPTH = 8
"""Techniques in a combination, at most."""

_NOTABLE = 0.01
"""Part of the peak below which something does not count."""

_EACH = 0.002
"""A combination has to be better by this part for each technique that it adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """What a step is made of; bytes of the device, and seconds.

    Attributes:
        weights: parameters and buffers.
        states: what else is held between steps: the optimizer's states.
        gradients: of all parameters.
        kept: by activations, beyond the above, where nothing is recomputed or offloaded.
        reduced: the same, where everything is.
        tail: by the optimizer's step, beyond the above.
        setup: before the first step.
        outside: of tensors: the context and fragmentation.
        passes: seconds of forward and backward passes.
        stepping: seconds of the optimizer's step.
        recomputing: seconds that it costs to have `reduced`.
    """

    weights: float
    states: float
    gradients: float
    kept: float
    reduced: float
    tail: float
    setup: float
    outside: float
    passes: float
    stepping: float
    recomputing: float

    @property
    def lowest(self) -> float:
        """The lowest total."""
        return self._total(self.reduced)

    @property
    def highest(self) -> float:
        """The total with nothing recomputed."""
        return self._total(self.kept)

    def _total(self, solver: float) -> float:
        held = self.weights + self.states + self.gradients
        return max(held + max(solver, self.tail), self.setup) + self.outside

    @property
    def seconds(self) -> float:
        """Of a step in which nothing is recomputed."""
        return self.passes + self.stepping

    def seconds_within(self, limit: float) -> float:
        """Of a step that recomputes as large a part as the limit asks for."""
        low, high = self.lowest, self.highest
        part = 0.0 if high <= limit else min(1.0, (high - limit) / max(high - low, 1.0))
        return self.seconds + part * self.recomputing


def memory_estimate_of(
    step: StepProfile, options: IlpOptions, profile: Profile, outside: int
) -> MemoryEstimate:
    """What a profiled step is made of."""
    plain = interval_peaks(step, {})
    whole = len(step.blocks) == 1  # of a model that is one block everything may be there again at once
    reduced = interval_peaks(step, solver.lowest_decisions(step, options, inside=whole))
    backward = [number for number, interval in enumerate(step.intervals) if interval.backward]
    end = backward[-1] + 1 if backward else len(step.intervals)
    weights = step.weight_bytes
    held = max(weights, int(plain.min(initial=plain.max(initial=0))))
    base = held + step.gradient_bytes
    return MemoryEstimate(
        weights=weights,
        states=held - weights,
        gradients=step.gradient_bytes,
        kept=max(0.0, plain[:end].max(initial=0) - base),
        reduced=max(0.0, reduced[:end].max(initial=0) - base),
        tail=max(0.0, plain[end:].max(initial=0) - base),
        setup=profile.setup_bytes,
        outside=outside,
        passes=step.seconds - step.tail_seconds,
        stepping=step.tail_seconds,
        recomputing=sum(
            recompute_seconds(block) * block.calls for block in step.blocks if choosable(step, block)
        ),
    )


@dataclass(frozen=True, slots=True)
class Effect:
    """What a technique did to a candidate: the estimates without and with it."""

    before: MemoryEstimate
    after: MemoryEstimate

    def on(self, estimate: MemoryEstimate) -> MemoryEstimate:
        """The estimate of another candidate with the technique added.

        Parts change by the same factors; those that the candidate before hardly had grow by the same amounts. A step
        that is taken during the backward pass is no less work than after it.
        """
        gone = max(0.0, self.before.stepping - self.after.stepping)
        moved = min(gone, max(0.0, self.after.passes - self.before.passes))
        changed = replace(self.after, passes=self.after.passes - moved, stepping=self.after.stepping + moved)
        least = _NOTABLE * self.before.highest
        values = [
            value * after / before if after < before or before > least else value + after - before
            for value, before, after in zip(
                astuple(estimate), astuple(self.before), astuple(changed), strict=True
            )
        ]
        return MemoryEstimate(**dict(zip(estimate.__slots__, values, strict=True)))


@dataclass(frozen=True, slots=True)
class Guess:
    """A combination, and the estimate of it."""

    parts: Parts
    estimate: MemoryEstimate


def guesses(
    seen: Mapping[Parts, MemoryEstimate],
    effects: Mapping[Part, Effect],
    possible: Callable[[Parts], bool],
    score: Callable[[MemoryEstimate], tuple[Any, ...]],
) -> Iterable[Guess]:
    """Combinations of techniques, the most promising first; those that were seen as they were seen.

    Args:
        seen: estimates of the combinations that were run, the plain workload among them.
        effects: of techniques on something that was run.
        possible: whether a combination can be applied.
        score: the smaller, the better.
    """
    found: dict[Parts, Guess] = {}
    layer = [Guess(parts, estimate) for parts, estimate in seen.items()]
    ordered = sorted(seen, key=len, reverse=True)
    for _ in range(_DEPTH):
        grown: dict[Parts, Guess] = {}
        for guess in layer:
            names = {name for name, _ in guess.parts}
            for part, effect in effects.items():
                parts = guess.parts | {part}
                if part[0] in names or parts in found or parts in grown or not possible(parts):
                    continue
                grown[parts] = Guess(
                    parts, _guess(parts, seen, ordered, effects) or effect.on(guess.estimate)
                )
        found |= grown
        layer = sorted(grown.values(), key=lambda guess: _with_length(guess, score))[:_WIDTH]
    return sorted(found.values(), key=lambda guess: _with_length(guess, score))


def _guess(
    parts: Parts,
    seen: Mapping[Parts, MemoryEstimate],
    ordered: list[Parts],
    effects: Mapping[Part, Effect],
) -> MemoryEstimate | None:
    """From the largest part of a combination that was run."""
    base = next((known for known in ordered if known <= parts and parts - known <= effects.keys()), None)
    if base is None:
        return None
    estimate = seen[base]
    for part in sorted(parts - base):
        estimate = effects[part].on(estimate)
    if len(base) < 2:
        # What one technique leaves on the device before the first step, another may have on the host from the start.
        estimate = replace(estimate, setup=estimate.weights)
    return estimate


def _with_length(guess: Guess, score: Callable[[MemoryEstimate], tuple[Any, ...]]) -> tuple[Any, ...]:
    longer = 1 + _EACH * len(guess.parts)
    return tuple(value * longer if isinstance(value, float) else value for value in score(guess.estimate))
