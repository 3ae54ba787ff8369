"""Chooses formats of weights for a live model within a budget: bytes on the virtual card, quality where the model is.

NOTE [The limit]: the program counts tensors, and a budget is what torch reserves, which no sum foresees to the byte:
blocks leave gaps. So choices are run on the virtual card, and where the best reserves more than the budget, the
program's limit falls by what it was too much. What is given back was run, and reserved no more than the budget.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.planner.live_choice import LiveAnswers, LiveModel, live_answers
from vramfit.planner.planner_job import free_host_bytes
from vramfit.planner.quantization.format_trial import FormatChoicesQuestion, FormatTableQuestion, ModelUse
from vramfit.techniques.quantization.byte_program import FormatProgram, FormatTable, LayerScores
from vramfit.techniques.quantization.gradient_scores import gradient_scores
from vramfit.techniques.quantization.quality import (
    GivenQuality,
    LogitsDivergence,
    QualityMeasure,
    measured,
    measured_alone,
)
from vramfit.techniques.quantization.weight_formats import (
    DEFAULT_FORMATS,
    WeightFormat,
    check_card,
    has_format,
    quantisable,
    shared_weights,
    why_not,
)
from vramfit.techniques.support.evaluation import in_evaluation
from vramfit.units import format_bytes

Progress = Callable[[str], None]
Formats = Mapping[str, WeightFormat]

_CANDIDATES = 4
"""Programs that are solved for one limit, each other than those before."""

_FINALISTS = 3
"""Choices that fit and are measured together."""

_LIMITS = 12
"""Limits that are tried, each lower than the one before."""

_CLIMBS, _NEIGHBOURS = 6, 4
"""Rounds in which single layers of the best choice get other formats, and how many are run in each."""

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
    """Bytes of a live model, found by a process of its own on the virtual card; see `bytes_elsewhere`."""

    answers: LiveAnswers

    def table(self, formats: Sequence[WeightFormat]) -> FormatTable:
        """See `Bytes.table`."""
        return self.answers.ask(FormatTableQuestion(formats=tuple(one.value for one in formats)))

    def reserved(self, choices: Sequence[Formats], limit: int, enough: int) -> Sequence[int]:
        """See `Bytes.reserved`; the limit is that of the live model's memory."""
        del limit
        plain = tuple({name: one.value for name, one in chosen.items()} for chosen in choices)
        return self.answers.ask(FormatChoicesQuestion(choices=plain, enough=enough)).reserved


@contextmanager
def bytes_elsewhere(
    live: LiveModel, question: ModelUse, progress: Progress | None = None
) -> Iterator[BytesElsewhere]:
    """Bytes of a live model, asked of one process, which ends with the block."""
    with ExitStack() as stack:
        # As quality is measured: dropout would take memory that inference does not.
        with in_evaluation(live.model):
            answers = stack.enter_context(live_answers(live, question, progress))
        yield BytesElsewhere(answers=answers)


