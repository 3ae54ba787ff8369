"""Fine-tune a language model with PEFT: LoRA, DoRA, or LoRA over 8-bit weights.

Usage:

    python peft_lora.py                                     # 3 B parameters, rank 16, batch 4 x 1024
    python peft_lora.py --method dora
    python peft_lora.py --method int8 --gradient-checkpointing
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig, quantize_
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


def parse_args():
    parser = argparse.ArgumentParser(description="Fine-tune a language model with low-rank adapters.")
    parser.add_argument("--size", choices=sorted(SIZES), default="3b")
    parser.add_argument("--method", choices=["lora", "dora", "int8", "full"], default="lora")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--merge", action="store_true", help="merge the adapters into the weights at the end")
    parser.add_argument("--output-dir", default="peft_output")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def make_model(args):
    config = LlamaConfig(
        vocab_size=32000, max_position_embeddings=args.seq_len, use_cache=False, **SIZES[args.size]
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).to("cuda")
    if args.method == "int8":
        quantize_(model.model.layers, Int8WeightOnlyConfig())
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if args.method == "full":
        return model
    return get_peft_model(
        model,
        LoraConfig(
            r=args.rank,
            lora_alpha=2 * args.rank,
            lora_dropout=0.05,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            use_dora=args.method == "dora",
            task_type="CAUSAL_LM",
        ),
    )


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    model = make_model(args)
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trainable)
    total = sum(p.numel() for p in model.parameters())
    print(f"trainable params: {count:,} || all params: {total:,} || trainable%: {100 * count / total:.4f}")
    print(f"weights {torch.cuda.memory_allocated() / 2**20:.2f} MiB")

    optimizer = torch.optim.AdamW(trainable, lr=2e-4)
    for step in range(args.steps):
        tokens = torch.randint(3, 32000, (args.batch_size, args.seq_len)).to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")

    if args.method != "full":
        model.save_pretrained(args.output_dir)
        if args.merge:
            model = model.merge_and_unload()
            print(f"merged: {torch.cuda.memory_allocated() / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
