"""Chooses formats of weights for a live model within a budget: bytes on the virtual card, quality where the model is.

NOTE [The limit]: the program counts tensors, and a budget is what torch reserves, which no sum foresees to the byte:
blocks leave gaps. So choices are run on the virtual card, and where the best reserves more than the budget, the
program's limit falls by what it was too much. What is given back was run, and reserved no more than the budget.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.live_choice import LiveModel, asked_about
from vramfit.planner.planner_job import FormatTableJob, TryFormatsJob
from vramfit.planner.quantization.format_trial import FormatQuestion, TriedFormats
from vramfit.techniques.quantization.byte_program import FormatProgram, FormatTable, LayerScores
from vramfit.techniques.quantization.quality import (
    GivenQuality,
    LogitsDivergence,
    Measure,
    in_evaluation,
    measured,
    measured_alone,
)
from vramfit.techniques.quantization.weight_formats import (
    DEFAULT_FORMATS,
    WeightFormat,
    check_card,
    has_format,
    quantisable,
    why_not,
)
from vramfit.units import format_bytes

Progress = Callable[[str], None]
Formats = Mapping[str, WeightFormat]

_CANDIDATES = 6
"""Programs that are solved for one limit, each other than those before."""

_FINALISTS = 4
"""Choices that fit and are measured together."""

_LIMITS = 12
"""Limits that are tried, each lower than the one before."""

_STEP = 512
"""Bytes by which a limit falls at least."""


class Bytes(Protocol):
    """Says what formats take; asked of another process, or of a virtual card in this one."""

    def table(self, formats: Sequence[WeightFormat]) -> FormatTable:
        """What the model takes in any choice of formats."""
        ...

    def reserved(self, choices: Sequence[Formats], limit: int, enough: int) -> Sequence[int]:
        """What torch reserves with choices, in bytes, until enough of them fit a limit."""
        ...


@dataclass(frozen=True, kw_only=True)
class BytesElsewhere:
    """Bytes of a live model, found by a process of its own on the virtual card."""

    live: LiveModel
    question: FormatQuestion
    progress: Progress | None = None

    def table(self, formats: Sequence[WeightFormat]) -> FormatTable:
        """See `Bytes.table`."""
        names = tuple(one.value for one in formats)
        return asked_about(
            self.live,
            self.question,
            lambda target, memory: FormatTableJob(target=target, memory=memory, formats=names),
            FormatTable,
            self.progress,
        )

    def reserved(self, choices: Sequence[Formats], limit: int, enough: int) -> Sequence[int]:
        """See `Bytes.reserved`; the limit is that of the live model's memory."""
        del limit
        plain = tuple({name: one.value for name, one in chosen.items()} for chosen in choices)
        found = asked_about(
            self.live,
            self.question,
            lambda target, memory: TryFormatsJob(target=target, memory=memory, choices=plain, enough=enough),
            TriedFormats,
            self.progress,
        )
        return found.reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoice:
    """The formats that were chosen, and by what.

    Attributes:
        formats: of layers, by name; those that stay as they are are left out.
        budget: bytes that torch may reserve, the model included.
        plain_bytes: what torch reserves with the plain model, on the virtual card.
        reserved_bytes: what it reserves with these formats there.
        predicted_bytes: the peak of tensors that the program counted.
        weight_bytes: of linear layers, before and after.
        cost: what the choice costs in quality, measured with all layers together: nats of KL divergence, or how much
            the user's measure fell.
        sum_of_costs: of the layers measured one by one, which is not the same.
        finalists: costs of all choices that were measured together.
        refused: settings that were not considered, each with its figures.
        runs: choices that were run on the virtual card.
    """

    formats: Formats
    budget: int
    plain_bytes: int
    reserved_bytes: int
    predicted_bytes: int
    weight_bytes: tuple[int, int]
    cost: float
    sum_of_costs: float
    finalists: tuple[float, ...] = ()
    refused: tuple[str, ...] = ()
    runs: int = 0

    @property
    def words(self) -> str:
        """The choice in a sentence."""
        counts = Counter(one.value for one in self.formats.values())
        what = ", ".join(f"{count} in {name}" for name, count in sorted(counts.items())) or "nothing changed"
        return (
            f"{what}: {format_bytes(self.reserved_bytes)} reserved of {format_bytes(self.budget)}, "
            f"plain {format_bytes(self.plain_bytes)}, cost {self.cost:.3g}"
        )


