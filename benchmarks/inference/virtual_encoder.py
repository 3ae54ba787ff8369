"""A text encoder on a virtual card: what a batch of a shape takes, and how long it would compute there."""

from __future__ import annotations

import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterator
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
        allocated_bytes: by tensors at its highest, the model's included; 0 where the memory did not suffice.
        reserved_bytes: what the allocator held for them.
        seconds: simulated.
    """

    allocated_bytes: int
    reserved_bytes: int
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the memory sufficed."""
        return self.allocated_bytes > 0


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
        if not fits:
            return Ran(0, 0, seconds)
        return Ran(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), seconds)


@contextlib.contextmanager
def on_card(gpu: str, encoder: Encoder) -> Iterator[VirtualEncoder]:
    """The encoder on a fresh virtual card."""
    with vramfit.VirtualGPU(gpu, alloc_conf=""):
        try:
            yield VirtualEncoder(encoder)
        finally:
            gc.unfreeze()


class ShapeFile:
    """What shapes of an encoder take on a card, kept in a file."""

    def __init__(self, gpu: str, encoder: Encoder, path: Path) -> None:
        self.gpu, self.encoder, self.path = gpu, encoder, path
        self._name = json.dumps([gpu, asdict(encoder), torch.__version__])
        self._all = json.loads(path.read_text()) if path.exists() else {}
        kept = self._all.get(self._name, {})
        self.shapes = {tuple(map(int, key.split("x"))): Ran(*value) for key, value in kept.items()}

    @contextlib.contextmanager
    def measuring(self) -> Iterator[Callable[[int, int], Ran]]:
        """A function that gives what a shape takes, with nothing cached from others; at the end the file is written."""
        with contextlib.ExitStack() as stack:
            card: list[VirtualEncoder] = []

            def measure(items: int, length: int) -> Ran:
                if (items, length) not in self.shapes:
                    if not card:
                        card.append(stack.enter_context(on_card(self.gpu, self.encoder)))
                    torch.cuda.empty_cache()
                    self.shapes[items, length] = card[0].run(items, length)
                return self.shapes[items, length]

            yield measure
        # After the block: what is written on a virtual card is dropped.
        self._all[self._name] = {
            f"{items}x{length}": [ran.allocated_bytes, ran.reserved_bytes, ran.seconds]
            for (items, length), ran in self.shapes.items()
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(self._all, indent=1))

    def measure_all(self, shapes: list[tuple[int, int]]) -> dict[tuple[int, int], Ran]:
        """What fits of some shapes; none is tried that is no smaller than one which did not fit."""
        found: dict[tuple[int, int], Ran] = {}
        full: list[tuple[int, int]] = []
        with self.measuring() as measure:
            for items, length in shapes:
                if any(items >= many and length >= long for many, long in full):
                    continue
                ran = measure(items, length)
                if ran.fits:
                    found[items, length] = ran
                else:
                    full.append((items, length))
        return found
