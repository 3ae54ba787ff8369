"""torchtitan's own train.py, Llama 3.1 8B under FSDP2 on 8 and 128 H100: reserved memory beside its authors' figures.

    python benchmarks/measured_programs/torchtitan_llama.py CLONE [--packages DIR] [--only TEXT] [--steps N]

CLONE is a clone of github.com/pytorch/torchtitan, or its git directory; the commit is checked out elsewhere, and
nothing of it is kept here. It imports datasets, torchdata, tiktoken, blobfile, tensorboard and triton, and torchao
0.7.0 for float8 (newer ones lack a name that it imports): install them, or name a folder that has them (``pip install
--target DIR``). The program runs as its launch script (run_llama_train.sh) starts it, with the settings of
train_configs/llama3_8b.toml and local batch 2. With torch.compile it compiles each block; for float8 it has the options
of docs/float8.md.

Source: docs/performance.md at d4c86e3, tables 1 and 3: torchtitan 9dec370 and torch 1963fc8, both of December 2024, on
H100 of 96 GB, selective checkpointing, reserved GiB as the program logs them at step 90 (the maximum since step 80).

NOTE [What is made up]
Llama's tokenizer is not public: a file of as many words (128,000, to which the program adds 256) stands for it. The
texts of C4 are made up too, as the program's data set ``c4_test``. Neither decides about memory: batches are full.

NOTE [What torch did then]
Two things differ between torch of December 2024 and 2.13 for this program, and `stand_ins/torch_of_2024.py` puts them
back before it starts train.py:

1. FSDP2 kept the root's parameters gathered after the forward pass whatever ``reshard_after_forward`` said
   (_composable/fsdp/_fsdp_state.py, ``_lazy_init``). The program passes True, which newer torch follows.
2. Attention: H100 takes cuDNN's first by now (aten/src/ATen/native/cuda/sdp_utils.cpp), flash attention's then. The
   program's policy of what to save names flash attention and not cuDNN's, whose outputs are therefore recomputed.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from torchtitan_runs import STAND_INS, behind_vramfit, checked_out, options, run_all

SCHEMA = "vramfit.torchtitan/3"
COMMIT = "9dec370ad26b5f8e9a7333a0e36165018262644b"


class Technique(StrEnum):
    """How the program computes."""

    EAGER = "eager"
    COMPILED = "compiled"
    FLOAT8 = "compiled, float8"

    @property
    def options(self) -> tuple[str, ...]:
        """Of the command line."""
        compiled = ("--training.compile",)
        of_float8 = (
            "enable_float8_linear",
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
        )
        float8 = (*compiled, *(f"--float8.{name}" for name in of_float8))
        return {Technique.EAGER: (), Technique.COMPILED: compiled, Technique.FLOAT8: float8}[self]


PUBLISHED = {
    8: {Technique.EAGER: 82.4, Technique.COMPILED: 77.0, Technique.FLOAT8: 76.8},
    128: {Technique.EAGER: 67.0, Technique.COMPILED: 62.0, Technique.FLOAT8: 61.8},
}
"""GiB, by ranks."""
WORDS = 128_000
TORCH_OF_2024 = STAND_INS / "torch_of_2024.py"
CARD = """\
name = "H100 SXM 96GB"
base = "H100 SXM"
total_bytes = "95GiB"     # 96 GB HBM2e, 2.4 TB/s, as docs/performance.md says; what CUDA reports of it is not published
bandwidth_gbs = 2400.0
memory_bus_bits = 6144
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the program is run.

    Attributes:
        ranks: in the world.
        technique: how it computes.
        expandable: with the launch script's ``expandable_segments:True``.
        as_then: see NOTE [What torch did then].
    """

    ranks: int
    technique: Technique
    expandable: bool
    as_then: bool

    @property
    def name(self) -> str:
        """In words."""
        torch = "torch as in 2024" if self.as_then else "torch as it is"
        segments = "expandable segments" if self.expandable else "plain segments"
        return f"FSDP {self.ranks}, {self.technique.value}, {torch}, {segments}"

    @property
    def published(self) -> float:
        """What the authors measured, in GiB."""
        return PUBLISHED[self.ranks][self.technique]

    @property
    def half_unit(self) -> float:
        """They round it to a tenth."""
        return 0.05


def settings() -> Iterator[Setting]:
    """All rows."""
    for technique, ranks, as_then in itertools.product(Technique, PUBLISHED, (False, True)):
        for expandable in (True, False) if technique is Technique.EAGER else (False,):
            yield Setting(ranks=ranks, technique=technique, expandable=expandable, as_then=as_then)


def make_inputs(folder: Path) -> None:
    """Card, tokenizer and texts. See NOTE [What is made up]."""
    (folder / "card.toml").write_text(CARD)
    singles = (bytes([one]) for one in range(256))
    pairs = (bytes(two) for two in itertools.product(range(256), repeat=2))
    threes = (
        bytes(three) for three in itertools.product(b"abcdefghijklm", b"abcdefghijklmnopqrst", range(256))
    )
    words = itertools.islice(itertools.chain(singles, pairs, threes), WORDS)
    lines = (f"{base64.b64encode(word).decode()} {number}\n" for number, word in enumerate(words))
    (folder / "tokenizer.model").write_text("".join(lines))
    (folder / "texts").mkdir()
    text = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 200}) + "\n"
    (folder / "texts" / "data.json").write_text(text * max(PUBLISHED) * 4)


def prepare(clone: Path, folder: Path) -> Path:
    """All that the runs need; returns the program's folder.

    Raises:
        VramfitError: the clone does not have the commit.
    """
    program = checked_out(clone, COMMIT, ("train.py", "torchtitan", "train_configs"), folder / "torchtitan")
    make_inputs(folder)
    return program


def command(flavor: str, steps: int, setting: Setting, folder: Path, result: Path) -> list[str]:
    """What is run: run_llama_train.sh's torchrun, behind ``vramfit run``."""
    wrapped = [str(TORCH_OF_2024)] if setting.as_then else []
    return [
        *behind_vramfit(folder / "card.toml", result, setting.ranks // 8),
        *(*wrapped, "train.py"),
        *("--job.config_file", "./train_configs/llama3_8b.toml", "--training.batch_size", "2"),
        *("--training.steps", str(steps), "--model.tokenizer_path", str(folder / "tokenizer.model")),
        *("--training.dataset", "c4_test", "--training.dataset_path", str(folder / "texts")),
        *("--model.flavor", flavor, *setting.technique.options),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    chosen = options(
        (__doc__ or "").partition("\n")[0],
        arguments,
        steps=10,
        about_steps="a multiple of ten: the program logs each tenth",
        flavor="8B",
    )
    return run_all(
        chosen,
        SCHEMA,
        settings(),
        partial(prepare, chosen.clone),
        partial(command, chosen.flavor, chosen.steps),
    )


if __name__ == "__main__":
    sys.exit(main())
