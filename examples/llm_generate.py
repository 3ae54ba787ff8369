"""Generate text with a Llama-style model and a key-value cache.

Usage:

    python llm_generate.py                              # 3 B parameters, batch 8, prompt 512, 64 new tokens
    python llm_generate.py --size 1b --batch-size 32 --sample
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {
    "3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}
BOS, EOS = 1, 2


def parse_args():
    parser = argparse.ArgumentParser(description="Generate with a randomly initialised language model.")
    parser.add_argument("--size", choices=sorted(SIZES), default="3b")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda")

    config = LlamaConfig(
        vocab_size=args.vocab_size,
        max_position_embeddings=args.prompt_len + args.new_tokens,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        **SIZES[args.size],
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, args.dtype))
    model.eval()
    weights = torch.cuda.memory_allocated()
    print(f"{model.num_parameters() / 1e9:.2f} B parameters, weights {weights / 2**30:.2f} GiB")

    # Prompts of different lengths, padded on the left as a tokenizer for generation does.
    prompt = torch.randint(EOS + 1, args.vocab_size, (args.batch_size, args.prompt_len))
    mask = torch.ones_like(prompt)
    for row in range(args.batch_size):
        padding = row * args.prompt_len // (2 * args.batch_size)
        prompt[row, :padding] = EOS
        mask[row, :padding] = 0
        prompt[row, padding] = BOS

    choice = {"do_sample": False}
    if args.sample:
        choice = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
    start = time.perf_counter()
    with torch.no_grad():
        output = model.generate(
            input_ids=prompt.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=args.new_tokens,
            use_cache=True,
            **choice,
        )
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start

    new = output[:, args.prompt_len :].cpu()
    for row, tokens in enumerate(new[:2].tolist()):
        print(f"row {row}: {tokens[:8]} ...")
    print(f"{new.numel()} new tokens in {seconds:.2f} s, {new.numel() / seconds:.1f} tokens/s")
    peak = torch.cuda.max_memory_allocated()
    print(f"peak memory {peak / 2**30:.2f} GiB, {(peak - weights) / 2**30:.2f} GiB beyond the weights")


if __name__ == "__main__":
    main()
