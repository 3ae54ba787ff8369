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
        script: its program in `recordings_models`.
        task: ``forward`` or ``train`` of the transformer, ``images`` of the convolutional regressor.
        length: tokens of a sequence.
        precision: its number formats.
    """

    name: str
    script: str
    task: str
    length: int = 0
    precision: Precision = Precision.TF32

    @property
    def optimizer(self) -> str | None:
        """Name of the optimizer, None where the recording is of a forward pass alone."""
        return {"train": "adamw-loop", "images": "adam"}.get(self.task)

    def load(self) -> Program:
        """The program on the current device: one task, as its script in `recordings_models` runs it."""
        sys.path.insert(0, str(MODELS))
        return _images() if self.task == "images" else _gpt(self)


TRANSFORMER = "gpt_2_7b.py"
REPRODUCED = {
    row.name: row
    for row in (
        Reproduced(name="eor-nn", script="eor_nn.py", task="images", precision=Precision.FP32),
        Reproduced(name="gpt-2.7b-ctx128-forward", script=TRANSFORMER, task="forward", length=128),
        Reproduced(
            name="gpt-2.7b-ctx128-forward-bf16",
            script=TRANSFORMER,
            task="forward",
            length=128,
            precision=Precision.BF16,
        ),
        Reproduced(name="gpt-2.7b-ctx256-forward", script=TRANSFORMER, task="forward", length=256),
        Reproduced(name="gpt-2.7b-ctx128-train", script=TRANSFORMER, task="train", length=128),
        Reproduced(name="gpt-2.7b-ctx128-train-after-forward", script=TRANSFORMER, task="train", length=128),
        Reproduced(name="gpt-2.7b-ctx256-train", script=TRANSFORMER, task="train", length=256),
    )
}

NOT_REPRODUCED = {
    "expandable-3gpu-oom": "a graph network beside a language model; the sizes of its graphs are not published",
    "finetune-course": "4-bit weights of bitsandbytes, with kernels of its own, under peft and transformers of 2024",
    "gpt-small-forward": "recorded while torch.compile searched for kernels (Inductor's 256 MiB buffers)",
    "lm-course-b": "a program of torch.compile: the buffers are Inductor's",
    "select-n-a": "moves layers to the host and back by a scheduler of its own over a changed transformers library",
    "select-n-b": "moves layers to the host and back by a scheduler of its own over a changed transformers library",
}
"""Why a published recording has no program of ours."""


def _gpt(row: Reproduced) -> Program:
    import gpt_2_7b as own
    import torch
    from configurations.training import Program, lowered

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


def _images() -> Program:
    import eor_nn as own
    import torch
    from configurations.training import Program

    torch.autograd.set_detect_anomaly(False)  # its questions about values have no answer on fake tensors
    model = own.Regressor().cuda().requires_grad_(False)
    image = torch.randn(1, own.CHANNELS, own.SIDE, own.SIDE).cuda()
    old = model(image)
    changed = torch.randn_like(image).requires_grad_()
    optimizer = torch.optim.Adam([changed], lr=0.1)
    distance = own.Distance()

    def step() -> None:
        distance(old, model(changed), image, changed).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Program(step=step, models=(model,), optimizers=(optimizer,))
