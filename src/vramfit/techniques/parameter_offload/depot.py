"""Which blocks' parameters are on the card at the moment.

NOTE [Visits]: in the forward pass a block finds its own parameters and those of the blocks that come next on their
way, and its own go when it is done; those of the last block stay, for the backward pass begins there. In the backward
pass the graph asks for weights, the blocks before are called, and the ones behind go. What was brought in one sweep of
the forward pass is used in no other: in between the optimizer may have stepped. Memory for parameters is so at most
that of ``1 + ahead`` blocks, and one more where a block asks while the last one's backward pass still runs.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.inference.host_lane import CopyLane, CudaLane, Lane
from vramfit.inference.streaming.layer_weights import LayerWeights
from vramfit.techniques.support.saved import (
    Packed,
    StoragePlace,
    in_backward,
    is_plain,
    storage_key,
    written_in_place,
)
from vramfit.torch_internals.autograd_engine import (
    current_graph_task_id,
    execution_engine,
    will_engine_execute_node,
)


class Visitors(LayerWeights):
    """The parameters of a block, and their copies on the card while these are there."""

    def __init__(self, depot: Depot, index: int, module: nn.Module, names: tuple[str, ...]) -> None:
        self._there: list[torch.Tensor] | None = None
        self._end: Any = None
        self._came: Any = None
        self.depot, self.index, self.module = depot, index, weakref.ref(module)
        super().__init__(module, names)
        self.sweep = -1

    def __del__(self) -> None:
        """Memory that a copy is still to be written to must not serve another before."""
        self.leave()

    @property
    def there(self) -> bool:
        """Whether they are on the card, or on their way to it."""
        return self._there is not None

    def call(self) -> None:
        """Begin their copies to the card."""
        if self._there is None:
            self._there, self._end = self.depot.lane.back([p.detach() for p in self.parameters])
            self._came = self._end

    def arrive(self) -> list[torch.Tensor]:
        """Their copies, for what is computed from now on."""
        self.call()
        self._settle()
        assert self._there is not None
        return self._there

    def have_come(self) -> None:
        """Wait on the host for the copies: the parameters may be written to then."""
        if self._came is not None:
            self.depot.lane.finish(self._came)
            self._came = None

    def leave(self) -> None:
        """Drop the copies."""
        self._settle()
        self._there = self._came = None

    def _settle(self) -> None:
        if self._end is not None:
            self.depot.lane.wait(self._end)
            self._end = None

    def keys(self) -> dict[int, int]:
        """Number of each parameter, by the storage of its copy."""
        return {storage_key(copy): number for number, copy in enumerate(self._there or ())}


class Visit:
    """What the graph holds of a weight: where to get it."""

    __slots__ = ("_number", "_place", "_version", "_visitors")

    def __init__(self, visitors: Visitors, number: int, place: StoragePlace) -> None:
        self._visitors, self._number, self._place = visitors, number, place
        self._version = visitors.parameters[number]._version

    def unpack(self) -> torch.Tensor:
        """The weight, on the card.

        Raises:
            RuntimeError: it was changed after the forward pass.
        """
        parameter = self._visitors.parameters[self._number]
        if parameter._version != self._version:
            raise written_in_place(parameter, self._version)
        copy = self._visitors.depot.fetch(self._visitors)[self._number]
        return self._place.of(copy, 0)


class Depot:
    """All blocks of a model. Copies and pickles of it know none, and send gradients to the host.

    Args:
        count: how many blocks there are.
        ahead: how many blocks are brought before they are asked for.
        keeps_gradients: whether gradients stay on the device until `Gradients.gather`.
    """

    def __init__(self, device: torch.device, count: int, ahead: int, keeps_gradients: bool = False) -> None:
        self._device, self._count, self._ahead = device, count, ahead
        self._lane: Lane | None = None
        self._known: dict[int, Visitors] = {}
        self._apart: dict[tuple[int, str], Visitors] = {}
        # By block, whose copies are in the parameters' places, and the innermost of the hooks for saved tensors.
        self.visiting: dict[int, tuple[Visitors, Any]] = {}
        self._sweep = self._last = -1
        self._task = -1
        self.gradients = Gradients(self, keeps_gradients)

    def __reduce__(self) -> tuple[Any, ...]:
        """Streams and copies belong to this object alone."""
        return Depot, (self._device, self._count, self._ahead)

    @property
    def lane(self) -> Lane:
        """Copies between the host and the device."""
        if self._lane is None:
            self._lane = CudaLane(self._device) if self._device.type == "cuda" else CopyLane()
        return self._lane

    def visitors(self, index: int, module: nn.Module, names: tuple[str, ...]) -> Visitors:
        """The parameters of a block."""
        known = self._known.get(index)
        if known is None or known.module() is not module:
            known = self._known[index] = Visitors(self, index, module, names)
        return known

    def block_of(self, index: int, path: str, part: nn.Module) -> Visitors | None:
        """The parameters of the block that a module is a part of; None where the block did not run yet."""
        known = self._known.get(index)
        block = None if known is None else known.module()
        return known if block is not None and block.get_submodule(path) is part else None

    def apart(self, index: int, path: str, part: nn.Module, names: tuple[str, ...]) -> Visitors:
        """The parameters of a part of a block that runs by itself."""
        known = self._apart.get((index, path))
        if known is None or known.module() is not part:
            known = self._apart[index, path] = Visitors(self, index, part, names)
        return known

    def enter(self, visitors: Visitors) -> list[torch.Tensor]:
        """A block's forward pass begins: its copies. See NOTE [Visits]."""
        if in_backward():  # a recomputation
            return self.fetch(visitors)
        if visitors.index <= self._last or self._last < 0:
            self._sweep += 1
        self._last = visitors.index
        wanted = self._near(visitors.index, 1)
        for known in self._known.values():
            if known.index not in wanted or known.sweep != self._sweep:
                known.leave()
        visitors.sweep = self._sweep
        copies = visitors.arrive()
        self._call_ahead(wanted)
        return copies

    def exit(self, visitors: Visitors) -> None:
        """A block's forward pass is over."""
        if in_backward():
            return
        last = visitors.index == self._count - 1
        if (
            last
        ):  # the program goes on, and may write to parameters; all that the last block computes is queued
            visitors.have_come()
        if not (last and torch.is_grad_enabled()):
            visitors.leave()

    def fetch(self, visitors: Visitors) -> list[torch.Tensor]:
        """Copies for the backward pass of a block. See NOTE [Visits]."""
        if in_backward():
            self.expect_end()
        if any(visitors is part for part in self._apart.values()):  # blocks come and go by themselves
            return visitors.arrive()
        wanted = self._near(visitors.index, -1)
        for known in self._known.values():
            if known.index not in wanted:
                known.leave()
        copies = visitors.arrive()
        self._call_ahead(wanted)
        return copies

    def expect_end(self) -> None:
        """Let `_end_backward` be called when the backward pass under way is over."""
        task = current_graph_task_id()
        if task != self._task:
            self._task = task
            execution_engine.queue_callback(self._end_backward)

    def _near(self, index: int, step: int) -> range:
        return range(index, index + (self._ahead + 1) * step, step)

    def _call_ahead(self, wanted: range) -> None:
        for index in wanted:
            if (known := self._known.get(index)) is not None and not known.there:
                known.sweep = self._sweep
                known.call()

    def _end_backward(self) -> None:
        self.close()
        self.gradients.finish()

    def close(self) -> None:
        """Drop all copies: there may be no card any more when these objects go."""
        for known in (*self._known.values(), *self._apart.values()):
            known.leave()

    def take(self, visitors: Visitors) -> WeightTaker:
        """What recognises the weights of a block among the tensors that autograd saves."""
        return WeightTaker(visitors)