def choose_formats(
    model: nn.Module,
    question: FormatQuestion,
    bytes_of: Bytes,
    limit: int,
    *,
    card: str,
    capability: tuple[int, int],
    formats: Sequence[WeightFormat] | None = None,
    quality: Callable[[nn.Module], Any] | None = None,
    device: torch.device | None = None,
    progress: Progress = lambda _text: None,
) -> FormatChoice:
    """The formats with which a model costs least in quality among those that stay within a limit.

    Args:
        model: with its values.
        bytes_of: says what formats take.
        limit: bytes that torch may reserve, the model included.
        card: the card's name, for errors.
        capability: its compute capability.
        formats: those to choose from; None for those that the card has.
        quality: a measure of the user's, the larger the better; None is the divergence of the logits.
        device: where quality is measured; None is where the model is.

    Raises:
        UsageError: the card has a format not, nothing could be quantised, or the smallest choice does not fit.
    """
    asked = _formats(model, formats, card, capability)
    table = bytes_of.table(asked)
    plain = table.uniform[WeightFormat.NONE.value]
    if plain <= limit:
        return _unchanged(table, limit, plain)
    table, refused = without_raising(table, asked)
    if not any(len(layer.weight) > 1 for layer in table.layers):
        raise UsageError("no format lowers the peak: " + "; ".join(refused), "Give other formats")
    least = FormatProgram(table, _no_scores(table)).smallest()
    [reserved] = bytes_of.reserved([least], limit, 1)
    if reserved > limit:
        raise UsageError(
            f"the smallest choice of formats reserves {format_bytes(reserved)}, more than the budget of "
            f"{format_bytes(limit)} (the plain model: {format_bytes(plain)})",
            "Allow more, allow other formats, or make the batch smaller",
        )
    where = device or next(iter(quantisable(model).values())).weight.device
    with in_evaluation(model):
        measure: Measure = (
            LogitsDivergence(model, question.batches) if quality is None else GivenQuality(model, quality)
        )
        options = {layer.name: [WeightFormat(one) for one in layer.weight] for layer in table.layers}
        scores = measured_alone(model, options, measure, where, progress)
        program = FormatProgram(table, scores)
        fitting, runs = _fitting(program, bytes_of, limit)
        fitting = fitting or {_key(least): (least, reserved)}
        progress("the best choices, all layers together")
        costs = {key: measured(model, chosen, measure, where) for key, (chosen, _) in fitting.items()}
    best = min(costs, key=lambda key: (costs[key], fitting[key][1]))
    chosen, reserved = fitting[best]
    if not math.isfinite(costs[best]):
        raise UsageError(
            "every choice within the budget gives outputs that are not finite", "Allow more, or other formats"
        )
    return FormatChoice(
        formats=chosen,
        budget=limit,
        plain_bytes=plain,
        reserved_bytes=reserved,
        predicted_bytes=table.peak(chosen),
        weight_bytes=(table.weight_bytes({}), table.weight_bytes(chosen)),
        cost=costs[best],
        sum_of_costs=program.cost(chosen),
        finalists=tuple(sorted(costs.values())),
        refused=tuple(refused),
        runs=runs + 1,
    )


def without_raising(table: FormatTable, formats: Sequence[WeightFormat]) -> tuple[FormatTable, list[str]]:
    """The table without settings that raise the peak, and what was refused, in words.

    A format is refused for all layers where the model with all of them in it peaks higher than as it is; for one layer
    where its weight then takes more than before.
    """
    plain = table.uniform[WeightFormat.NONE.value]
    refused: list[str] = []
    raising: set[str] = set()
    for one in formats:
        peak = table.uniform.get(one.value)
        if peak is not None and peak > plain:
            raising.add(one.value)
            refused.append(
                f"{one.value} in all layers raises the peak from {format_bytes(plain)} to {format_bytes(peak)}"
            )
    layers = []
    for layer in table.layers:
        own = layer.weight[WeightFormat.NONE.value]
        larger = {name for name, size in layer.weight.items() if size > own and name not in raising}
        refused += [
            f"{layer.name} in {name} takes {format_bytes(layer.weight[name])} in place of {format_bytes(own)}"
            for name in sorted(larger)
        ]
        kept = {key: size for key, size in layer.weight.items() if key not in raising | larger}
        layers.append(replace(layer, weight=kept))
    return replace(table, layers=tuple(layers)), refused


def _formats(
    model: nn.Module,
    formats: Sequence[WeightFormat] | None,
    card: str,
    capability: tuple[int, int],
) -> list[WeightFormat]:
    """The formats to choose from.

    Raises:
        UsageError: the card has one not, or no layer can have any.
    """
    layers = quantisable(model)
    if not layers:
        raise UsageError(
            "the model has no linear layers whose weights could be quantised",
            "It is for torch.nn.Linear in float32, float16 or bfloat16, not quantised yet",
        )
    if formats is None:
        asked = [one for one in DEFAULT_FORMATS if has_format(one, capability)]
    else:
        asked = [one for one in dict.fromkeys(formats) if one is not WeightFormat.NONE]
        check_card(asked, capability, card)
    able = [one for one in asked if any(not why_not(layer, one) for layer in layers.values())]
    if not able:
        layer = next(iter(layers.values()))
        why = "; ".join(why for one in asked if (why := why_not(layer, one))) or "none was named"
        raise UsageError(f"no layer can have any of the formats: {why}", "Give other formats")
    return able


def _fitting(
    program: FormatProgram, bytes_of: Bytes, limit: int
) -> tuple[dict[Any, tuple[Formats, int]], int]:
    """Near-optimal choices that reserve no more than a limit, and how many were run."""
    fitting: dict[Any, tuple[Formats, int]] = {}
    tried: dict[Any, int] = {}
    within = limit
    for _ in range(_LIMITS):
        choices = program.near_optimal(within, _CANDIDATES)
        if not choices:
            break
        new = [one for one in choices if _key(one) not in tried]
        found = bytes_of.reserved(new, limit, _FINALISTS - len(fitting)) if new else ()
        for chosen, reserved in zip(new, found, strict=False):
            tried[_key(chosen)] = reserved
            if reserved <= limit:
                fitting[_key(chosen)] = (chosen, reserved)
        if fitting:
            break
        over = min(tried[_key(one)] for one in choices if _key(one) in tried) - limit
        within -= max(_STEP, min(over, within // 8))
    return fitting, len(tried)


def _key(chosen: Formats) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, one.value) for name, one in chosen.items()))


def _no_scores(table: FormatTable) -> LayerScores:
    """Scores by which only bytes count."""
    return LayerScores(
        alone={(layer.name, WeightFormat(one)): 0.0 for layer in table.layers for one in layer.weight}
    )


def _unchanged(table: FormatTable, limit: int, plain: int) -> FormatChoice:
    return FormatChoice(
        formats={},
        budget=limit,
        plain_bytes=plain,
        reserved_bytes=plain,
        predicted_bytes=table.peak({}),
        weight_bytes=(table.weight_bytes({}), table.weight_bytes({})),
        cost=0.0,
        sum_of_costs=0.0,
    )
