"""A small language model that was trained a little, for measures of quality: Llama's blocks over bytes.

A model with drawn weights has nearly the same logits everywhere, and one from elsewhere would have to be downloaded.
This one learns for a minute to tell the next byte of vramfit's documents, which gives its layers different weights in
the result.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

_TEXTS = Path(__file__).parents[2] / "docs"


def corpus() -> torch.Tensor:
    """The documents as bytes, in the order of their names."""
    joined = b"\n".join(path.read_bytes() for path in sorted(_TEXTS.glob("[a-z]*.md")))
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).long()


def config(layers: int, hidden: int = 1024, intermediate: int = 2048) -> LlamaConfig:
    """The shape."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def trained(layers: int, steps: int, hidden: int = 1024, intermediate: int = 2048) -> LlamaForCausalLM:
    """A model in bfloat16 after some steps of AdamW."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(layers, hidden, intermediate))
    text = corpus()[:-65_536]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    draws = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - 64, (4,), generator=draws)
        ids = torch.stack([text[start : start + 64] for start in starts.tolist()])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.bfloat16().eval().requires_grad_(False)


def batch(number: int, rows: int = 1, length: int = 48) -> dict[str, torch.Tensor]:
    """Text that no step saw; numbers give other places."""
    text = corpus()[-65_536:]
    draws = torch.Generator().manual_seed(1000 + number)
    starts = torch.randint(len(text) - length, (rows,), generator=draws)
    return {"input_ids": torch.stack([text[start : start + length] for start in starts.tolist()])}
