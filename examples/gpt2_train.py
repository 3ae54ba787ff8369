"""Pre-train GPT-2 from scratch on synthetic token sequences, in bfloat16 autocast.

Usage:

    python gpt2_train.py                                # GPT-2 small, batch 4 x 1024
    python gpt2_train.py --size xl --batch-size 1 --grad-accum 4
"""

import argparse
import math
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {
    "small": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
    "tiny": {"n_layer": 2, "n_head": 2, "n_embd": 64},
}


class CountingSequences(Dataset):
    """Token sequences that count upwards with a stride of their own: easy to learn, different each time."""

    def __init__(self, length, vocab_size, seq_len, seed):
        self.length, self.vocab_size, self.seq_len, self.seed = length, vocab_size, seq_len, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        start = torch.randint(self.vocab_size, (1,), generator=generator)
        stride = torch.randint(1, 8, (1,), generator=generator)
        return (start + stride * torch.arange(self.seq_len)) % self.vocab_size


def make_optimizer(model, lr, weight_decay):
    """AdamW with decay on the matrices only."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def cosine_with_warmup(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def parse_args():
    parser = argparse.ArgumentParser(description="Pre-train GPT-2 on synthetic tokens.")
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--grad-clip", type=float, default=1.0)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")

    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=args.seq_len,
        bos_token_id=args.vocab_size - 1,
        eos_token_id=args.vocab_size - 1,
        use_cache=False,
        **SIZES[args.size],
    )
    model = GPT2LMHeadModel(config).to(device)
    model.loss_type = "ForCausalLM"
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters on {device}")

    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: cosine_with_warmup(step, warmup=2, total=args.steps)
    )
    dataset = CountingSequences(
        args.steps * args.grad_accum * args.batch_size, args.vocab_size, args.seq_len, args.seed
    )
    loader = iter(DataLoader(dataset, batch_size=args.batch_size, shuffle=True, pin_memory=True))
    forward = torch.compile(model) if args.compile else model

    for step in range(args.steps):
        start = time.perf_counter()
        total_loss = 0.0
        for _ in range(args.grad_accum):
            tokens = next(loader).to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = forward(input_ids=tokens, labels=tokens).loss / args.grad_accum
            loss.backward()
            total_loss += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        torch.cuda.synchronize()
        print(
            f"step {step + 1}/{args.steps}  loss {total_loss:.4f}  norm {norm.item():.3f}"
            f"  lr {scheduler.get_last_lr()[0]:.2e}  {time.perf_counter() - start:.2f} s"
        )
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
