"""Train a Llama-style decoder from its configuration with AdamW.

Usage:

    python llama_train.py                               # 7 B parameters, pure bfloat16, batch 4 x 2048
    python llama_train.py --size 1b --precision mixed --gradient-checkpointing
"""

import argparse

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
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
    "160m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


class PackedTokens(IterableDataset):
    """An endless stream of documents, joined by an end-of-text token and cut to equal length."""

    def __init__(self, vocab_size, seq_len, seed, eos=2):
        self.vocab_size, self.seq_len, self.seed, self.eos = vocab_size, seq_len, seed, eos

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        buffer = []
        while True:
            while len(buffer) < self.seq_len:
                length = int(torch.randint(64, 1024, (1,), generator=generator))
                document = torch.randint(3, self.vocab_size, (length,), generator=generator)
                buffer += [*document.tolist(), self.eos]
            yield torch.tensor(buffer[: self.seq_len])
            buffer = buffer[self.seq_len :]


def parse_args():
    parser = argparse.ArgumentParser(description="Train a Llama-style language model on synthetic tokens.")
    parser.add_argument("--size", choices=sorted(SIZES), default="7b")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--precision",
        choices=["bf16", "mixed", "fp32"],
        default="bf16",
        help="bf16: parameters and optimizer in bfloat16; mixed: float32 parameters, bfloat16 autocast",
    )
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--fused", action="store_true", help="the fused AdamW kernel")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True

    config = LlamaConfig(
        vocab_size=args.vocab_size,
        max_position_embeddings=args.seq_len,
        use_cache=False,
        attn_implementation=args.attention,
        **SIZES[args.size],
    )
    model = LlamaForCausalLM(config)
    if args.precision == "bf16":
        model = model.to(torch.bfloat16)
    model = model.cuda()
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e9:.2f} B parameters, {torch.cuda.memory_allocated() / 2**30:.2f} GiB on the GPU")

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=args.fused or None
    )
    dataset = PackedTokens(args.vocab_size, args.seq_len, args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, pin_memory=True)

    for step, tokens in enumerate(loader):
        if step == args.steps:
            break
        tokens = tokens.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "mixed"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")

    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"peak allocated {peak / 2**30:.2f} GiB, reserved {held / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
