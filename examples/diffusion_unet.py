"""Train a denoising diffusion U-Net with attention, then draw a few samples.

Usage:

    python diffusion_unet.py                            # 64 x 64 images, batch 32
    python diffusion_unet.py --image-size 128 --batch-size 16 --channels 192
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


def timestep_embedding(t, dim):
    """(N,) integer times -> (N, dim) sines and cosines."""
    frequencies = torch.exp(-math.log(10000) * torch.arange(dim // 2, device=t.device) / (dim // 2))
    angles = t[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, in_channels, out_channels, time_dim, dropout):
        super().__init__()
        self.norm1 = nn.GroupNorm(8, in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time = nn.Linear(time_dim, out_channels)
        self.norm2 = nn.GroupNorm(8, out_channels)
        self.drop = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.skip = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, x, emb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(emb))[:, :, None, None]
        h = self.conv2(self.drop(F.silu(self.norm2(h))))
        return h + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x, _emb):
        n, c, height, width = x.shape
        qkv = self.qkv(self.norm(x)).view(n, 3, self.heads, c // self.heads, height * width)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        attended = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(-1, -2).reshape(n, c, height, width))


class UNet(nn.Module):
    """Noisy images (N, 3, H, W) and times (N,) -> the noise, of the images' shape."""

    def __init__(self, image_size, base, multipliers, blocks, attention_at, heads, dropout):
        super().__init__()
        time_dim = base * 4
        self.base = base
        self.time = nn.Sequential(nn.Linear(base, time_dim), nn.SiLU(), nn.Linear(time_dim, time_dim))
        self.stem = nn.Conv2d(3, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()

        def level(before, after, side):
            layers = nn.ModuleList([ResBlock(before, after, time_dim, dropout)])
            if side in attention_at:
                layers.append(Attention(after, heads))
            return layers

        channels, side, skips = base, image_size, [base]
        for depth, multiplier in enumerate(multipliers):
            for _ in range(blocks):
                self.down.append(level(channels, base * multiplier, side))
                channels = base * multiplier
                skips.append(channels)
            if depth < len(multipliers) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1))
                skips.append(channels)
                side //= 2
        self.middle = nn.ModuleList(
            [
                ResBlock(channels, channels, time_dim, dropout),
                Attention(channels, heads),
                ResBlock(channels, channels, time_dim, dropout),
            ]
        )
        for depth, multiplier in reversed(list(enumerate(multipliers))):
            for _ in range(blocks + 1):
                self.up.append(level(channels + skips.pop(), base * multiplier, side))
                channels = base * multiplier
            if depth > 0:
                self.up.append(nn.Conv2d(channels, channels, 3, padding=1))
                side *= 2
        self.norm = nn.GroupNorm(8, channels)
        self.head = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.base))
        h = self.stem(x)
        skips = [h]
        for stage in self.down:
            if isinstance(stage, nn.Conv2d):
                h = stage(h)
            else:
                for layer in stage:
                    h = layer(h, emb)
            skips.append(h)
        for layer in self.middle:
            h = layer(h, emb)
        for stage in self.up:
            if isinstance(stage, nn.Conv2d):
                h = stage(F.interpolate(h, scale_factor=2.0, mode="nearest"))
            else:
                h = torch.cat([h, skips.pop()], dim=1)
                for layer in stage:
                    h = layer(h, emb)
        return self.head(F.silu(self.norm(h)))


class Diffusion:
    """The cosine noise schedule."""

    def __init__(self, steps, device):
        self.steps = steps
        x = torch.linspace(0, 1, steps + 1, device=device)
        alpha_bar = torch.cos((x + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)
        self.alpha_bar = torch.cumprod(1 - betas, dim=0)

    def loss(self, model, images):
        t = torch.randint(self.steps, (images.size(0),), device=images.device)
        noise = torch.randn_like(images)
        level = self.alpha_bar[t][:, None, None, None]
        noisy = level.sqrt() * images + (1 - level).sqrt() * noise
        return F.mse_loss(model(noisy, t), noise)

    @torch.no_grad()
    def sample(self, model, shape, steps):
        """Deterministic sampling (DDIM) in a few steps."""
        images = torch.randn(shape, device=self.alpha_bar.device)
        times = torch.linspace(self.steps - 1, 0, steps).long().tolist()
        for index, time in enumerate(times):
            level = self.alpha_bar[time]
            after = self.alpha_bar[times[index + 1]] if index + 1 < steps else torch.ones_like(level)
            t = torch.full((shape[0],), time, device=images.device)
            noise = model(images, t)
            clean = ((images - (1 - level).sqrt() * noise) / level.sqrt()).clamp(-1, 1)
            images = after.sqrt() * clean + (1 - after).sqrt() * noise
        return images


class Gradients(Dataset):
    """Smooth colour gradients in random directions."""

    def __init__(self, length, image_size, seed):
        self.length, self.image_size, self.seed = length, image_size, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        direction = torch.randn(3, 2, generator=generator)
        axis = torch.linspace(-1, 1, self.image_size)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"))
        return torch.tanh(torch.einsum("cd,dhw->chw", direction, grid))


@torch.no_grad()
def update_average(average, model, decay):
    """Moves the averaged copy towards the model, all tensors at once."""
    ours, theirs = list(average.parameters()), list(model.parameters())
    torch._foreach_lerp_(ours, theirs, 1 - decay)


def parse_args():
    parser = argparse.ArgumentParser(description="Train a diffusion U-Net on colour gradients.")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--multipliers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--attention-at", type=int, nargs="*", default=[16, 8], help="side lengths")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--timesteps", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--sample-steps", type=int, default=5)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--ema", type=float, default=0.9999)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda")

    model = UNet(
        args.image_size,
        args.channels,
        args.multipliers,
        args.blocks,
        set(args.attention_at),
        args.heads,
        dropout=0.1,
    ).to(device)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    diffusion = Diffusion(args.timesteps, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = DataLoader(
        Gradients(args.steps * args.batch_size, args.image_size, args.seed),
        batch_size=args.batch_size,
        shuffle=True,
        pin_memory=True,
    )
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")

    for step, images in enumerate(loader):
        images = images.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "bf16"):
            loss = diffusion.loss(model, images)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        update_average(average, model, args.ema)
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")

    if args.samples:
        shape = (args.samples, 3, args.image_size, args.image_size)
        images = diffusion.sample(average, shape, args.sample_steps).cpu().numpy()
        print(f"samples {images.shape}, standard deviation {images.std():.4f}")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
