"""The decision which layers of a model stay on the card and which wait on the host, with the figures that led to it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import msgspec

from vramfit.errors import UsageError
from vramfit.plain import from_plain, to_plain

FORMAT = "vramfit placement"
VERSION = 1


class LayerPlace(Enum):
    """Where a layer's weights are between its calls.

    Attributes:
        CARD: they stay on the card.
        HOST: they wait on the host, and are brought for each call.
    """

    CARD = "card"
    HOST = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedLayer:
    """A layer that could wait on the host.

    Attributes:
        name: in the model.
        nbytes: of its weights.
        place: where they are between its calls.
        calls: how often it was called in the run that was looked at.
    """

    name: str
    nbytes: int
    place: LayerPlace
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlacement:
    """Where the layers of a model have their weights, found by running it on the virtual GPU.

    Attributes:
        card: the card that was asked about.
        budget_bytes: that torch may reserve there.
        slots: how many waiting layers the card has memory for at once; 0 where all stay.
        slot_bytes: of each.
        layers: that could wait, in the model's order; what else the model has is on the card.
        other_bytes: of the parameters and buffers outside of these layers.
        peak_reserved_bytes: the most that torch reserved in the run, everything included.
        peak_allocated_bytes: the most that tensors held.
        carried_bytes: that crossed the link for the example, once layers were where they stay.
        transfer_seconds: that these bytes take on the link, at its rate.
        seconds: simulated, of the example.
        runs: how many placements were run to find this one.
    """

    card: str
    budget_bytes: int
    slots: int
    slot_bytes: int
    layers: tuple[PlacedLayer, ...]
    other_bytes: int
    peak_reserved_bytes: int
    peak_allocated_bytes: int
    carried_bytes: int
    transfer_seconds: float
    seconds: float
    runs: int

    @property
    def streamed(self) -> tuple[str, ...]:
        """Names of the layers that wait on the host."""
        return tuple(layer.name for layer in self.layers if layer.place is LayerPlace.HOST)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of their weights."""
        return sum(layer.nbytes for layer in self.layers if layer.place is LayerPlace.HOST)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return self.other_bytes + sum(layer.nbytes for layer in self.layers)

    def to_json(self) -> str:
        """The decision as JSON: the attributes by their names, with ``format`` and ``version``."""
        return json.dumps({"format": FORMAT, "version": VERSION, **to_plain(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> WeightPlacement:
        """What `to_json` wrote.

        Raises:
            UsageError: the text is no such, or of a later version.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
                raise UsageError("the text is not a placement of vramfit", "Give what to_json() wrote")
            if (version := values.pop("version", None)) != VERSION:
                raise UsageError(
                    f"the placement has version {version}, and this vramfit reads {VERSION}",
                    "Update vramfit, or find the placement again",
                )
            return from_plain(values, cls)
        except (json.JSONDecodeError, msgspec.ValidationError) as error:
            raise UsageError(f"the placement cannot be read: {error}", "Give what to_json() wrote") from error
