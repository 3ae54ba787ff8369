"""torchtrain's own train.py, Llama 7B under FSDP2 on 8 H100: reserved memory beside its author's figures.

    python benchmarks/measured_programs/torchtrain_llama.py CLONE [--packages DIR] [--only TEXT] [--steps N]

torchtrain is torchtitan's former name; CLONE is a clone of github.com/pytorch/torchtitan, or its git directory; the
commit is checked out elsewhere, and nothing of it is kept here. It imports tensorboard, and triton where it compiles:
install them, or name a folder that has them (``pip install --target DIR``). The program runs as its launch script
(run_llama_train.sh) starts it, with the settings of train_configs/llama_7b.toml: batches of 8 times 2,048 tokens (16
in one row), bfloat16, gradients reduced in float32. With ``--training.compile`` it compiles the model as a whole.

Source: the message of its commit 83c879f18 (28 March 2024), which gives the maxima of 1,000 steps on cards of 95.0396
GiB: in eager mode as percentages of that, compiled in GiB too. It gives active memory in eager mode: 23.92 % with full
checkpointing (22.73 GiB), 52.13 % with selective (49.55).

NOTE [What is made up]
Llama's tokenizer is not public, and its words (32,000) are all that memory knows of it; the texts (minipile) fill
every batch. `stand_ins/torch_of_march_2024.py` makes both up, in place of the packages sentencepiece and datasets.

NOTE [Names that are gone]
Two names that the program uses are gone from torch 2.13, and the same stand-in gives them in either kind of run:
``torch.utils.checkpoint._pt2_selective_checkpoint_context_fn_gen``, which pull request 125795 of pytorch made into
``create_selective_checkpoint_contexts`` (the policy's first argument was "forward" or "recompute", as is an object's
attribute now), and a flag of Dynamo's that allowed that function in compiled code, which needs no flag now.

NOTE [What torch did then]
Two things differ between torch of March 2024 and 2.13 for this program, and rows "as in March 2024" have them put back:

1. FSDP2's reduce-scatter. Until pull request 129721 of pytorch (June 2024), ``foreach_reduce`` allocated its input,
   the gradients of a block in float32, in the stream of the reduce-scatter and let go of it on return; the current
   stream waited for the copy. Newer torch allocates it in the current stream and keeps it until the next block's.
2. Attention: H100 takes cuDNN's first by now (aten/src/ATen/native/cuda/sdp_utils.cpp), flash attention's then. The
   program's policy of what to save names flash attention and not cuDNN's, whose outputs are therefore recomputed.

What Inductor fuses, and which buffers it reuses, is that of torch 2.13 in all rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from torchtitan_runs import STAND_INS, behind_vramfit, checked_out, options, run_all

SCHEMA = "vramfit.torchtrain/1"
COMMIT = "83c879f18763611bda68586c45f0082fd568d646"
STAND_IN = STAND_INS / "torch_of_march_2024.py"
CARD_GIB = 95.0396
CARD = f"""\
name = "H100 SXM 96GB"
base = "H100 SXM"
total_bytes = {round(CARD_GIB * (1 << 30))}     # as the message of the commit says
bandwidth_gbs = 2400.0
memory_bus_bits = 6144
"""


class Checkpointing(StrEnum):
    """What the program computes again in the backward pass."""

    FULL = "full"
    SELECTIVE = "selective"
    NONE = "none"

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command line."""
        return (
            *("--activation_checkpoint.mode", self.value),
            *("--activation_checkpoint.selective_ac_option", "op"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the program is run.

    Attributes:
        checkpointing: of every block.
        compiled: with ``--training.compile``.
        batch: sequences in a batch.
        published: what the author measured, in GiB.
        half_unit: half of that figure's last digit, in GiB.
        as_then: see NOTE [What torch did then].
        expandable: with expandable segments, which the launch script of then does not ask for.
    """

    checkpointing: Checkpointing
    compiled: bool
    batch: int
    published: float
    half_unit: float
    as_then: bool
    expandable: bool = False

    @property
    def name(self) -> str:
        """In words."""
        torch = "torch as in March 2024" if self.as_then else "torch as it is"
        technique = "compiled" if self.compiled else "eager"
        return f"{technique}, checkpointing {self.checkpointing.value}, batch {self.batch}, {torch}"


def settings() -> Iterator[Setting]:
    """All rows."""
    percent = CARD_GIB / 100
    eager = ((Checkpointing.FULL, 32.64), (Checkpointing.SELECTIVE, 62.51))
    compiled = (
        (Checkpointing.FULL, 8, 28.90),
        (Checkpointing.SELECTIVE, 8, 53.83),
        (Checkpointing.SELECTIVE, 16, 88.23),
        (Checkpointing.NONE, 8, 90.28),
    )
    rows = (
        *((kind, False, 8, share * percent, 0.005 * percent) for kind, share in eager),
        *((kind, True, batch, gib, 0.005) for kind, batch, gib in compiled),
    )
    for (kind, is_compiled, batch, published, half), as_then in itertools.product(rows, (False, True)):
        yield Setting(
            checkpointing=kind,
            compiled=is_compiled,
            batch=batch,
            published=round(published, 2),
            half_unit=half,
            as_then=as_then,
        )


def prepare(clone: Path, folder: Path) -> Path:
    """All that the runs need; returns the program's folder.

    Raises:
        VramfitError: the clone does not have the commit.
    """
    program = checked_out(clone, COMMIT, ("train.py", "torchtrain", "train_configs"), folder / "torchtrain")
    (folder / "card.toml").write_text(CARD)
    for path in ("tokenizer.model", "texts"):  # the program asks whether they are there
        (folder / path).touch()
    return program


def command(flavor: str, steps: int, setting: Setting, folder: Path, result: Path) -> list[str]:
    """What is run: run_llama_train.sh's torchrun, behind ``vramfit run``."""
    return [
        *behind_vramfit(folder / "card.toml", result, nodes=1),
        *(str(STAND_IN), "then" if setting.as_then else "now", "train.py"),
        *("--job.config_file", "./train_configs/llama_7b.toml", "--training.batch_size", str(setting.batch)),
        *("--training.steps", str(steps), "--model.tokenizer_path", str(folder / "tokenizer.model")),
        *("--training.dataset", "minipile", "--training.dataset_path", str(folder / "texts")),
        *("--model.flavor", flavor, *setting.checkpointing.options),
        *(("--training.compile",) if setting.compiled else ()),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    chosen = options(
        (__doc__ or "").partition("\n")[0],
        arguments,
        steps=11,
        about_steps="a multiple of ten and one: the program logs the first and each tenth after it",
        flavor="7B",
    )
    return run_all(
        *(chosen, SCHEMA, settings()),
        *(partial(prepare, chosen.clone), partial(command, chosen.flavor, chosen.steps)),
    )


if __name__ == "__main__":
    sys.exit(main())
