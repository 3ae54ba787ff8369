"""Phi-4-mini-instruct answers a question in bfloat16, as torchao's authors measured it: reserved memory beside theirs.

    python benchmarks/measured_programs/phi4_mini.py [--answer TOKENS] [--layers N]

Needs transformers and accelerate. Weights are virtual, and of question and answer only the lengths matter.

Source: the cards of huggingface.co/pytorch/Phi-4-mini-instruct-INT4 and -FP8 (written before torch 2.8) and
torchao's ``docs/source/eager_tutorials/serving.rst`` (github.com/pytorch/ao): `from_pretrained` with
``device_map="auto"``, `reset_peak_memory_stats`, one `generate` of at most 128 new tokens, then
`torch.cuda.max_memory_reserved` over 1e9. For microsoft/Phi-4-mini-instruct in bfloat16 they give 8.91 GB. The GPU is
not named beside the figure; speed was measured on an A100 and an H100.

NOTE [One embedding too many]
The weights are 7.672 GB. Before it loads them, transformers asks the allocator for one block as large as all of them
and frees it (`caching_allocator_warmup`). Up to 4.53 that sum ran over the names in the state dict, in which the
embedding stands twice, as itself and as the tied head: 200,064 x 3,072 x 2 bytes = 1.229 GB more, which stay reserved.
From 4.54 on (July 2025) tied weights count once. `reserve_as_then` makes the older block where a newer version is
installed; the newer version then finds enough in the cache and asks for nothing.

NOTE [The length of the answer]
Keys and values of 17 to 145 tokens are blocks of 34 to 290 KiB, two a layer, which come from segments of 2 MiB. An
answer as on torchao's page takes four of these; all 128 tokens take ten to twelve, and 8.93 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from vramfit.virtual.gpu import VirtualGPU

CARD = "H100"
PUBLISHED = 8.91
"""GB (1e9 bytes), two decimals."""

QUESTION = 17
"""Tokens of "Hey, are you conscious? Can you talk to me?" in Phi-4-mini's template, with an empty system message."""

ANSWER = 29
"""Tokens of the answer on torchao's page, with the one that ends it."""

LAYERS = 32
VOCABULARY = 200_064
WIDTH = 3072
COUNTED_ONCE = (4, 54)
"""The first version of transformers that counts tied weights once (``modeling_utils.py``)."""


def main(arguments: list[str] | None = None) -> int:
    """Print the row; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--answer", type=int, default=ANSWER, help="new tokens")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument("--row", action="store_true", help="print the prediction for accuracy.py")
    options = parser.parse_args(arguments)
    if options.row:
        size = predicted(options.answer, options.layers)
        print(json.dumps({"predicted": size, "below": 0, "above": 0}))
        return 0
    then = predicted(options.answer, options.layers) / 1e9
    now = predicted(options.answer, options.layers, then=False) / 1e9
    print("| | published, GB | predicted | |\n|---|---:|---:|---:|")
    print(f"| tied weights counted twice | {PUBLISHED} | {then:.3f} | {then / PUBLISHED - 1:+.2%} |")
    print(f"| counted once | | {now:.3f} | |")
    return 0


def predicted(answer: int, layers: int = LAYERS, *, then: bool = True) -> int:
    """Bytes reserved at most while the answer is generated.

    Args:
        answer: new tokens.
        layers: of the model.
        then: load as transformers did then, and not as the installed version does.
    """
    with VirtualGPU(CARD):
        model = load(layers, then)
        torch.cuda.reset_peak_memory_stats()
        tokens = torch.full((1, QUESTION), 1, device="cuda")
        mask = torch.ones_like(tokens)
        model.generate(input_ids=tokens, attention_mask=mask, max_new_tokens=answer)
        return torch.cuda.max_memory_reserved()


def load(layers: int, then: bool) -> Any:
    """The model on the card, placed by `from_pretrained`."""
    try:
        import accelerate
        import transformers
    except ImportError as error:
        sys.exit(f"the model needs {error.name}, which is not installed\nTry: pip install {error.name}")
    del accelerate  # only `from_pretrained` uses it
    config = architecture(layers)
    weights = transformers.Phi3ForCausalLM(config).to(torch.bfloat16).state_dict()
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if then and version >= COUNTED_ONCE:
        reserve_as_then(weights)
    del weights["lm_head.weight"]  # tied to the embedding, and not in the file
    return transformers.Phi3ForCausalLM.from_pretrained(
        None, config=config, state_dict=weights, device_map="auto", dtype=torch.bfloat16
    )


def reserve_as_then(weights: dict[str, torch.Tensor]) -> None:
    """Leave a free block as large as all entries of the state dict: see NOTE [One embedding too many]."""
    size = sum(weight.numel() * weight.element_size() for weight in weights.values())
    torch.empty(size // 2, dtype=torch.float16, device="cuda")


def architecture(layers: int) -> Any:
    """Phi-4-mini-instruct, whose attention reaches further than any text here."""
    from transformers import Phi3Config

    return Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.75,
        sliding_window=262_144,
        tie_word_embeddings=True,
        bos_token_id=199_999,
        eos_token_id=199_999,
        pad_token_id=199_999,
    )


if __name__ == "__main__":
    sys.exit(main())
