"""Quantise a language model with torchao and generate with it.

Usage:

    python torchao_quantized.py                             # 3 B parameters, int8 weights
    python torchao_quantized.py --method int8-dynamic
    python torchao_quantized.py --method float8
"""

import argparse

import torch
from torch import nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
    quantize_,
)
from torchao.utils import get_model_size_in_bytes
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
METHODS = {
    "none": lambda: None,
    "int8": Int8WeightOnlyConfig,
    "int8-dynamic": Int8DynamicActivationInt8WeightConfig,
    "int4": lambda: Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d"),
    "int4-unpacked": lambda: IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
    "float8": Float8WeightOnlyConfig,
    "float8-dynamic": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
}


def parse_args():
    parser = argparse.ArgumentParser(description="Quantise a language model and generate with it.")
    parser.add_argument("--size", choices=sorted(SIZES), default="3b")
    parser.add_argument("--method", choices=sorted(METHODS), default="int8")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=2048, **SIZES[args.size])
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    before = torch.cuda.memory_allocated()
    if (method := METHODS[args.method]()) is not None:
        quantize_(
            model, method, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name != "lm_head"
        )
    after = torch.cuda.memory_allocated()
    print(f"weights {before / 2**20:.2f} MiB before and {after / 2**20:.2f} MiB after, by torch")
    print(f"weights {get_model_size_in_bytes(model) / 2**20:.2f} MiB, by torchao")
    print(f"one weight: {type(model.model.layers[0].mlp.up_proj.weight).__name__}")

    torch.cuda.reset_peak_memory_stats()
    prompt = torch.randint(3, 32000, (args.batch_size, args.prompt_len), device="cuda")
    with torch.no_grad():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=args.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    print(f"{output.shape[1] - args.prompt_len} new tokens for each of {args.batch_size} prompts")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
