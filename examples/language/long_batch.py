"""Answers to prompts of very different lengths after one long instruction, with a cache of blocks.

    python examples/language/long_batch.py [--device cpu] [--prompts 8] [--budget 8MiB]
    vramfit run --gpu "RTX 4090" examples/language/long_batch.py --device cuda

The instruction is read once and shared, padding takes no memory, and a second batch finds the instruction again. The
model is small and drawn at random: put yours in its place.
"""

from __future__ import annotations

import argparse
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vramfit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--budget", default="8MiB", help="of the cache")
    options = parser.parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().to(options.device)
    draw = random.Random(0)
    instruction = [draw.randrange(1, 1000) for _ in range(256)]
    cache = vramfit.BlockCache(model, budget=options.budget)
    for batch in range(2):
        prompts = [
            instruction + [draw.randrange(1, 1000) for _ in range(draw.randint(8, 300))]
            for _ in range(options.prompts)
        ]
        inputs = cache.begin(prompts, model=model, max_new_tokens=16)
        tokens = model.generate(
            **inputs, past_key_values=cache, max_new_tokens=16, do_sample=False, pad_token_id=0
        )
        answers = tokens[:, inputs["input_ids"].shape[1] :]
        used = cache.usage()
        padded = tokens.shape[0] * (tokens.shape[1] - 1)
        print(
            f"batch {batch + 1}: {tuple(answers.shape)} tokens; {used.slots:,} slots, {used.waste:.1%} of them empty; "
            f"padded {padded:,}"
        )


if __name__ == "__main__":
    main()
