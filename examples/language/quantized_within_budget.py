"""Give a language model's layers formats of fewer bits, so that a forward pass stays within a budget of bytes.

Usage:

    python quantized_within_budget.py                                  # 20 million parameters, for an RTX 4090
    python quantized_within_budget.py --budget 40MiB --gpu "RTX 3060"
    python quantized_within_budget.py --formats int8 int4

Without a card it runs all the same: bytes are those of a virtual one, and outputs are compared on the CPU.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vramfit


def parse_args():
    parser = argparse.ArgumentParser(description="Quantise a language model within a budget of bytes.")
    parser.add_argument("--budget", default="45MiB", help="what torch may reserve, the model included")
    parser.add_argument("--gpu", default="RTX 4090")
    parser.add_argument("--formats", nargs="+", help="those to choose from; by default all that the card has")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=args.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).bfloat16().eval()
    batch = {"input_ids": torch.randint(3, 1024, (1, args.tokens))}
    live = vramfit.quantized(model, batch, budget=args.budget, gpu=args.gpu, formats=args.formats)
    choice = live.choice
    print(choice.words)
    for name, one in live.formats.items():
        print(f"  {name}: {one}")
    for line in choice.refused:
        print(f"  refused: {line}")
    print(f"layers one by one cost {choice.sum_of_costs:.3g} nats, together {choice.cost:.3g}")
    with torch.no_grad():
        print(f"logits {tuple(live(**batch).logits.shape)}")
    live.undo()


if __name__ == "__main__":
    main()
