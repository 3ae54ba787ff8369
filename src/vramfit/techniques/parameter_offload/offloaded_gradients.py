"""Gradients of parameters on the host, computed on a card."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from vramfit.techniques.parameter_offload.depot import Depot, Visitors


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
            visitors: the block.
            number: of the parameter in it.
            gradient: of the parameter's copy.
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
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch.autograd.grad, which gives them back
        return False
