"""Runs a model with more and more of its layers kept on a card, to find how many can stay.

NOTE [How it is found]: memory is not added up but measured: the user's example is run on the virtual GPU with a
candidate's layers on the card, and its cache, activations and workspaces are in the peak as they are in the real run.
The peak with no layer kept says about how many can stay, its neighbour comes next, and then the interval is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.streaming.layer_weights import uses
from vramfit.inference.streaming.weight_placement import LayerPlace, PlacedLayer, WeightPlacement
from vramfit.inference.streaming.weight_stream import StreamCounts, StreamedLayer
from vramfit.planner.devices.cost import DeviceBackend, own_step_cost
from vramfit.planner.planner_job import DeviceMemory
from vramfit.planner.planner_questions import PlannerQuestion, QuestionContext
from vramfit.searching.allowed import Multiples
from vramfit.searching.largest import LargestSearch, Strategy
from vramfit.searching.orders import first_of
from vramfit.searching.tries import Tries
from vramfit.techniques import Choice
from vramfit.techniques.core.surround import surroundings_of
from vramfit.techniques.support.blocks import find_blocks
from vramfit.techniques.weight_streaming import WeightStreaming, WeightStreamingSetting, layer_bytes
from vramfit.units import format_bytes
from vramfit.workload import State, call_model, to_device

Progress = Callable[[str], None]

FORWARD = "forward"

_LEAST_PART = 0.01
"""Part of the weights from which on a module outside of the blocks, such as an embedding, is worth moving by itself."""

_IDLE = 1.05
"""How much longer than the link a run may take before a third slot is tried."""

_FILLINGS = 3
"""How many single layers are tried in what room is left in the end."""


@dataclass(frozen=True, kw_only=True)
class PlacementQuestion(PlannerQuestion[WeightPlacement]):
    """A use of a model that is to fit; goes to another process.

    Attributes:
        example: what the model is called with, or a function of the model and the device that uses it.
        method: the model's method that is called; ``forward`` is the model itself.
        never: whether all layers have to stay on the card.
        slots: how many waiting layers the card has memory for at once; None finds it.
    """

    example: Any
    method: str = FORWARD
    never: bool = False
    slots: int | None = None

    def answer(self, asked: QuestionContext) -> WeightPlacement:
        """See `PlannerQuestion.answer`."""
        return found_placement(asked.device, asked.workload.model, self, asked.memory, asked.progress)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementRun:
    """What a placement took.

    Attributes:
        streamed: names of the layers that waited on the host.
        reserved, allocated: peaks, in bytes.
        seconds: simulated, of the second time that the example was run.
        counts: of that time; None where nothing was streamed.
        slot_bytes: of each slot.
    """

    streamed: tuple[str, ...]
    slots: int
    reserved: int
    allocated: int
    seconds: float
    counts: StreamCounts | None
    slot_bytes: int


def use(model: nn.Module, question: PlacementQuestion, device: torch.device) -> Any:
    """Use a model as the example says."""
    with torch.no_grad():
        if callable(question.example):
            return question.example(model, device)
        target = model if question.method == FORWARD else getattr(model, question.method)
        return call_model(target, to_device(question.example, device))


def candidate_layers(model: nn.Module) -> tuple[dict[str, int], frozenset[str]]:
    """The layers of a model that could wait on the host with their bytes, and which of them are single modules.

    These are the blocks, and outside of them the modules with at least 1 % of the weights, such as a head. One that
    has the model's first parameter is none of these where there are blocks: programs look there where the model is.
    """
    blocks = [block.path for block in find_blocks(model)]
    everything = uses(model)
    least = max(1, _LEAST_PART * sum({id(p): p.nbytes for _, p in everything}.values()))
    first = everything[0][1] if everything and blocks else None
    singles = [
        path
        for path, module in model.named_modules()
        if path
        and next(module.children(), None) is None
        and sum(p.nbytes for p in module._parameters.values() if p is not None) >= least
        and all(p is not first for p in module._parameters.values())
        and not any(path == block or path.startswith(f"{block}.") for block in blocks)
    ]
    sizes = layer_bytes(model, (*blocks, *singles))
    order = {path: at for at, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    found = sorted((path for path, size in sizes.items() if size), key=lambda path: order[path])
    return {path: sizes[path] for path in found}, frozenset(singles)


def refuse_by_weights(model: nn.Module, limit: int, question: PlacementQuestion) -> None:
    """Refuse a budget that the weights alone exceed with one layer on the card; a sum, before anything is run.

    Raises:
        UsageError: they do; or all have to stay, and take more.
    """
    tensors = (*model.parameters(), *model.buffers())
    weights = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
    if weights <= limit:
        return
    if question.never:
        raise UsageError(
            f"the model's weights take {format_bytes(weights)}, {format_bytes(weights - limit)} more than the budget "
            f"of {format_bytes(limit)}",
            'Let layers wait on the host with offload="auto", or allow more',
        )
    layers, singles = candidate_layers(model)
    _refuse(layers, weights, limit)
    blocks = {name: size for name, size in layers.items() if name not in singles} or layers
    others = weights - sum(layers.values())
    least = others + max(blocks.values()) * (question.slots or 1)
    if least > limit:
        raise UsageError(
            f"with one layer on the card at a time the weights alone take {format_bytes(least)}, more than the budget "
            f"of {format_bytes(limit)}: {format_bytes(others)} of them are of no layer that could wait",
            "Allow more, or give the weights fewer bits: vramfit.quantized",
        )


def _refuse(layers: Mapping[str, int], weights: int, limit: int) -> None:
    if not layers:
        raise UsageError(
            f"the model has no layers that could wait on the host, and its weights of {format_bytes(weights)} do not "
            f"fit in {format_bytes(limit)}",
            "Pass a model made of blocks, such as an nn.Sequential",
        )
    largest = max(layers, key=lambda name: layers[name])
    if layers[largest] > limit:
        raise UsageError(
            f"a budget of {format_bytes(limit)} is below the weights of one layer: {largest} has "
            f"{format_bytes(layers[largest])}",
            f"Allow at least {format_bytes(layers[largest])} and what computes it needs",
        )


def spread(count: int) -> list[int]:
    """The numbers below `count` in an order of which each beginning is spread over all of them.

    >>> spread(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = max(1, (count - 1).bit_length())
    return [n for n in (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits)) if n < count]


