"""Train one transformer in every way that torch itself has to keep fewer activations on the card.

Usage:

    python activation_memory.py                             # 12 layers, batch 8 x 1024, each way in turn
    python activation_memory.py --ways plain offload --batch-size 16
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
WAYS = [
    "plain",
    "checkpoint",
    "checkpoint-reentrant",
    "selective",
    "sequential",
    "offload",
    "offload-pageable",
]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, (N, T, C) -> (N, T, C)."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


def keep_matmuls(context, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def run_blocks(blocks, x, way):
    if way == "sequential":
        return checkpoint_sequential(blocks, min(4, len(blocks)), x, use_reentrant=False)
    for block in blocks:
        match way:
            case "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            case "checkpoint-reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            case "selective":
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(keep_matmuls),
                )
            case _:
                x = block(x)
    return x


def parse_args():
    parser = argparse.ArgumentParser(description="Compare ways to keep fewer activations.")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def measure(args, blocks, optimizer, way):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    for _ in range(args.steps):
        x = torch.randn(args.batch_size, args.seq_len, args.width, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if way.startswith("offload"):
                with save_on_cpu(pin_memory=way == "offload"):
                    loss = run_blocks(blocks, x, way).float().pow(2).mean()
            else:
                loss = run_blocks(blocks, x, way).float().pow(2).mean()
        kept = torch.cuda.memory_allocated() - before
        pinned = torch.cuda.host_memory_stats()["active_bytes.current"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del x, loss
    peak = torch.cuda.max_memory_allocated()
    print(
        f"{way:21} kept {kept / 2**20:9.2f} MiB, pinned on the host {pinned / 2**20:9.2f} MiB,"
        f" peak {peak / 2**20:9.2f} MiB"
    )


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    blocks = nn.Sequential(*(Block(args.width, args.width // 64) for _ in range(args.layers))).to("cuda")
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-4)
    print(f"{sum(p.numel() for p in blocks.parameters()) / 1e6:.1f} M parameters")
    blocks(
        torch.randn(1, args.seq_len, args.width, device="cuda")
    ).sum().backward()  # libraries take workspaces
    optimizer.zero_grad(set_to_none=True)
    for way in args.ways:
        measure(args, blocks, optimizer, way)


if __name__ == "__main__":
    main()
