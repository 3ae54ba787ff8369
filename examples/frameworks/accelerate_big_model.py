"""Generate with a model that is larger than the card: Accelerate keeps the rest of its layers in host memory.

Usage:

    python accelerate_big_model.py                          # 7 B parameters in bfloat16, 10 GiB of the card
    python accelerate_big_model.py --gpu-memory 6GiB
"""

import argparse

import torch
from accelerate import cpu_offload, dispatch_model, infer_auto_device_map, init_empty_weights
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
    },
}


def parse_args():
    parser = argparse.ArgumentParser(description="Spread a model over the card and the host.")
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--gpu-memory", default="10GiB", help="what the layers on the card may take")
    parser.add_argument(
        "--all-on-host", action="store_true", help="bring every layer to the card when it runs"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=2048, **SIZES[args.size])
    with init_empty_weights():
        skeleton = LlamaForCausalLM(config).to(torch.bfloat16)
    device_map = infer_auto_device_map(
        skeleton,
        max_memory={0: args.gpu_memory, "cpu": "200GiB"},
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    if args.all_on_host:
        model = cpu_offload(model, execution_device=torch.device("cuda", 0))
    else:
        model = dispatch_model(model, device_map)
        on_card = sum(place == 0 for place in device_map.values())
        print(f"{on_card} of {len(device_map)} parts on the card")
    print(f"weights on the card {torch.cuda.memory_allocated() / 2**20:.2f} MiB")

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
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
