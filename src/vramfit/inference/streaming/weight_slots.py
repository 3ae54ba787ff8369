"""Memory on the card that layers take turns in.

NOTE [Order of copies]: a slot is filled by a copy that begins after the event which was recorded when the last layer in
it was done, on whatever stream that was computed; and a layer is computed after the event of the copy. Nothing rests on
how long a copy takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vramfit.inference.host_lane import Lane
from vramfit.inference.streaming.layer_weights import LayerWeights, laid_out, shaped

_MARKS = 8
"""Ends of calls that are kept before those that have come are looked for."""


class WeightSlot:
    """One block of memory on the card, as large as the largest layer.

    Attributes:
        layer: whose weights are in it, or on their way to it.
        users: how many of the layer's calls are under way.
    """

    def __init__(self, nbytes: int, device: torch.device, lane: Lane) -> None:
        with torch.inference_mode(False):  # it is written to outside of inference mode too
            self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._lane = lane
        self._free: list[Any] = [lane.mark()]
        self._views: dict[LayerWeights, list[nn.Parameter]] = {}
        self._versions: list[int] = []
        self._brought: Any = None
        self.layer: LayerWeights | None = None
        self.users = 0

    def fill(self, layer: LayerWeights, sources: list[torch.Tensor]) -> Any:
        """Begin to bring a layer's weights; gives the copies' end.

        Args:
            sources: on the host, by the numbers of the parameters; they must not change before the copies are over.
        """
        after = self._free if self.layer is None else [*self._free, self._brought]
        self.layer = layer
        self._versions = layer.versions()
        with torch.no_grad():
            places = [view.detach() for view in self.views(layer)]
            self._brought = self._lane.into(places, sources, after)
        self._free = []
        return self._brought

    def arrive(self) -> list[nn.Parameter]:
        """The layer's weights, for what is computed from now on."""
        assert self.layer is not None
        self._lane.wait(self._brought)
        return self.views(self.layer)

    def done(self) -> None:
        """Note that a call of the layer has given the device all its work."""
        if len(self._free) >= _MARKS:
            self._free = [mark for mark in self._free if not self._lane.ended(mark)]
        self._free.append(self._lane.mark())

    def holds(self, layer: LayerWeights) -> bool:
        """Whether the layer's weights are here as they are on the host now."""
        return self.layer is layer and self._versions == layer.versions()

    def drop(self) -> None:
        """Forget what is in it; a copy on its way ends first."""
        if self.layer is not None:
            self._lane.finish(self._brought)
        self.layer = None
        self._views.clear()

    def views(self, layer: LayerWeights) -> list[nn.Parameter]:
        """Parameters over the slot's memory, in the layer's shapes and strides."""
        known = self._views.get(layer)
        if known is None:
            offsets, _ = laid_out(layer.parameters)
            with torch.inference_mode(False), torch.no_grad():
                known = self._views[layer] = [
                    nn.Parameter(shaped(self._bytes[offset:], like.detach()), requires_grad=False)
                    for offset, like in zip(offsets, layer.parameters, strict=True)
                ]
        return known
