"""A document model at 1,024 and at 2,048 tokens on a virtual card: what twice the length costs, plain and in chunks.

    python benchmarks/inference/long_documents.py [--gpu NAME] [--json FILE]

LayoutLM and LayoutLMv3 with the shapes of their base models and positions for 2,048 tokens, in float32, without
gradients. ``eager`` writes attention scores out, ``sdpa`` leaves them to a fused kernel, which LayoutLMv3 has no way to
take. Peaks are of tensors on the card and exact; times are simulated for it. The saying is that a document model goes
from 1,024 to 2,048 tokens at no more than 35 % more memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import vramfit
from vramfit.techniques import Choice, with_choices
from vramfit.techniques.attention_chunking import AttentionChunking, AttentionChunkingSetting
from vramfit.techniques.input_chunking import InputChunking, InputChunkingSetting
from vramfit.workload import Workload
from vramfit.writing import write_text

SHORT, LONG = 1024, 2048
SAID = 1.35
MIB = 1 << 20

ATTENTION = Choice(technique=AttentionChunking(), setting=AttentionChunkingSetting(slice_bytes=16 * MIB))
EXAMPLES = Choice(technique=InputChunking(), setting=InputChunkingSetting(size=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One row: a model, what it reads, and what is applied.

    Attributes:
        attention: ``eager`` or ``sdpa``.
        choices: techniques with their settings.
    """

    model: str
    batch: int
    length: int
    attention: str = "eager"
    choices: tuple[Choice, ...] = ()

    @property
    def name(self) -> str:
        """How it runs, in words."""
        return ", ".join((self.attention, *(choice.words for choice in self.choices)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """What a row took.

    Attributes:
        weights_bytes: of parameters and buffers.
        peak_bytes: of all tensors at their highest.
        seconds: simulated.
    """

    weights_bytes: int
    peak_bytes: int
    seconds: float


def layoutlm(attention: str) -> nn.Module:
    from transformers import LayoutLMConfig, LayoutLMModel

    config = LayoutLMConfig(max_position_embeddings=LONG)
    config._attn_implementation = attention
    model: nn.Module = LayoutLMModel(config).eval()
    return model


def layoutlmv3(attention: str) -> nn.Module:
    """Text and layout alone, with the relative biases of the published models."""
    from transformers import LayoutLMv3Config, LayoutLMv3Model

    assert attention == "eager"
    config = LayoutLMv3Config(
        max_position_embeddings=LONG + 2,
        visual_embed=False,
        has_relative_attention_bias=True,
        has_spatial_attention_bias=True,
    )
    model: nn.Module = LayoutLMv3Model(config).eval()
    return model


MODELS: dict[str, Callable[[str], nn.Module]] = {"LayoutLM": layoutlm, "LayoutLMv3": layoutlmv3}


def rows() -> Iterator[Document]:
    """Each model at both lengths, plain and in chunks."""
    for batch in (1, 8):
        for attention in ("eager", "sdpa"):
            for length in (SHORT, LONG):
                yield Document(model="LayoutLM", batch=batch, length=length, attention=attention)
            yield Document(
                model="LayoutLM", batch=batch, length=LONG, attention=attention, choices=(ATTENTION,)
            )
        if batch > 1:
            yield Document(model="LayoutLM", batch=batch, length=LONG, choices=(ATTENTION, EXAMPLES))
    for length in (SHORT, LONG):
        yield Document(model="LayoutLMv3", batch=1, length=length)
    yield Document(model="LayoutLMv3", batch=1, length=LONG, choices=(ATTENTION,))


def documents(batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    shape = (batch_size, sequence_length)
    return {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.ones(shape, dtype=torch.long),
        "bbox": torch.zeros((*shape, 4), dtype=torch.long),
    }


def taken(row: Document, gpu: str) -> Taken:
    """Run a row twice on a fresh card, and look at the second time."""
    plain = Workload(
        model=lambda: MODELS[row.model](row.attention),
        batch=documents,
        sizes={"batch_size": row.batch, "sequence_length": row.length},
    )
    workload = with_choices(plain, row.choices)
    with vramfit.VirtualGPU(gpu, alloc_conf=""):
        state = workload.start("cuda")
        weights = torch.cuda.memory_allocated()
        workload.run_step(state, workload.sizes)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        workload.run_step(state, workload.sizes)
        end.record()
        torch.cuda.synchronize()
        return Taken(
            weights_bytes=weights,
            peak_bytes=torch.cuda.max_memory_allocated(),
            seconds=begin.elapsed_time(end) / 1e3,
        )


def compared(found: dict[Document, Taken]) -> Iterator[tuple[Document, Taken, float]]:
    """Each row with its peak as a part of that of the same model, plain, at the shorter length."""
    for row, one in found.items():
        short = Document(model=row.model, batch=row.batch, length=SHORT, attention=row.attention)
        yield row, one, one.peak_bytes / found[short].peak_bytes


def as_plain(row: Document, one: Taken, part: float) -> dict[str, Any]:
    """A row for JSON."""
    about = {"model": row.model, "batch": row.batch, "length": row.length, "runs": row.name}
    return {**about, **asdict(one), "of_the_shorter": part}


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = {row: taken(row, given.gpu) for row in rows()}
    table = Table(title=f"Twice the length, float32, {given.gpu}")
    names = (
        "model",
        "batch",
        "tokens",
        "runs",
        "peak MiB",
        "of 1,024 plain",
        "ms (simulated)",
        "at most +35 %",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("model", "runs") else "right")
    lines = list(compared(found))
    for row, one, part in lines:
        table.add_row(
            row.model,
            str(row.batch),
            f"{row.length:,}",
            row.name,
            f"{one.peak_bytes / MIB:,.1f}",
            f"{100 * (part - 1):+.1f} %",
            f"{1e3 * one.seconds:,.1f}",
            "" if row.length == SHORT else "yes" if part <= SAID else "no",
        )
    Console().print(table)
    if given.json:
        write_text(given.json, json.dumps([as_plain(*line) for line in lines], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
