"""Models of the transformers library, built from their configurations without any download."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from configurations.training import DEVICE, Program, images, inference, place, tokens, training

SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"use_cache": False}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"use_cache": False, "decoder_start_token_id": 0},
    ),
    "vit": ("ViTConfig", "ViTForImageClassification", {"num_labels": 1000}),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "use_cache": False,
        },
    ),
}


def build(kind: str, **changes: Any) -> torch.nn.Module:
    """A model with random weights."""
    config, model, options = SIZES[kind]
    return getattr(transformers, model)(getattr(transformers, config)(**{**options, **changes}))


def train(
    *,
    kind: str,
    batch: int,
    length: int = 256,
    precision: str,
    optimizer: str,
    recompute: bool = False,
    on_card: bool = False,
    **loop: Any,
) -> Program:
    """A model in training on its own loss."""
    model = place(lambda: build(kind), precision, on_card=on_card)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable()
    if kind == "vit":
        inputs = {"pixel_values": images(batch, 3, 224, 224), "labels": torch.arange(batch).to(DEVICE)}
    else:
        ids = tokens(batch, length, model.config.vocab_size)
        inputs = {"input_ids": ids, "labels": ids}
    return training(model, lambda: model(**inputs).loss, precision=precision, optimizer=optimizer, **loop)


def generate(*, kind: str, batch: int = 4, prompt: int = 256, new: int = 32, precision: str) -> Program:
    """``generate()`` with its dynamic cache, to a fixed length."""
    model = place(lambda: build(kind, use_cache=True), precision, on_card=True)
    ids = tokens(batch, prompt, model.config.vocab_size)
    mask = torch.ones_like(ids)

    def ask() -> Any:
        return model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
        )

    return inference(model, ask, precision=precision)