def found_placement(
    device: DeviceBackend,
    make_model: Callable[[], nn.Module],
    question: PlacementQuestion,
    memory: DeviceMemory,
    progress: Progress = lambda _text: None,
) -> WeightPlacement:
    """The placement within a limit that leaves the most on the card.

    Args:
        memory: its budget is what torch may reserve on the card, the model included.

    Raises:
        UsageError: the example does not fit, even with one layer on the card at a time; or not without waiting layers,
            where these are ruled out.
        VramfitError: the model fails.
    """
    search = _Search(device, make_model, question, memory, progress)
    return search.placement(search.best())


class _Search:
    def __init__(
        self,
        device: DeviceBackend,
        make_model: Callable[[], nn.Module],
        question: PlacementQuestion,
        memory: DeviceMemory,
        progress: Progress,
    ) -> None:
        self.device, self.make_model, self.question = device, make_model, question
        self.memory, self.limit = memory, memory.budget
        model = make_model()
        self.layers, self.singles = candidate_layers(model)
        tensors = [*model.parameters(), *model.buffers()]
        self.weights = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        del model, tensors
        self.tries: Tries[tuple[tuple[str, ...], int], PlacementRun] = Tries(
            lambda placement: self._run(*placement),
            progress=lambda placement: progress(
                f"{len(self.layers) - len(placement[0])} of {len(self.layers)} layers on the card"
            ),
        )

    # -- the search ----------------------------------------------------------------------------------------------

    def best(self) -> PlacementRun:
        """The run that leaves the most on the card."""
        if self.question.never or self.weights <= self.limit:
            plain = self.run((), 0)
            if self._fits(plain):
                return plain
            if self.question.never:
                raise self._does_not_fit(plain)
        _refuse(self.layers, self.weights, self.limit)
        least = self._least()
        kept, best = self._most_kept(least)
        best = self._filled(kept, best)
        return self._with_third_slot(kept, best)

    def _least(self) -> PlacementRun:
        """The run with every layer on the host."""
        numbers = (2, 1) if self.question.slots is None else (self.question.slots,)
        tried = first_of(numbers, self._with_all_waiting, self._fits)
        least = tried.answer
        if tried.enough:
            return least
        raise UsageError(
            f"with {least.slots} of {len(self.layers)} layers on the card at once the example reserves "
            f"{format_bytes(least.reserved)}, more than the budget of {format_bytes(self.limit)}: "
            f"{format_bytes(least.slots * least.slot_bytes)} of weights in slots, "
            f"{format_bytes(self.weights - sum(self.layers.values()))} of other weights, "
            f"{format_bytes(max(0, least.allocated - self._held(least)))} of activations and caches, and "
            f"{format_bytes(least.reserved - least.allocated)} in segments beside what is allocated",
            "Allow more, or use smaller batches and shorter sequences",
        )

    def _with_all_waiting(self, slots: int) -> PlacementRun:
        """The run with every layer on the host, but for single modules where the program fails without them.

        It may read such a module's weights without calling it.
        """
        try:
            return self.run(tuple(self.layers), slots)
        except Exception:  # whatever a program raises that meets a tensor of the host
            if not self.singles or len(self.singles) == len(self.layers):
                raise
            self.layers = {name: size for name, size in self.layers.items() if name not in self.singles}
            self.singles = frozenset()
            return self.run(tuple(self.layers), slots)

    def _most_kept(self, least: PlacementRun) -> tuple[list[str], PlacementRun]:
        """The layers that stay, and the run with them."""
        order = self._order(least)
        room, guess = self.limit - least.reserved, 0
        while guess < len(order) and self.layers[order[guess]] <= room:
            room -= self.layers[order[guess]]
            guess += 1
        # With all it is known not to fit, or to be left to the plain run.
        strategy = Strategy(allowed=Multiples(most=len(order) - 1), start=guess, steps=(1,), fails_above=True)
        most = LargestSearch(
            lambda count: self.run(self._waiting(order[:count]), least.slots), self._fits, strategy
        ).run()
        return order[: most.value], most.answer or least

    def _order(self, least: PlacementRun) -> list[str]:
        """The layers in the order in which they are kept: what would cross most often for its bytes first."""
        calls = self._calls(least)
        blocks = [name for name in self.layers if name not in self.singles]  # the first has first parameters
        spread_out = {blocks[number]: at for at, number in enumerate(spread(len(blocks)))}
        return sorted(
            self.layers, key=lambda name: (-calls[name], name in spread_out, spread_out.get(name, 0))
        )

    def _filled(self, kept: list[str], best: PlacementRun) -> PlacementRun:
        """The run with single further layers in what room is left: smaller ones than the one that did not fit."""
        failed = max((self.layers[name] for name in best.streamed), default=0)
        for _ in range(_FILLINGS):
            smaller = sorted(
                (name for name in best.streamed if self.layers[name] < failed),
                key=lambda one: self.layers[one],
            )
            if not smaller or len(best.streamed) <= best.slots:
                break
            room = self.limit - best.reserved
            more = next((name for name in reversed(smaller) if self.layers[name] <= room), smaller[0])
            run = self.run(self._waiting([*kept, more]), best.slots)
            if self._fits(run):
                kept.append(more)
                best = run
            else:
                failed = self.layers[more]
        return best

    def _with_third_slot(self, kept: list[str], best: PlacementRun) -> PlacementRun:
        """The run with three slots where two leave the link idle, and that is quicker within the limit."""
        transfer = self._transfer_seconds(best)
        if (
            self.question.slots is not None
            or best.slots != 2
            or len(best.streamed) < 3
            or best.seconds <= _IDLE * transfer
        ):
            return best
        fewer = list(kept)
        room = self.limit - best.reserved
        while room < best.slot_bytes and fewer:
            room += self.layers[fewer.pop()]
        if room < best.slot_bytes:
            return best
        run = self.run(self._waiting(fewer), 3)
        return run if self._fits(run) and run.seconds < best.seconds else best

    def _held(self, run: PlacementRun) -> int:
        """Bytes of weights on the card in a run with all layers waiting."""
        return run.slots * run.slot_bytes + self.weights - sum(self.layers.values())

    def _waiting(self, kept: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in self.layers if name not in set(kept))

    def _does_not_fit(self, plain: PlacementRun) -> UsageError:
        beside = max(0, plain.allocated - self.weights)
        return UsageError(
            f"the model does not fit without waiting layers: weights of {format_bytes(self.weights)}, "
            f"{format_bytes(beside)} of activations and caches and {format_bytes(plain.reserved - plain.allocated)} "
            f"in segments beside what is allocated make {format_bytes(plain.reserved)}, "
            f"{format_bytes(plain.reserved - self.limit)} more than the budget "
            f"of {format_bytes(self.limit)}",
            'Let layers wait on the host with offload="auto", or allow more',
        )

    # -- runs ----------------------------------------------------------------------------------------------------

    def run(self, streamed: tuple[str, ...], slots: int) -> PlacementRun:
        """Run the example twice with these layers on the host."""
        return self.tries((streamed, min(slots, len(streamed))))

    def _fits(self, run: PlacementRun) -> bool:
        return run.reserved <= self.limit

    def _run(self, streamed: tuple[str, ...], slots: int) -> PlacementRun:
        seen: list[tuple[StreamCounts, int]] = []

        def step(state: State, _batch: Any) -> None:
            stream = next(_streams(state.model), None)
            if stream is not None:
                stream.counts = StreamCounts()
            use(state.model, self.question, state.device)
            if stream is not None:
                seen.append((stream.counts, stream.slot_bytes))

        choices: tuple[Choice, ...] = ()
        if streamed:
            setting = WeightStreamingSetting(modules=streamed, slots=slots)
            choices = (Choice(technique=WeightStreaming(), setting=setting),)
        found = own_step_cost(self.device, self.make_model, step, choices=choices)
        counts, slot_bytes = seen[-1] if seen else (None, 0)
        return PlacementRun(
            streamed=streamed,
            slots=slots,
            reserved=found.peak_reserved_bytes,
            allocated=found.peak_allocated_bytes,
            seconds=found.step_seconds,
            counts=counts,
            slot_bytes=slot_bytes,
        )

    def _calls(self, run: PlacementRun) -> dict[str, int]:
        known = {} if run.counts is None else run.counts.calls
        numbers = {name: number for number, name in enumerate(run.streamed)}
        return {name: known.get(numbers[name], 0) if name in numbers else 0 for name in self.layers}

    def _transfer_seconds(self, run: PlacementRun) -> float:
        link = 0.0 if self.memory.gpu is None else self.memory.gpu.host_link
        return run.counts.nbytes / link if run.counts is not None and link else 0.0

    def placement(self, run: PlacementRun) -> WeightPlacement:
        """The decision for a run."""
        whole = next(
            (one for one in self.tries.answers.values() if len(one.streamed) == len(self.layers)), run
        )
        calls = {**self._calls(whole), **{name: n for name, n in self._calls(run).items() if n}}
        waiting = set(run.streamed)
        return WeightPlacement(
            card="CPU" if self.memory.gpu is None else self.memory.gpu.name,
            budget_bytes=self.limit,
            slots=run.slots,
            slot_bytes=run.slot_bytes,
            layers=tuple(
                PlacedLayer(
                    name=name,
                    nbytes=size,
                    place=LayerPlace.HOST if name in waiting else LayerPlace.CARD,
                    calls=calls[name],
                )
                for name, size in self.layers.items()
            ),
            other_bytes=self.weights - sum(self.layers.values()),
            peak_reserved_bytes=run.reserved,
            peak_allocated_bytes=run.allocated,
            carried_bytes=0 if run.counts is None else run.counts.nbytes,
            transfer_seconds=self._transfer_seconds(run),
            seconds=run.seconds,
            runs=len(self.tries),
        )


def _streams(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for around in surroundings_of(module):
            if isinstance(around, StreamedLayer):
                yield around.stream
