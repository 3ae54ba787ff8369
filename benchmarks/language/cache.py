"""Key-value caches of 64 prompts after a common beginning: slots, bytes, copies, time, and the tokens that come out.

    python benchmarks/language/cache.py [--card NAME] [--new-tokens 32] [--skip-values]

Prompts have 512 tokens in common and `random.Random(0).randint(16, 1024)` of their own. The model has the shape of
Llama 3.2 1B in bfloat16; bytes are those of the virtual card, seconds are simulated. Copies are what operations within
a cache write: to keep what was there before, and to give attention what it reads. Tokens are compared on the CPU,
with a small model in float32.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import vramfit
from vramfit.inference.kv_cache.block_attention import block_attention
from vramfit.inference.kv_cache.prompts import PaddingSide, lay_prompts
from vramfit.inference.kv_cache.sequences import GONE
from vramfit.units import MIB

COMMON, SEQUENCES = 512, 64
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def drawn_prompts(vocabulary: int) -> list[list[int]]:
    """The prompts."""
    lengths, draw = random.Random(0), random.Random(1)
    common = [draw.randrange(1, vocabulary) for _ in range(COMMON)]
    return [
        common + [draw.randrange(1, vocabulary) for _ in range(lengths.randint(16, 1024))]
        for _ in range(SEQUENCES)
    ]


class Copies(TorchDispatchMode):
    """Bytes that operations write: new states, those that were there before, and those that are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.gathered = self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if isinstance(found, torch.Tensor) and found.is_floating_point() and found.dim() > 1:
            size = found.numel() * found.element_size()
            if name == "cat":
                self.kept += size
            elif name in ("index_select", "index"):
                self.gathered += size
            elif name == "_to_copy":
                self.moved += size
        return found


@dataclass(kw_only=True)
class Outcome:
    """What came of one cache.

    Attributes:
        name: of the cache.
        slots: places for tokens, after the prompts and at the end.
        unique: tokens of different content, after the prompts.
        cache: bytes that hold keys and values at the end.
        peak, seconds: of all, weights and steps among them.
        copies: while tokens are generated.
        tokens: generated, for each prompt.
    """

    name: str
    slots: tuple[int, int] = (0, 0)
    unique: int = 0
    cache: int = 0
    peak: int = 0
    seconds: float = 0.0
    copies: Copies = field(default_factory=Copies)
    tokens: list[list[int]] = field(default_factory=list)


@contextmanager
def counted(owner: Any, method: str, copies: Copies) -> Iterator[None]:
    """Count what a method copies."""
    before = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        with copies:
            return before(*args, **kwargs)

    setattr(owner, method, call)
    try:
        yield
    finally:
        delattr(owner, method)


def padded(prompts: list[list[int]], device: Any) -> dict[str, torch.Tensor]:
    """The batch as a tokenizer pads it, at the left."""
    return lay_prompts(prompts, 0, 0, PaddingSide.LEFT).tensors(device)


def use_blocks(name: str, found: Outcome, model: Any, prompts: list[list[int]], new: int) -> None:
    """Ours, in one of three ways."""
    numbers = "int8" if "int8" in name else "model"
    with block_attention(model) if "blocks" in name else nullcontext():
        cache = vramfit.BlockCache(model, tokens=40_000, numbers=numbers)
        inputs = cache.begin(prompts, model=model, max_new_tokens=new)
        width = inputs["input_ids"].shape[1]
        states: list[Any] = []
        whole = cache.batch.update

        def update(*args: Any) -> Any:
            states.append(cache.usage()) if cache.batch.width == width and not states else None
            return whole(*args)

        cache.batch.update = update  # type: ignore[method-assign]
        with counted(cache, "update", found.copies), counted(cache.batch, "device_table", Copies()):
            stores = [cache.batch.store(0)]
            with counted(stores[0], "read_blocks", found.copies):
                out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, **GREEDY)
    found.slots = states[0].slots, cache.usage().slots
    found.unique = states[0].tokens
    block = cache.batch.store(0).form.block_bytes
    found.cache = len({one for row in cache.batch.rows for one in row.tables[0] if one != GONE}) * block
    found.tokens = out[:, width:].tolist()


def use_padded(name: str, found: Outcome, model: Any, prompts: list[list[int]], new: int) -> None:
    """One of transformers' caches, which hold a padded batch."""
    inputs = padded(prompts, model.device)
    width = inputs["input_ids"].shape[1]
    most = width + new - 1
    extra: dict[str, Any] = {}
    if name == "StaticCache":
        cache: Any = StaticCache(config=model.config, max_cache_len=most)
        extra["disable_compile"] = True
        found.slots = SEQUENCES * most, SEQUENCES * most
    else:
        cache = DynamicCache(config=model.config, offloading="Offloaded" in name)
        found.slots = SEQUENCES * width, SEQUENCES * most
    with counted(cache, "update", found.copies):
        out = model.generate(**inputs, past_key_values=cache, max_new_tokens=new, **GREEDY, **extra)
    found.cache = sum(
        one.numel() * one.element_size() for layer in cache.layers for one in (layer.keys, layer.values)
    )
    found.tokens = out[:, width:].tolist()


