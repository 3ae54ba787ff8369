"""Train a Vision Transformer written in plain PyTorch: mixup, gradient accumulation, checkpointing.

Usage:

    python vit_train.py                                 # ViT-B/16, batch 64, bfloat16 autocast
    python vit_train.py --dim 1024 --layers 24 --heads 16 --checkpoint
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim)
        )

    def attend(self, x):
        n, length, dim = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(out.transpose(1, 2).reshape(n, length, dim))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Images (N, 3, H, W) -> logits (N, classes)."""

    def __init__(self, image_size, patch, dim, layers, heads, classes, dropout, use_checkpoint):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList([Block(dim, heads, dropout) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoint else block(x)
        return self.head(self.norm(x)[:, 0])


def mixup(images, labels, classes, alpha):
    """Mixes each image with another one of the batch; the targets become distributions."""
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    order = torch.randperm(images.size(0), device=images.device)
    targets = F.one_hot(labels, classes).float()
    return images.lerp(images[order], 1 - share), targets.lerp(targets[order], 1 - share)


def parse_args():
    parser = argparse.ArgumentParser(description="Train a Vision Transformer on random images.")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=2, help="batches per optimizer step")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch", type=int, default=16)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--mixup", type=float, default=0.8)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--checkpoint", action="store_true", help="recompute the blocks in the backward pass")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    torch.set_default_device("cuda")
    model = VisionTransformer(
        args.image_size,
        args.patch,
        args.dim,
        args.layers,
        args.heads,
        args.classes,
        args.dropout,
        args.checkpoint,
    )
    torch.set_default_device(None)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1)
    count = args.batch_size * 2
    images = torch.rand(count, 3, args.image_size, args.image_size)
    labels = torch.randint(args.classes, (count,))
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=args.batch_size, shuffle=True, pin_memory=True
    )

    model.train()
    step, seen, running = 0, 0, torch.zeros((), device="cuda")
    while step < args.steps:
        for pixels, target in loader:
            pixels, target = pixels.cuda(non_blocking=True), target.cuda(non_blocking=True)
            mixed, soft = mixup(pixels, target, args.classes, args.mixup)
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
                loss = F.cross_entropy(model(mixed), soft) / args.accumulate
            loss.backward()
            running += loss.detach()
            seen += 1
            if seen % args.accumulate:
                continue
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            step += 1
            print(f"step {step}/{args.steps}  loss {running.item():.4f}")
            running.zero_()
            if step == args.steps:
                break
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
