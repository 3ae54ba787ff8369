"""Runs a model with formats of weights on a device: what each layer takes in each, and what choices reserve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.devices.cost import DeviceBackend, StepCost, own_step_cost
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.techniques import Choice, with_choices
from vramfit.techniques.quantization import WeightQuantization, WeightQuantizationSetting
from vramfit.techniques.quantization.byte_program import FormatTable
from vramfit.techniques.quantization.layer_bytes import WatchedRun, table_of, watched, weight_bytes
from vramfit.techniques.quantization.weight_formats import WeightFormat, quantisable
from vramfit.workload import Batch, State, Workload, call_model, to_device

Progress = Callable[[str], None]
Use = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True, kw_only=True)
class ModelUse:
    """How a model is used; goes to another process with it.

    Attributes:
        batches: what it is called with, one after another.
        use: given the model and a batch, what is done with them; None calls the model.
    """

    batches: tuple[Batch, ...]
    use: Use | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedFormats:
    """What choices reserve, in bytes, in the order in which they were given; shorter where enough fitted."""

    reserved: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatTableQuestion(PlannerQuestion[FormatTable]):
    """What a model takes with its layers in each format.

    Attributes:
        formats: by name.
    """

    formats: tuple[str, ...]

    def answer(self, asked: QuestionContext) -> FormatTable:
        """See `PlannerQuestion.answer`."""
        formats = [WeightFormat(name) for name in self.formats]
        return format_table(asked.device, asked.workload.model, asked.packed(), formats, asked.progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoicesQuestion(PlannerQuestion[TriedFormats]):
    """What torch reserves with some choices of formats.

    Attributes:
        choices: formats of layers, by name, those that stay as they are left out.
        enough: choices that fit after which no more are run.
    """

    choices: tuple[dict[str, str], ...]
    enough: int

    def answer(self, asked: QuestionContext) -> TriedFormats:
        """See `PlannerQuestion.answer`."""
        choices = [{layer: WeightFormat(name) for layer, name in choice.items()} for choice in self.choices]
        return try_formats(
            asked.device,
            asked.workload.model,
            asked.packed(),
            choices,
            asked.memory.budget,
            self.enough,
            asked.progress,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """The layers that are watched, and what was seen of them in each step."""

    names: tuple[str, ...]
    runs: list[WatchedRun] = field(default_factory=list)


def format_table(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: ModelUse,
    formats: Sequence[WeightFormat],
    progress: Progress = lambda _text: None,
) -> FormatTable:
    """What a model takes in any choice of formats: it runs once as it is, and once with all layers in each format.

    Raises:
        UsageError: the model has no layer that any format is for.
        VramfitError: the model fails.
    """
    names = list(quantisable(make_model()))
    if not names:
        raise UsageError(
            "the model has no linear layers whose weights could be quantised",
            "It is for torch.nn.Linear in float32, float16 or bfloat16, not quantised yet",
        )
    weights: dict[str, tuple[dict[str, int], dict[str, int]]] = {}

    def pack(state: State, _batch: Any) -> None:
        if not weights:
            weights.update(weight_bytes(make_model(), formats, state.device))

    progress("the bytes of weights in each format")
    own_step_cost(device, lambda: nn.Linear(1, 1), pack)
    runs: dict[WeightFormat, WatchedRun] = {}
    uniform: dict[str, int] = {}
    for one in (WeightFormat.NONE, *formats):
        chosen = {name: one for name, (sizes, _) in weights.items() if one.value in sizes}
        if one is not WeightFormat.NONE and not chosen:
            continue
        progress(
            "the plain model" if one is WeightFormat.NONE else f"the model with its weights in {one.value}"
        )
        watching = Watching(names=tuple(names))
        cost = run_formats(device, make_model, question, chosen, watching)
        runs[one], uniform[one.value] = watching.runs[-1], cost.peak_reserved_bytes
    return table_of(weights, runs, uniform)


def try_formats(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: ModelUse,
    choices: Iterable[Mapping[str, WeightFormat]],
    limit: int,
    enough: int,
    progress: Progress = lambda _text: None,
) -> TriedFormats:
    """What torch reserves with choices, until enough of them fit.

    Args:
        limit: bytes that torch may reserve.
        enough: choices that fit after which no more are run.
    """
    reserved: list[int] = []
    for number, chosen in enumerate(choices):
        progress(f"choice {number + 1} of formats, all layers together")
        reserved.append(run_formats(device, make_model, question, chosen).peak_reserved_bytes)
        if sum(one <= limit for one in reserved) >= enough:
            break
    return TriedFormats(reserved=tuple(reserved))


def run_formats(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: ModelUse,
    chosen: Mapping[str, WeightFormat],
    watching: Watching | None = None,
    budget: int | None = None,
) -> StepCost:
    """What a model with formats costs on a device, from its way there on.

    Args:
        watching: whose layers are watched, and gets what was seen of their calls.
        budget: bytes of the device; None for as many as it takes.
    """
    sizes = {"batch_size": 1}
    workload = Workload(
        model=make_model,
        batch=lambda batch_size: torch.empty(batch_size),
        sizes=sizes,
        step=partial(_step, question, watching),
    )
    changed = {name: one for name, one in chosen.items() if one is not WeightFormat.NONE}
    if changed:
        setting = WeightQuantizationSetting(formats=changed)
        workload = with_choices(workload, (Choice(technique=WeightQuantization(), setting=setting),))
    return device.step_cost(workload, sizes, budget)


def _step(question: ModelUse, watching: Watching | None, state: State, _batch: Any) -> None:
    use = question.use or call_model
    with torch.no_grad():
        if watching is None:
            for batch in question.batches:
                use(state.model, to_device(batch, state.device))
            return
        with watched(state.model, watching.names) as run:
            for batch in question.batches:
                use(state.model, to_device(batch, state.device))
        watching.runs.append(run)
