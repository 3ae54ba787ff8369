"""A text encoder on a virtual card: what a batch of a shape takes, and how long it would compute there."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

import vramfit
from vramfit.writing import write_text

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """Shapes of BERT-base, with positions for long texts.

    Attributes:
        attention: ``eager`` writes the scores out, ``sdpa`` leaves them to a fused kernel.
    """

    width: int = 768
    layers: int = 12
    heads: int = 12
    words: int = 30522
    longest: int = 8192
    attention: str = "eager"

    def make(self) -> nn.Module:
        """The model in half precision, as inference runs it."""
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=self.words,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            max_position_embeddings=self.longest,
            attn_implementation=self.attention,
        )
        model: nn.Module = BertModel(config, add_pooling_layer=False).eval().half()
        return model


@dataclass(frozen=True, slots=True)
class Ran:
    """What a batch came to.

    Attributes:
        peak_bytes: allocated at its highest; 0 where the memory did not suffice.
        seconds: simulated.
    """

    peak_bytes: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the memory sufficed."""
        return self.peak_bytes > 0


class VirtualEncoder:
    """An encoder on a virtual card whose memory lives on from batch to batch, as in a process."""

    def __init__(self, encoder: Encoder) -> None:
        self.model = encoder.make().cuda()
        gc.collect()
        gc.freeze()  # what is there by now stays: it need not be looked at after every batch

    @property
    def free_bytes(self) -> int:
        """What tensors may take on the card, those of the model included."""
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved()

    def run(self, items: int, length: int) -> Ran:
        """Run a batch, from tokens on the host to outputs that are dropped."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        try:
            with torch.no_grad():
                ids = torch.zeros((items, length), dtype=torch.long).cuda()
                mask = torch.ones((items, length), dtype=torch.long).cuda()
                self.model(input_ids=ids, attention_mask=mask)
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = True
        end.record()
        torch.cuda.synchronize()
        seconds = begin.elapsed_time(end) / 1e3
        return Ran(torch.cuda.max_memory_allocated() if fits else 0, seconds)


@contextlib.contextmanager
def on_card(gpu: str, encoder: Encoder) -> Iterator[VirtualEncoder]:
    """The encoder on a fresh virtual card."""
    with vramfit.VirtualGPU(gpu, alloc_conf=""):
        try:
            yield VirtualEncoder(encoder)
        finally:
            gc.unfreeze()


def measured(
    gpu: str, encoder: Encoder, shapes: list[tuple[int, int]], cache: Path
) -> dict[tuple[int, int], Ran]:
    """What shapes take, one after another; a file keeps what was measured before.

    A length is given up at the first number of items that does not fit.
    """
    name = json.dumps([gpu, asdict(encoder), torch.__version__])
    known = json.loads(cache.read_text()) if cache.exists() else {}
    kept = {tuple(map(int, key.split("x"))): Ran(*value) for key, value in known.get(name, {}).items()}
    missing = [shape for shape in shapes if shape not in kept]
    if missing:
        with on_card(gpu, encoder) as card:
            full: dict[int, int] = {}
            for items, length in missing:
                if items < full.get(length, items + 1):
                    torch.cuda.empty_cache()
                    kept[items, length] = card.run(items, length)
                    if not kept[items, length].fits:
                        full[length] = items
        known[name] = {
            f"{items}x{length}": [ran.peak_bytes, ran.seconds] for (items, length), ran in kept.items()
        }
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_text(cache, json.dumps(known, indent=1))
    return {shape: kept[shape] for shape in shapes if shape in kept}
