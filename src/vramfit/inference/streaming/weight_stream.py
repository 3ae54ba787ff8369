"""Which layer's weights are brought to the card, and when."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.inference.host_lane import Lane, lane_of
from vramfit.inference.streaming.call_order import CallOrder
from vramfit.inference.streaming.layer_weights import LayerWeights, laid_out
from vramfit.inference.streaming.weight_slots import WeightSlot


class WeightSource(Protocol):
    """Where a layer's weights are read from when it is brought."""

    def open(self, largest: int) -> None:
        """Get ready for layers of at most so many bytes."""
        ...

    def close(self) -> None:
        """Give back what `open` took."""
        ...

    def prepare(self, layer: LayerWeights) -> None:
        """Say that a layer is wanted soon."""
        ...

    def ready(self, layer: LayerWeights) -> bool:
        """Whether `tensors` would not wait."""
        ...

    def tensors(self, layer: LayerWeights) -> list[torch.Tensor]:
        """Its weights on the host, by number; they stay as they are until `copied`."""
        ...

    def copied(self, layer: LayerWeights, end: Any, lane: Lane) -> None:
        """Say when the copies of what `tensors` gave are over, and which lane knows that."""
        ...


class InHostMemory:
    """Weights are in the host's memory, as the parameters' own data."""

    def open(self, largest: int) -> None:
        """See `WeightSource`."""

    def close(self) -> None:
        """See `WeightSource`."""

    def prepare(self, layer: LayerWeights) -> None:
        """See `WeightSource`."""

    def ready(self, layer: LayerWeights) -> bool:  # noqa: ARG002  # of any
        """See `WeightSource`."""
        return True

    def tensors(self, layer: LayerWeights) -> list[torch.Tensor]:
        """See `WeightSource`."""
        return [parameter.detach() for parameter in layer.parameters]

    def copied(self, layer: LayerWeights, end: Any, lane: Lane) -> None:
        """See `WeightSource`."""


@dataclass(slots=True)
class StreamCounts:
    """What was carried so far.

    Attributes:
        copies: how often a layer's weights were brought.
        nbytes: of these.
        awaited: how often they were first asked for when their layer was called.
        calls: of each layer, by its number.
    """

    copies: int = 0
    nbytes: int = 0
    awaited: int = 0
    calls: dict[int, int] = field(default_factory=dict)