def use_paged(name: str, found: Outcome, model: Any, prompts: list[list[int]], new: int) -> None:
    """The paged cache of ``generate_batch``."""
    from transformers.generation.continuous_batching import cache as paged

    page = 16
    settings = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=None if "default" in name else 2_600,
        max_batch_tokens=None if "default" in name else 8192,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    made: list[Any] = []
    most = 0
    whole_init, whole_update = paged.PagedAttentionCache.__init__, paged.PagedAttentionCache.update

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        whole_init(self, *args, **kwargs)
        made.append(self)

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal most
        most = max(most, self.pool.num_sectors - self.pool.num_free_sectors)
        with found.copies:
            return whole_update(self, *args, **kwargs)

    paged.PagedAttentionCache.__init__, paged.PagedAttentionCache.update = init, update  # type: ignore[method-assign]
    try:
        out = model.generate_batch(
            inputs=prompts,
            generation_config=GenerationConfig(
                max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=settings,
        )
    finally:
        paged.PagedAttentionCache.__init__, paged.PagedAttentionCache.update = whole_init, whole_update  # type: ignore[method-assign]
    cache = made[0]
    found.slots = (0, most * cache.tokens_per_sector)
    found.cache = cache.cache_tensor.numel()
    found.tokens = [
        one.generated_tokens
        for one in sorted(out.values(), key=lambda one: int(one.request_id.split("_")[1]))
    ]


WAYS: dict[str, Callable[[str, Outcome, Any, list[list[int]], int], None]] = {
    "BlockCache": use_blocks,
    "BlockCache, by blocks": use_blocks,
    "BlockCache, int8": use_blocks,
    "DynamicCache": use_padded,
    "StaticCache": use_padded,
    "OffloadedCache": use_padded,
    "generate_batch, 2,600 pages": use_paged,
    "generate_batch, by default": use_paged,
}


def llama_1b() -> LlamaConfig:
    """The shape of Llama 3.2 1B (its config.json)."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )


def small() -> LlamaConfig:
    """A model for the CPU."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )


def on_card(name: str, card: str, new: int) -> Outcome:
    """One cache on the virtual card."""
    found = Outcome(name=name)
    with vramfit.VirtualGPU(card) as gpu:
        with torch.device("cuda"):
            model = LlamaForCausalLM(llama_1b()).to(torch.bfloat16).eval()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        began = gpu.run.seconds_simulated
        WAYS[name](name, found, model, drawn_prompts(512), new)
        torch.cuda.synchronize()
        found.peak = torch.cuda.max_memory_allocated()
        found.seconds = gpu.run.seconds_simulated - began
    return found


def on_cpu(name: str, new: int) -> Outcome:
    """One cache on the CPU, for its tokens; `OffloadedCache` wants streams, which a CPU has not."""
    found = Outcome(name=name)
    torch.manual_seed(0)
    model = LlamaForCausalLM(small()).eval()
    WAYS[name](name, found, model, drawn_prompts(512), new)
    return found


def memory_table(outcomes: list[Outcome], new: int) -> Table:
    """Slots, bytes and copies."""
    table = Table(title=f"{SEQUENCES} prompts, {COMMON} tokens in common, {new} new tokens each")
    for name in (
        "",
        "slots, prompts",
        "slots, end",
        "cache, MiB",
        "peak, MiB",
        "kept*",
        "gathered*",
        "moved*",
        "simulated, s",
    ):
        table.add_column(name, justify="left" if not name else "right")
    for one in outcomes:
        copies = (one.copies.kept, one.copies.gathered, one.copies.moved)
        table.add_row(
            one.name,
            f"{one.slots[0]:,}" if one.slots[0] else "",
            f"{one.slots[1]:,}",
            f"{one.cache / MIB:,.1f}",
            f"{one.peak / MIB:,.1f}",
            *(f"{size / MIB / new / SEQUENCES:,.2f}" for size in copies),
            f"{one.seconds:.2f}",
        )
    table.caption = "* MiB copied for each token that is generated, the prompt's part included"
    return table


def main(arguments: list[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--card", default="RTX 4090")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--skip-values", action="store_true", help="compare no tokens on the CPU")
    parser.add_argument("--skip-card", action="store_true", help="measure nothing on the virtual card")
    parser.add_argument("--only", choices=sorted(WAYS), action="append", help="these caches alone")
    options = parser.parse_args(arguments)
    console = Console(width=140)
    names = options.only or list(WAYS)
    outcomes = []
    if not options.skip_card:
        outcomes = [on_card(name, options.card, options.new_tokens) for name in names]
        console.print(memory_table(outcomes, options.new_tokens))
    for one in outcomes:
        if one.unique:
            waste = one.slots[0] / one.unique - 1
            console.print(f"{one.name}: {one.unique:,} unique tokens of the prompts, waste {waste:.2%}")
    if not options.skip_values:
        there = [name for name in names if "default" not in name and "Offloaded" not in name]
        values = [on_cpu(name, options.new_tokens) for name in there]
        table = Table(title="Tokens on the CPU beside DynamicCache's")
        table.add_column("")
        table.add_column("prompts with equal tokens", justify="right")
        reference = next((one for one in values if one.name == "DynamicCache"), values[0])
        for one in values:
            same = sum(a == b for a, b in zip(one.tokens, reference.tokens, strict=True))
            table.add_row(one.name, f"{same} of {SEQUENCES}")
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