class WeightTaker:
    """Takes saved tensors that are a block's weights, or views of them."""

    def __init__(self, visitors: Visitors) -> None:
        self._visitors, self._keys = visitors, visitors.keys()

    def __call__(self, tensor: torch.Tensor) -> Packed | None:
        """See `vramfit.techniques.support.saved.packing`."""
        number = self._keys.get(storage_key(tensor)) if is_plain(tensor) else None
        return None if number is None else Visit(self._visitors, number, StoragePlace(tensor))


# -- gradients of parameters on the host, computed on a card -------------------------------------------------------


@dataclass(slots=True)
class _Leaving:
    parameter: nn.Parameter
    source: torch.Tensor | None  # on the card, until the copy is over
    host: torch.Tensor
    end: Any


class Gradients:
    """Adds gradients to the parameters on the host as they come, or keeps their sums on the card.

    NOTE [Late gradients]: autograd adds a gradient to its parameter on the CPU at once, and would have to wait for the
    copy: the card would stand still. So `hand_over` gives autograd nothing to add, and the numbers are added here when
    they have arrived, at the latest at the end of the backward pass. Where somebody looks on the way (hooks of the
    parameter, ``torch.autograd.grad``, a graph of the gradients) the gradient is handed over in the plain way.
    """

    def __init__(self, depot: Depot, keeps: bool) -> None:
        self._depot, self._keeps = depot, keeps
        self._leaving: deque[_Leaving] = deque()
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def pending(self) -> bool:
        """Whether sums are on the card."""
        return bool(self._sums)

    def hand_over(
        self, visitors: Visitors, number: int, gradient: torch.Tensor, node: Any
    ) -> torch.Tensor | None:
        """What autograd shall do with a gradient on the card: nothing, or add what is given.

        Args:
            node: what adds gradients to the parameter.
        """
        parameter = visitors.parameters[number]
        if torch.is_grad_enabled() or gradient.layout is not torch.strided:
            return gradient.to(parameter.device)
        if (
            gradient.stride() != parameter.stride()
        ):  # a copy between devices would make it dense on its own stream
            gradient = torch.empty_like(parameter, device=gradient.device).copy_(gradient)
        looked_at = parameter._post_accumulate_grad_hooks or parameter._backward_hooks or not _adds(node)
        if self._keeps and not looked_at:
            known = self._sums.get(parameter)
            self._sums[parameter] = gradient if known is None else known + gradient
            return None
        lane = self._depot.lane
        host = torch.empty_like(parameter, pin_memory=gradient.device.type == "cuda")
        end = lane.copy_out(gradient, host)
        if looked_at:
            lane.finish(end)
            return host
        self._release(visitors.nbytes)
        self._leaving.append(_Leaving(parameter, gradient, host, end))
        self._depot.expect_end()
        return None

    def _release(self, limit: int) -> None:
        """Let the card go on without the gradients that are older than the last `limit` bytes."""
        lane = self._depot.lane
        under_way = sum(item.source.nbytes for item in self._leaving if item.source is not None)
        for item in self._leaving:
            if under_way <= limit:
                break
            if item.source is not None:
                under_way -= item.source.nbytes
                lane.wait(item.end)
                item.source = None
        while self._leaving and self._leaving[0].source is None and lane.ended(self._leaving[0].end):
            self._add(self._leaving.popleft())

    def finish(self) -> None:
        """Wait for all gradients on their way, and add them."""
        while self._leaving:
            item = self._leaving.popleft()
            self._depot.lane.finish(item.end)
            self._add(item)

    def _add(self, item: _Leaving) -> None:
        if item.parameter.grad is None:
            item.parameter.grad = item.host
        else:
            item.parameter.grad.add_(item.host)

    def gather(self) -> None:
        """Bring the sums on the card to the parameters."""
        lane, sums = self._depot.lane, self._sums
        self._sums = {}
        for parameter, total in sums.items():
            host = torch.empty_like(parameter, pin_memory=total.device.type == "cuda")
            self._leaving.append(_Leaving(parameter, total, host, lane.copy_out(total, host)))
        self.finish()


def _adds(node: Any) -> bool:
    """Whether the backward pass under way adds gradients to the parameter."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which gives them back
        return False