class WeightStream:
    """The layers of one model whose weights come to the card when they are called, into a few slots.

    A copy of the model has a stream of its own, whose weights are wherever the copy's parameters are. One thread at a
    time may run the model.

    Args:
        device: where the model computes.
        count: how many layers there are.
        slots: how many of them may be on the device at once; from two on copies run beside the computation.
        lane: carries the copies; None takes the device's own.
        source: where weights are read from; None takes the parameters' own data.
    """

    def __init__(
        self,
        device: torch.device,
        count: int,
        slots: int,
        *,
        lane: Lane | None = None,
        source: WeightSource | None = None,
    ) -> None:
        self._device, self._count, self._slot_count = device, count, slots
        self._given_lane, self._lane = lane, lane
        self._source: WeightSource = source or InHostMemory()
        self._layers: dict[int, tuple[weakref.ref[nn.Module], LayerWeights]] = {}
        self._slots: list[WeightSlot] = []
        self._inside: dict[int, tuple[int, WeightSlot | None]] = {}
        self._order = CallOrder(count)
        self.counts = StreamCounts()

    def __reduce__(self) -> tuple[Any, ...]:
        """Slots, copies and files belong to this object alone."""
        return WeightStream, (self._device, self._count, self._slot_count)

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot."""
        return max((laid_out(weights.parameters)[1] for _, weights in self._layers.values()), default=0)

    def add(self, number: int, module: nn.Module, names: Sequence[str]) -> LayerWeights:
        """A layer, by its number; known from then on."""
        known = self._layers.get(number)
        if known is None or known[0]() is not module:
            weights = LayerWeights(module, names)
            self.close()  # slots are made anew, as large as is needed now
            known = self._layers[number] = weakref.ref(module), weights
        return known[1]

    def open(self) -> None:
        """Take the slots' memory, where that was not done."""
        if not self._slots and self._layers:
            self._lane = self._lane or lane_of(self._device)
            size = self.slot_bytes
            self._source.open(size)
            self._slots = [
                WeightSlot(size, self._device, self._lane) for _ in range(min(self._slot_count, self._count))
            ]

    def close(self) -> None:
        """Give the slots' memory back, once copies on their way have ended."""
        for slot in self._slots:
            slot.drop()
        if self._slots:
            self._source.close()
        self._slots.clear()
        self._lane = self._given_lane

    # -- calls ---------------------------------------------------------------------------------------------------

    @contextmanager
    def visit(self, number: int, module: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """A call of a layer: inside, its modules see weights on the device."""
        weights = self.add(number, module, names)
        depth, slot = self._inside.get(number, (0, None))
        if not depth:
            slot = self._enter(number, weights)
        self._inside[number] = depth + 1, slot
        try:
            yield
        finally:
            if depth:
                self._inside[number] = depth, slot
            else:
                del self._inside[number]
                self._leave(weights, slot)

    @contextmanager
    def visit_part(
        self, number: int, path: str, part: nn.Module, names: tuple[str, ...], part_names: tuple[str, ...]
    ) -> Iterator[None]:
        """A call of a module inside of a layer, alone or while the layer is called."""
        known = self._layers.get(number)
        whole = None if known is None else known[0]()
        if number in self._inside:
            yield
        elif whole is not None and whole.get_submodule(path) is part:
            with self.visit(number, whole, names):
                yield
        else:  # of a copy of the model whose layer did not run yet
            self.open()
            weights = LayerWeights(part, part_names)
            self._enter_beside(weights)
            try:
                yield
            finally:
                weights.show(list(weights.parameters))

    def _enter(self, number: int, weights: LayerWeights) -> WeightSlot | None:
        self.open()
        self.counts.calls[number] = self.counts.calls.get(number, 0) + 1
        self._order.note(number)
        slot = next((one for one in self._slots if one.holds(weights)), None)
        if slot is None:
            slot = self._slot_for(weights)
            self.counts.awaited += 1
            if slot is None:
                self._enter_beside(weights)
                return None
            self._bring(slot, weights)
        slot.users += 1
        try:
            weights.show(slot.arrive())
            self._bring_ahead()
        except BaseException:  # a file of what comes next cannot be read
            slot.users -= 1
            weights.show(list(weights.parameters))
            raise
        return slot

    def _enter_beside(self, weights: LayerWeights) -> None:
        """All slots are in use, by layers that call this one: its weights get memory for this call alone."""
        assert self._lane is not None
        made, end = self._lane.back(self._source.tensors(weights))
        self._source.copied(weights, end, self._lane)
        self._count_copy(weights)
        self._lane.wait(end)
        weights.show([nn.Parameter(one, requires_grad=False) for one in made])

    def _leave(self, weights: LayerWeights, slot: WeightSlot | None) -> None:
        weights.show(list(weights.parameters))
        if slot is not None:
            slot.users -= 1
            slot.done()
            self._bring_ahead()

    def _bring_ahead(self) -> None:
        """Begin copies of what comes next, into slots that nobody needs before."""
        used = [slot.layer for slot in self._slots if slot.users]
        room = len(self._slots) - len(used)
        wanted: list[LayerWeights] = []
        for number in self._order.upcoming():
            if len(wanted) > room:
                break
            weights = self._layers[number][1] if number in self._layers else None
            if weights is not None and weights not in wanted and weights not in used:
                wanted.append(weights)
        later, wanted = wanted[room:], wanted[:room]
        for weights in wanted:
            if any(slot.holds(weights) for slot in self._slots):
                continue
            self._source.prepare(weights)
            free = [slot for slot in self._slots if not slot.users]
            # Where its weights were, if they were written to since: in two slots it would take another's room.
            slot = next((slot for slot in free if slot.layer is weights), None) or next(
                slot for slot in free if slot.layer not in wanted
            )
            if not self._source.ready(weights):
                return
            self._bring(slot, weights)
        for weights in later:
            if not any(slot.holds(weights) for slot in self._slots):
                self._source.prepare(weights)

    def _slot_for(self, weights: LayerWeights) -> WeightSlot | None:
        """The slot whose layer is needed last, of those that no call uses."""
        stale = next((slot for slot in self._slots if slot.layer is weights and not slot.users), None)
        if stale is not None:
            return stale
        upcoming = [
            self._layers[one][1]
            for one in islice(self._order.upcoming(), 2 * self._count)
            if one in self._layers
        ]

        def distance(slot: WeightSlot) -> int:
            return next((at for at, one in enumerate(upcoming) if one is slot.layer), len(upcoming))

        return max((slot for slot in self._slots if not slot.users), key=distance, default=None)

    def _bring(self, slot: WeightSlot, weights: LayerWeights) -> None:
        assert self._lane is not None
        self._source.copied(weights, slot.fill(weights, self._source.tensors(weights)), self._lane)
        self._count_copy(weights)

    def _count_copy(self, weights: LayerWeights) -> None:
        self.counts.copies += 1
        self.counts.nbytes += weights.nbytes


class StreamedLayer:
    """Surrounds a layer whose weights are brought for its calls.

    Args:
        stream: of its model.
        number: of the layer.
        names: of the parameters that are brought, in the layer.
    """

    def __init__(self, stream: WeightStream, number: int, names: tuple[str, ...]) -> None:
        self.stream, self._number, self._names = stream, number, names

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass with weights on the device, and without a graph for gradients."""
        with torch.no_grad(), self.stream.visit(self._number, module, self._names):
            return forward(*args, **kwargs)


class StreamedPart:
    """Surrounds a module inside of a layer, which a model may call alone: the whole layer is brought for it.

    Args:
        stream: of its model.
        number: of the layer.
        path: of the module in the layer.
        names: of the parameters that are brought, in the layer.
        part_names: those of them that are in the module, in the module.
    """

    def __init__(
        self,
        stream: WeightStream,
        number: int,
        path: str,
        names: tuple[str, ...],
        part_names: tuple[str, ...],
    ) -> None:
        self._stream, self._place = stream, (number, path)
        self._names, self._part_names = names, part_names

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass with weights on the device, and without a graph for gradients."""
        number, path = self._place
        with (
            torch.no_grad(),
            self._stream.visit_part(number, path, module, self._names, self._part_names),
        ):
            return forward(*args, **kwargs)
