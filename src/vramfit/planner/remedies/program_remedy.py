"""One remedy: what it changes of the run, how its user would do it, and what it changes in the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from vramfit.planner.remedies.alteration import Alteration
from vramfit.trace.observed_program import ObservedModel, ObservedProgram

NO_GRADIENTS, HALF_WEIGHTS = "no gradients", "weights in bf16"
"""Names of remedies for programs that train nothing."""

AUTOCAST, CHECKPOINTING, EIGHT_BITS, CHUNKS, EXPANDABLE = (
    "autocast in bf16",
    "checkpointing of the blocks",
    "optimizer in 8 bits",
    "loss in chunks",
    "expandable segments",
)
"""Names of remedies that are tried alone and together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRemedy:
    """A remedy that can be tried.

    Attributes:
        name: in the field's words.
        alteration: of the run.
        how: what its user does, a line each.
        changes: what it changes in the results; empty where nothing.
        weight: the order in which remedies are added to one another: what costs least comes first.
    """

    name: str
    alteration: Alteration
    how: tuple[str, ...]
    changes: str = ""
    weight: int = 0

    def __add__(self, other: ProgramRemedy) -> ProgramRemedy:
        """Both together."""
        return ProgramRemedy(
            name=f"{self.name} + {other.name}",
            alteration=self.alteration + other.alteration,
            how=(*self.how, *other.how),
            changes="; ".join(filter(None, (self.changes, other.changes))),
            weight=self.weight + other.weight,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedProgram:
    """The program that remedies are for, which trains a model, or only runs some.

    Attributes:
        command: what python is given.
        seen: what it was seen to train.
        trained_model: the model that it trains, as it is after a run; None where it trains none.
        root: the folder that places are told from.
    """

    command: tuple[str, ...]
    seen: ObservedProgram
    trained_model: nn.Module | None
    root: Path

    @property
    def model(self) -> nn.Module:
        """The model that it trains."""
        assert self.trained_model is not None
        return self.trained_model

    @property
    def main(self) -> ObservedModel:
        """The trained model that remedies are for."""
        found = self.seen.main_model
        assert found is not None
        return found


AUTOCAST_CHANGES = "products and their activations have 8 bits of precision (bfloat16)"
HALF_CHANGES = "weights and activations have 8 bits of precision (bfloat16)"
EIGHT_BITS_CHANGES = "the optimizer's averages are kept in 8 bits"
ROUNDED_LOSS = "the loss is summed in another order"
