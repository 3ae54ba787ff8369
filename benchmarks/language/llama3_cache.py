"""The cache of Llama-3-8B on an H100 80 GB: our count of tokens and blocks beside the one that vLLM logged.

    python benchmarks/language/llama3_cache.py [--card "H100 SXM"]

vLLM's accounting gives the cache what is left of `gpu_memory_utilization` (0.9) of the card's memory after the weights,
the peak of activations in a trial run, and memory outside torch, each as logged. A token of Llama-3-8B takes 32 layers,
keys and values of 8 heads of 128 numbers, 2 bytes each. The weights are counted from the model's shape, on the virtual
card, and so are the activations of one prompt of 8,192 tokens.
"""

from __future__ import annotations

import argparse
import sys

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import vramfit
from vramfit.gpus import find_gpu
from vramfit.inference.kv_cache.cache_layout import decoder_config, read_layout
from vramfit.inference.kv_cache.cache_memory import CacheSettings, pool_sizes
from vramfit.inference.kv_cache.capacity import sequences_that_fit
from vramfit.units import GIB, MIB

WEIGHTS, ACTIVATIONS, OUTSIDE = 14.96, 1.26, 1.79
"""GiB that vLLM logged for Llama-3-8B on this card: weights, peak of activations, and outside torch."""

UTILIZATION = 0.9
"""vLLM's default of ``gpu_memory_utilization``."""


def llama_8b() -> LlamaConfig:
    """The shape of Llama 3 8B (its config.json)."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )


def activations_on_card(card: str) -> int:
    """Most bytes beside the weights while a prompt of 8,192 tokens is read, the logits of its last token included."""
    with vramfit.VirtualGPU(card), torch.inference_mode():
        with torch.device("cuda"):
            model = LlamaForCausalLM(llama_8b()).to(torch.bfloat16).eval()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        tokens = torch.ones(1, 8192, dtype=torch.int64, device="cuda")
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return int(torch.cuda.max_memory_allocated()) - before


def weights_on_card(card: str) -> tuple[int, int, int]:
    """Bytes of the weights, of the context, and of the card's memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_8b())
    size = sum(one.numel() for one in model.parameters()) * torch.bfloat16.itemsize
    with vramfit.VirtualGPU(card):
        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
    return size, context, total


def main(arguments: list[str] | None = None) -> int:
    """Print both accounts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--card", default="H100 SXM")
    options = parser.parse_args(arguments)
    spec = find_gpu(options.card)
    weights, context, total = weights_on_card(options.card)
    layout = read_layout(decoder_config(llama_8b()))
    logged = int(UTILIZATION * total - (WEIGHTS + ACTIVATIONS + OUTSIDE) * GIB)
    activations = activations_on_card(options.card)
    ours = int(UTILIZATION * total) - weights - activations - context
    table = Table(
        title=f"Llama-3-8B on {spec.name}, {total / GIB:.2f} GiB, of which {UTILIZATION:.0%} are used"
    )
    for name in ("", "vLLM's figures", "ours"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("weights, GiB", f"{WEIGHTS:.2f} logged", f"{weights / GIB:.2f} counted")
    table.add_row(
        "activations at the peak, GiB", f"{ACTIVATIONS:.2f} logged", f"{activations / GIB:.2f} counted"
    )
    table.add_row("outside torch, GiB", f"{OUTSIDE:.2f} logged", f"{context / GIB:.2f} the context")
    table.add_row("left for the cache, GiB", f"{logged / GIB:.2f}", f"{ours / GIB:.2f}")
    sizes = [pool_sizes([layout], CacheSettings(budget=one), torch.bfloat16) for one in (logged, ours)]
    pools = [next(iter(size.values())) for size in sizes]
    table.add_row("a block of 16 tokens, MiB", *(f"{one.form.block_bytes / MIB:.2f}" for one in pools))
    table.add_row("blocks", *(f"{one.blocks:,}" for one in pools))
    table.add_row("tokens", *(f"{16 * one.blocks:,}" for one in pools))
    for numbers in ("model", "int8"):
        for length in (1024, 8192):
            counts = [
                sequences_that_fit(
                    llama_8b(),
                    [length - 256] * 1024,
                    budget=one,
                    new_tokens=256,
                    reading=reading,
                    numbers=numbers,
                    dtype=torch.bfloat16,
                ).sequences
                for one, reading in ((logged, "blocks"), (ours, "blocks"))
            ]
            table.add_row(f"sequences of {length:,} tokens, {numbers}", *(f"{one:,}" for one in counts))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
