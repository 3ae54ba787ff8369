"""The recordings that others published: the programs of ours that reproduce them, and why some have none."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from configurations.catalogue import Precision

if TYPE_CHECKING:
    from configurations.training import Program

MODELS = Path(__file__).parents[1] / "recordings_models"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduced:
    """A published recording whose program we have, as the other tools are asked about it.

    Attributes:
        name: of the recording.
        task: ``forward`` or ``train``.
        length: tokens of a sequence.
        precision: its number formats.
    """

    name: str
    task: str
    length: int
    precision: Precision = Precision.TF32

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer, None where the recording is of a forward pass alone."""
        return "adamw-loop" if self.task == "train" else None

    def load(self) -> Program:
        """The program on the current device: one task, as `recordings_models.gpt_2_7b` runs it."""
        return _gpt(self)


REPRODUCED = {
    row.name: row
    for row in (
        Reproduced(name="gpt-2.7b-ctx128-forward", task="forward", length=128),
        Reproduced(name="gpt-2.7b-ctx128-forward-bf16", task="forward", length=128, precision=Precision.BF16),
        Reproduced(name="gpt-2.7b-ctx256-forward", task="forward", length=256),
        Reproduced(name="gpt-2.7b-ctx128-train", task="train", length=128),
        Reproduced(name="gpt-2.7b-ctx128-train-after-forward", task="train", length=128),
        Reproduced(name="gpt-2.7b-ctx256-train", task="train", length=256),
    )
}

NOT_REPRODUCED: dict[str, str] = {}


def _gpt(row: Reproduced) -> Program:
    import torch
    from configurations.training import Program, lowered

    sys.path.insert(0, str(MODELS))
    import gpt_2_7b as own

    device = torch.device("cuda")
    torch.set_float32_matmul_precision("high")
    model = own.Transformer("2.7b", row.length, device)
    model.to(device)
    batch = torch.randint(low=0, high=own.VOCABULARY, size=(own.BATCH, row.length)).to(device)
    optimizer = own.AdamW(model.parameters())

    def step() -> None:
        with lowered(row.precision.value):
            logits = model(batch)
        if row.task == "train":
            own.cross_entropy(logits, batch).backward()
            optimizer.step()

    return Program(step=step, models=(model,), optimizers=(optimizer,) if row.task == "train" else ())