def refuse_by_weights(
    model: nn.Module, card: GpuSpec, limit: int, formats: Sequence[WeightFormat] | None = None
) -> None:
    """Refuse a budget that the weights alone exceed in the smallest formats; a sum, before anything is run.

    Raises:
        UsageError: they do, or the card has a format not.
    """
    asked = _formats(model, formats, card.name, card.compute_capability)
    layers = quantisable(model)
    tied = shared_weights(model)
    tensors = {id(one): one.nbytes for one in (*model.parameters(), *model.buffers())}
    linear = sum(layer.weight.nbytes for layer in layers.values() if id(layer.weight) not in tied)
    least = 0
    for layer in layers.values():
        if id(layer.weight) not in tied:
            bits = [_LEAST_BITS[one] for one in asked if not why_not(layer, one)]
            least += min([layer.weight.nbytes, *(layer.weight.numel() * one // 8 for one in bits)])
    others = sum(tensors.values()) - linear
    if others + least > limit:
        raise UsageError(
            f"the weights alone take {format_bytes(others + least)} in the smallest formats, more than the budget of "
            f"{format_bytes(limit)}: {format_bytes(least)} of linear layers ({format_bytes(linear)} as they are) and "
            f"{format_bytes(others)} that no format is for",
            "Allow more, allow other formats, or let layers wait on the host: vramfit.streamed",
        )


_LEAST_BITS = {
    WeightFormat.INT8: 8,
    WeightFormat.INT8_DYNAMIC: 8,
    WeightFormat.INT4: 4,
    WeightFormat.FP8: 8,
    WeightFormat.FP8_WEIGHT_ONLY: 8,
}
"""Of a weight's element, without scales."""


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


class FormatSearch:
    """Chooses formats for one model and one way to use it, for any number of budgets.

    Args:
        model: with its values.
        bytes_of: says what formats take.
        card: the card that it is for.
        formats: those to choose from; None for those that the card has.
        quality: a measure of the user's, the larger the better; None is the divergence of the logits.
        device: where quality is measured; None is where the model is.

    Raises:
        UsageError: the card has a format not, or nothing could be quantised.
    """

    def __init__(
        self,
        model: nn.Module,
        question: ModelUse,
        bytes_of: Bytes,
        *,
        card: GpuSpec,
        formats: Sequence[WeightFormat] | None = None,
        quality: Callable[[nn.Module], Any] | None = None,
        device: torch.device | None = None,
        progress: Progress = lambda _text: None,
    ) -> None:
        self._model, self._question, self._bytes = model, question, bytes_of
        self._asked = _formats(model, formats, card.name, card.compute_capability)
        self._quality = quality
        self._device = device or next(iter(quantisable(model).values())).weight.device
        self._progress = progress
        self._costs: dict[Any, float] = {}

    @functools.cached_property
    def whole_table(self) -> FormatTable:
        """What the model takes in any choice of formats, those that are refused among them."""
        return self._bytes.table(self._asked)

    @functools.cached_property
    def _settings(self) -> tuple[FormatTable, list[str]]:
        return without_raising(self.whole_table, self._asked)

    @property
    def table(self) -> FormatTable:
        """What the model takes in any choice of formats that are not refused."""
        return self._settings[0]

    @functools.cached_property
    def measure(self) -> QualityMeasure:
        """The measure of quality, with the plain model's figures."""
        with in_evaluation(self._model):
            if self._quality is not None:
                return GivenQuality(self._model, self._quality)
            return LogitsDivergence(self._model, self._question.batches)

    @functools.cached_property
    def scores(self) -> LayerScores:
        """What each format of each layer costs by itself."""
        options = {layer.name: [WeightFormat(one) for one in layer.weight] for layer in self.table.layers}
        with in_evaluation(self._model):
            return measured_alone(self._model, options, self.measure, self._device, self._progress)

    @functools.cached_property
    def program(self) -> FormatProgram:
        """The integer program."""
        return FormatProgram(self.table, self.scores)

    @functools.cached_property
    def _graded(self) -> FormatProgram | None:
        """The program with scores by gradients; None where a measure of the user's counts, or there are none."""
        if self._quality is not None:
            return None
        options = {layer.name: [WeightFormat(one) for one in layer.weight] for layer in self.table.layers}
        self._progress("quality by gradients")
        with in_evaluation(self._model):
            found = gradient_scores(
                self._model, options, self._question.batches, self._device, _room_for_gradients(self._model)
            )
        if found is None or not all(map(math.isfinite, found.alone.values())):
            return None
        return FormatProgram(self.table, found)

    def cost(self, chosen: Formats) -> float:
        """What formats cost in quality together; measured once."""
        key = _key(chosen)
        if key not in self._costs:
            with in_evaluation(self._model):
                self._costs[key] = measured(self._model, chosen, self.measure, self._device)
        return self._costs[key]

    def choice(self, limit: int) -> FormatChoice:
        """The formats that cost least in quality among those that stay within a limit.

        Args:
            limit: bytes that torch may reserve, the model included.

        Raises:
            UsageError: every format raises the peak, or the smallest choice does not fit.
        """
        whole = self.whole_table
        plain = whole.uniform[WeightFormat.NONE.value]
        if plain <= limit:
            return _unchanged(whole, limit, plain)
        table, refused = self._settings
        if not any(len(layer.weight) > 1 for layer in table.layers):
            raise UsageError("no format lowers the peak: " + "; ".join(refused), "Give other formats")
        least, reserved = self._least
        if reserved > limit:
            raise UsageError(
                f"the smallest choice of formats reserves {format_bytes(reserved)}, more than the budget of "
                f"{format_bytes(limit)} (the plain model: {format_bytes(plain)})",
                "Allow more, allow other formats, or make the batch smaller",
            )
        fitting, runs = self._fitting(limit)
        fitting = fitting or {_key(least): (least, reserved)}
        runs += self._by_gradients(limit, fitting)
        self._progress("the best choices, all layers together")
        runs += self._climb(limit, fitting)
        costs = {key: self.cost(chosen) for key, (chosen, _) in fitting.items()}
        best = min(costs, key=lambda key: (costs[key], fitting[key][1]))
        chosen, reserved = fitting[best]
        if not math.isfinite(costs[best]):
            raise UsageError(
                "every choice within the budget gives outputs that are not finite",
                "Allow more, or give other formats",
            )
        return FormatChoice(
            formats=chosen,
            budget=limit,
            plain_bytes=plain,
            reserved_bytes=reserved,
            predicted_bytes=table.peak(chosen),
            weight_bytes=(table.weight_bytes({}), table.weight_bytes(chosen)),
            cost=costs[best],
            sum_of_costs=self.program.cost(chosen),
            finalists=tuple(sorted(costs.values())),
            refused=tuple(refused),
            runs=runs + 1,
        )

    @functools.cached_property
    def _least(self) -> tuple[Formats, int]:
        """The choice with the lowest peak, and what it reserves."""
        least = FormatProgram(self.table, _no_scores(self.table)).smallest()
        [reserved] = self._bytes.reserved([least], 0, 1)
        # One format for all layers may do without a workspace that the program counts for any choice.
        return min([(least, reserved), *self._alike()], key=lambda one: one[1])

    def _fitting(self, limit: int) -> tuple[dict[Any, tuple[Formats, int]], int]:
        """Near-optimal choices that reserve no more than a limit, and how many were run; see NOTE [The limit]."""
        fitting: dict[Any, tuple[Formats, int]] = {}
        tried: dict[Any, int] = {}
        for chosen, reserved in self._alike():
            if reserved <= limit and all(item in self.scores.alone for item in chosen.items()):
                fitting[_key(chosen)] = (chosen, reserved)
        within, failed, fitted = limit, 0, 0
        for _ in range(_LIMITS):
            choices = self.program.near_optimal(within, _CANDIDATES)
            new = [one for one in choices if _key(one) not in tried]
            found = self._bytes.reserved(new, limit, _FINALISTS) if new else ()
            tried |= {_key(one): reserved for one, reserved in zip(new, found, strict=False)}
            seen = [(one, tried[_key(one)]) for one in choices if _key(one) in tried]
            fits = {_key(one): (one, reserved) for one, reserved in seen if reserved <= limit}
            fitting |= fits
            if fits:
                fitted = within
            elif choices or fitted:
                failed = within
            if not choices and not fitted:
                break
            if not fitted:
                over = min(reserved for _, reserved in seen) - limit
                within -= max(_STEP, min(over, within // 8))
            elif failed - fitted > limit // 64:  # what reserves a little less may be much better
                within = (failed + fitted) // 2
            else:
                break
        return fitting, len(tried)

    def _by_gradients(self, limit: int, fitting: dict[Any, tuple[Formats, int]]) -> int:
        """Add the choice that gradients prefer to those that fit, so that none is better by them alone.

        Returns:
            how many were run.
        """
        if self._graded is None:
            return 0
        within = limit
        for runs in range(_LIMITS):
            chosen = self._graded.additive(within)
            if chosen is None or _key(chosen) in fitting:
                return runs
            [reserved] = self._bytes.reserved([chosen], limit, 1)
            if reserved <= limit:
                fitting[_key(chosen)] = (chosen, reserved)
                return runs + 1
            within -= max(_STEP, min(reserved - limit, within // 8))
        return _LIMITS

    def _climb(self, limit: int, fitting: dict[Any, tuple[Formats, int]]) -> int:
        """Add choices that cost less than the best and reserve no more, one layer's format after another.

        What the program counts is more than what is reserved where a format does without a workspace, so that it leaves
        room that only a run shows.

        Args:
            fitting: choices that fit; those that are found come to them.

        Returns:
            how many were run.
        """
        failed: set[Any] = set()
        runs = 0
        for _ in range(_CLIMBS):
            best = min(fitting, key=lambda key: (self.cost(fitting[key][0]), fitting[key][1]))
            near = self.program.neighbours(fitting[best][0], _NEIGHBOURS + len(failed))
            new = [one for one in near if _key(one) not in failed and _key(one) not in fitting][:_NEIGHBOURS]
            if not new:
                break
            found = self._bytes.reserved(new, limit, 2)
            runs += len(found)
            failed |= {_key(one) for one, reserved in zip(new, found, strict=False) if reserved > limit}
            fits = [(one, reserved) for one, reserved in zip(new, found, strict=False) if reserved <= limit]
            fitting |= {_key(one): (one, reserved) for one, reserved in fits}
            if not any(self.cost(one) < self.cost(fitting[best][0]) for one, _ in fits):
                break
        return runs

    def _alike(self) -> Iterator[tuple[Formats, int]]:
        """All layers in one format, with what was seen to be reserved: none is to be better than what is chosen."""
        for name, reserved in self.table.uniform.items():
            one = WeightFormat(name)
            chosen = {layer.name: one for layer in self.whole_table.layers if name in layer.weight}
            if one is not WeightFormat.NONE and all(
                name in layer.weight for layer in self.table.layers if layer.name in chosen
            ):
                yield chosen, reserved


def without_raising(table: FormatTable, formats: Sequence[WeightFormat]) -> tuple[FormatTable, list[str]]:
    """The table without settings that raise the peak, and what was refused, in words.

    A format is refused for all layers where the model with all of them in it peaks higher than as it is; for one layer
    where its weight then takes more than before.
    """
    plain = table.peak({})
    refused: list[str] = []
    raising: set[str] = set()
    for one in formats:
        peak = table.peak({layer.name: one for layer in table.layers if one.value in layer.weight})
        if peak > plain:
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


def _key(chosen: Formats) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, one.value) for name, one in chosen.items()))


def _room_for_gradients(model: nn.Module) -> int | None:
    """Half of what the host has free, for a model there; a card says itself when it has no more."""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return None
    return free_host_bytes() // 2


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
