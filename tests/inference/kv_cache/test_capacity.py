"""How many sequences are said to fit, beside what the cache does; 200 mixes are in `benchmarks/language/mixes.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

import vramfit
from vramfit.errors import CacheFullError, UsageError
from vramfit.inference.kv_cache.cached_batch import Prompt
from vramfit.inference.kv_cache.capacity import sequences_that_fit

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PROMPTS = (30, 7, 64, 15, 16, 17, 100, 3)
NEW = 40


def generate(
    config: Any, prompts: tuple[int, ...], budget: int, options: dict[str, Any]
) -> vramfit.BlockCache:
    cache = vramfit.BlockCache(config, budget=budget, **options)
    width = max(prompts)
    columns = tuple(tuple(range(width - one, width)) for one in prompts)
    cache.batch.expect(Prompt(width=width, columns=columns, room=width + NEW))
    for step in range(NEW):
        states = torch.zeros(len(prompts), 2, width if step == 0 else 1, 8)
        for layer in range(2):
            cache.update(states, states, layer)
    return cache


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LlamaConfig(**SHAPE), {}),
        (LlamaConfig(**SHAPE), {"numbers": "int8", "block_tokens": 8}),
        (LlamaConfig(**SHAPE), {"window": 20, "sinks": 3}),
        (MistralConfig(**SHAPE, sliding_window=24), {"block_tokens": 4}),
    ],
)
def test_the_pool_is_the_smallest_that_holds_them(config: Any, options: dict[str, Any]) -> None:
    said = sequences_that_fit(config, PROMPTS, budget="1GiB", new_tokens=NEW, dtype=torch.float32, **options)
    assert said.sequences == len(PROMPTS)
    cache = generate(config, PROMPTS, said.pool_bytes, options)
    used = cache.usage()
    assert (used.blocks, used.blocks_most) == (said.blocks, said.blocks)
    assert (used.pool_bytes, used.scratch_bytes) == (said.pool_bytes, said.scratch_bytes)
    with pytest.raises(CacheFullError):
        generate(config, PROMPTS, said.pool_bytes - 1, options)


def test_a_common_beginning_is_counted_once() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, intermediate_size=32, eos_token_id=None)).eval()
    prompts = [[7] * 37 + [8 + row] * (5 + 9 * row) for row in range(3)]
    said = sequences_that_fit(model, list(map(len, prompts)), budget="1GiB", new_tokens=8, shared=37)
    cache = vramfit.BlockCache(model, budget=said.pool_bytes)
    inputs = cache.begin(prompts, model=model, max_new_tokens=8)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert cache.usage().blocks_most == said.blocks == cache.usage().blocks
    assert cache.usage().scratch_bytes == said.scratch_bytes


def test_a_budget_is_kept_and_one_more_does_not_fit() -> None:
    config = LlamaConfig(**SHAPE)
    whole = sequences_that_fit(config, PROMPTS, budget="1GiB", new_tokens=NEW, dtype=torch.float32)
    said = sequences_that_fit(
        config, PROMPTS, budget=whole.total_bytes - 1, new_tokens=NEW, dtype=torch.float32
    )
    assert said.sequences == len(PROMPTS) - 1
    assert said.total_bytes < whole.total_bytes
    nothing = sequences_that_fit(config, PROMPTS, budget=1000, new_tokens=NEW)
    assert (nothing.sequences, nothing.total_bytes) == (0, 0)
    with pytest.raises(UsageError, match="no whole number from 1 on"):
        sequences_that_fit(config, [0], budget="1GiB", new_tokens=1)
    with pytest.raises(UsageError, match="no prompts"):
        sequences_that_fit(config, [], budget="1GiB", new_tokens=1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"numbers": "int4"}, "none that blocks hold"),
        ({"reading": "twice"}, "no way to read a cache"),
        ({"window": 1}, "window=1"),
        ({"sinks": 4}, "sinks are kept beside a window"),
    ]
    for options, message in wrong:
        with pytest.raises(UsageError, match=message):
            sequences_that_fit(config, [3], budget="1GiB", new_tokens=1, **options)
