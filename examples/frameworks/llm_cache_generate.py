"""Generate text with each key-value cache of transformers, and with each way to choose tokens.

Usage:

    python llm_cache_generate.py                                 # 1.2 B parameters, every cache in turn
    python llm_cache_generate.py --caches dynamic static --search beams
    python llm_cache_generate.py --caches sliding --window 256
"""

import argparse

import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, QuantizedCache, StaticCache

SIZES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
CACHES = ["dynamic", "static", "offloaded", "offloaded_static", "quantized", "sliding", "none"]
SEARCHES = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "beams": {"do_sample": False, "num_beams": 4},
    "assisted": {"do_sample": False},
}
BOS, EOS = 1, 2


def parse_args():
    parser = argparse.ArgumentParser(description="Compare the key-value caches of generate().")
    parser.add_argument("--size", choices=sorted(SIZES), default="1b")
    parser.add_argument("--caches", choices=CACHES, nargs="+", default=CACHES)
    parser.add_argument("--search", choices=sorted(SEARCHES), default="greedy")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--prompt-len", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--window", type=int, default=512, help="tokens that the sliding window keeps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(args, size, window=None):
    config = MistralConfig(
        vocab_size=32000,
        max_position_embeddings=args.prompt_len + args.new_tokens,
        sliding_window=window,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        **SIZES[size],
    )
    return MistralForCausalLM(config).to("cuda", torch.bfloat16).eval()


def make_cache(name, model, args):
    """The cache to hand to generate(), or the options that make it build one."""
    longest = args.prompt_len + args.new_tokens
    match name:
        case "none":
            return {"use_cache": False}
        case "dynamic" | "sliding":
            return {"past_key_values": DynamicCache(config=model.config)}
        case "static":
            return {"past_key_values": StaticCache(config=model.config, max_cache_len=longest)}
        case "quantized":
            return {"past_key_values": QuantizedCache("fp8", config=model.config)}
        case _:
            return {"cache_implementation": name}


def cache_bytes(cache):
    """Bytes of the keys and values that a cache holds on the card."""
    tensors = []
    for layer in cache.layers:
        quantized = [getattr(layer, f"_quantized_{name}", [None])[0] for name in ("keys", "values")]
        tensors += [t for t in (layer.keys, layer.values, *quantized) if t is not None and t.is_cuda]
    return sum(t.numel() * t.element_size() for t in tensors)


def generate(model, cache_name, prompt, args):
    options = SEARCHES[args.search] | make_cache(cache_name, model, args)
    if args.search == "assisted":
        options["assistant_model"] = make_model(args, "tiny")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=args.new_tokens,
            min_new_tokens=args.new_tokens,
            return_dict_in_generate=True,
            **options,
        )
    torch.cuda.synchronize()
    held = 0 if output.past_key_values is None else cache_bytes(output.past_key_values)
    peak = torch.cuda.max_memory_allocated() - before
    new = output.sequences.shape[1] - args.prompt_len
    print(
        f"{cache_name:16} {args.search:8} {new} new tokens, cache {held / 2**20:9.3f} MiB,"
        f" peak {peak / 2**20:9.3f} MiB beyond the weights"
    )


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    prompt = torch.randint(EOS + 1, 32000, (args.batch_size, args.prompt_len), device="cuda")
    if args.search == "assisted":
        prompt = prompt[:1]  # the assistant drafts for one sequence at a time
    model = make_model(args, args.size)
    with torch.no_grad():
        model(prompt[:, :8])  # libraries take their workspaces
    print(f"{model.num_parameters() / 1e9:.2f} B parameters")
    for name in args.caches:
        if name == "sliding":
            model = make_model(args, args.size, args.window)
        generate(model, name, prompt, args)
    print(f"weights {torch.cuda.memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
