"""Chooses the size of chunks for a live model within a budget: asked here, found on the virtual GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import GpuSpec
from vramfit.inference.input_chunks import ChunkSettings, call_in_chunks, find_input_cut, moved
from vramfit.planner.asking import ask
from vramfit.planner.devices.cost import DeviceBackend, own_step_cost
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.planner.tile_search import TileCost, TileOption, TileSearch
from vramfit.units import format_bytes
from vramfit.workload.containers import tensors_in

Progress = Callable[[str], None]

_CHUNKS = 3
"""Chunks that are run: outputs are allocated with the first, the second follows on it, the third as on the second."""

_PARTS_UP_TO = 8
"""Numbers of chunks that are all looked at; of more, each is about half more than the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenChunk:
    """The size of chunks that is the quickest within a limit.

    Attributes:
        size: entries in a chunk.
        reserved_bytes: peak of what torch reserves, the model included.
        seconds: for the whole call, estimated from the first chunks.
        runs: sizes that were run to find it.
    """

    size: int
    reserved_bytes: int
    seconds: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class ChunkQuestion(PlannerQuestion[ChosenChunk]):
    """A call that is to be cut; goes to another process.

    Attributes:
        call: arguments of the model, and those by name.
        settings: how it is cut, but for the size; of its devices only whether they are the host counts.
        host_inputs: whether inputs wait on the host.
        host_outputs: whether outputs are joined there.
    """

    call: Any
    settings: ChunkSettings
    host_inputs: bool
    host_outputs: bool

    def answer(self, asked: QuestionContext) -> ChosenChunk:
        """See `PlannerQuestion.answer`."""
        return quickest_chunk(asked.device, asked.workload.model, self, asked.memory.budget, asked.progress)


def choose_chunk(
    model: Any,
    call: Any,
    settings: ChunkSettings,
    *,
    budget: str | float | None = None,
    gpu: str | os.PathLike[str] | GpuSpec | None = None,
    progress: Progress | None = None,
) -> ChosenChunk:
    """The size of chunks with which a call takes the least time within a budget.

    Args:
        model: a module; its values stay here, its structure goes to another process.
        call: its arguments, and those by name.
        settings: how it is cut, but for the size.
        budget: bytes that torch may reserve on the device, the model included; None for what is free there, less 2 %.
        gpu: the card that it is chosen for; None for the device's own.

    Raises:
        UsageError: the model cannot go to another process, there is no budget to choose by, or single entries do not
            fit.
        VramfitError: the model fails.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            "a size is chosen for a module, whose structure can be looked at",
            "Give size=, or wrap the function",
        )
    inputs = list(tensors_in(call))
    device = settings.device or (inputs[0].device if inputs else torch.device("cpu"))
    question = ChunkQuestion(
        call=call,
        settings=replace(settings, size=1, device=None, output_device=None, check=False),
        host_inputs=all(tensor.device.type == "cpu" for tensor in inputs),
        host_outputs=settings.output_device is not None and settings.output_device.type == "cpu",
    )
    live = LiveModel(model=model, device=device, budget=budget, gpu=gpu)
    return ask(question, live, progress=progress)


def quickest_chunk(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: ChunkQuestion,
    limit: int,
    progress: Progress = lambda _text: None,
) -> ChosenChunk:
    """The size of chunks with which a call takes the least time within a limit.

    Args:
        limit: bytes that torch may reserve on the device, the model included.

    Raises:
        UsageError: single entries do not fit.
        VramfitError: the model fails.
    """
    extent = max(1, find_input_cut(question.call, question.settings).extent)
    sizes = sorted({-(-extent // parts) for parts in _part_numbers(extent)}, reverse=True)
    options = [TileOption(tile=(size,), batch=1, count=-(-extent // size)) for size in sizes]

    def cost(option: TileOption) -> TileCost:
        progress(f"chunks of {option.tile[0]:,}")

        def step(state: Any, _batch: Any) -> None:
            settings = replace(
                question.settings,
                size=option.tile[0],
                device=state.device if question.host_inputs else None,
                output_device=torch.device("cpu") if question.host_outputs else None,
            )
            call = question.call if question.host_inputs else moved(question.call, state.device)
            call_in_chunks(state.model, call, settings, first=_CHUNKS)

        found = own_step_cost(device, make_model, step)
        return TileCost(
            fits=found.peak_reserved_bytes <= limit,
            total_bytes=found.peak_reserved_bytes,
            seconds=found.step_seconds * option.count / min(option.count, _CHUNKS),
        )

    search = TileSearch(options, cost, limit)
    best = search.best()
    if best is None:
        option, least = search.smallest
        raise UsageError(
            f"chunks of {option.tile[0]} reserve {format_bytes(least.total_bytes)}, more than the budget of "
            f"{format_bytes(limit)}",
            "Allow more, keep inputs and outputs on the host, or take a smaller model or precision",
        )
    option, chosen = best
    return ChosenChunk(
        size=option.tile[0],
        reserved_bytes=chosen.total_bytes,
        seconds=chosen.seconds,
        runs=len(search.seen),
    )


def _part_numbers(extent: int) -> list[int]:
    found, parts = [], 1
    while parts < extent:
        found.append(parts)
        parts = parts + 1 if parts < _PARTS_UP_TO else parts * 3 // 2
    return [*found, extent]
