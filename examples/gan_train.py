"""Train a DCGAN on random 64 x 64 images: two optimizers, and a moving average of the generator.

Usage:

    python gan_train.py                                 # batch 128
    python gan_train.py --width 128 --batch-size 256 --samples out/
"""

import argparse
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset


class Generator(nn.Module):
    """Noise (N, latent, 1, 1) -> image (N, 3, 64, 64) in [-1, 1]."""

    def __init__(self, latent, width):
        super().__init__()
        channels = [latent, width * 8, width * 4, width * 2, width]
        layers = []
        for index, (before, after) in enumerate(pairwise(channels)):
            stride, padding = (1, 0) if index == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(inplace=True),
            ]
        layers += [nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()]
        self.main = nn.Sequential(*layers)

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    """Image (N, 3, 64, 64) -> logit (N,)."""

    def __init__(self, width):
        super().__init__()
        channels = [width, width * 2, width * 4, width * 8]
        layers = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for before, after in pairwise(channels):
            layers += [
                nn.Conv2d(before, after, 4, 2, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.LeakyReLU(0.2, inplace=True),
            ]
        layers += [nn.Conv2d(width * 8, 1, 4, 1, 0, bias=False)]
        self.main = nn.Sequential(*layers)

    def forward(self, images):
        return self.main(images).flatten()


class Discs(Dataset):
    """Images of one coloured disc on a coloured ground."""

    def __init__(self, length, seed):
        self.length, self.seed = length, seed

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, index))
        ground, colour = rng.uniform(-1, 1, size=(2, 3, 1, 1))
        y, x = np.ogrid[:64, :64]
        centre_y, centre_x = rng.uniform(16, 48, size=2)
        disc = (y - centre_y) ** 2 + (x - centre_x) ** 2 < rng.uniform(6, 16) ** 2
        return torch.from_numpy(np.where(disc, colour, ground).astype(np.float32))


def init_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def save_grid(images, path):
    """Writes the images side by side, eight in a row."""
    pixels = ((images.float() + 1) * 127.5).clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    rows = [np.concatenate(pixels[i : i + 8], axis=1) for i in range(0, len(pixels), 8)]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


def parse_args():
    parser = argparse.ArgumentParser(description="Train a DCGAN on random discs.")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--latent", type=int, default=100)
    parser.add_argument("--width", type=int, default=64, help="channels of the widest feature map")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--ema", type=float, default=0.999, help="decay of the generator's moving average")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--samples", type=Path, help="folder for a picture of generated images")
    parser.add_argument("--seed", type=int, default=999)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda")

    generator = Generator(args.latent, args.width).to(device)
    discriminator = Discriminator(args.width).to(device)
    generator.apply(init_weights)
    discriminator.apply(init_weights)
    averaged = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(args.ema), use_buffers=True)

    criterion = nn.BCEWithLogitsLoss()
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    fixed_noise = torch.randn(64, args.latent, 1, 1, device=device)
    loader = DataLoader(
        Discs(args.steps * args.batch_size, args.seed),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        pin_memory=True,
    )

    def autocast():
        return torch.autocast("cuda", dtype=torch.bfloat16, enabled=args.precision == "bf16")

    for step, real in enumerate(loader):
        real = real.to(device, non_blocking=True)
        ones = torch.ones(real.size(0), device=device)
        zeros = torch.zeros(real.size(0), device=device)
        noise = torch.randn(real.size(0), args.latent, 1, 1, device=device)

        discriminator.zero_grad()
        with autocast():
            fake = generator(noise)
            loss_real = criterion(discriminator(real), ones)
            loss_fake = criterion(discriminator(fake.detach()), zeros)
        loss_real.backward()
        loss_fake.backward()
        optimizer_d.step()

        generator.zero_grad()
        with autocast():
            verdict = discriminator(fake)
            loss_g = criterion(verdict, ones)
        loss_g.backward()
        optimizer_g.step()
        averaged.update_parameters(generator)

        loss_d = (loss_real + loss_fake).item()
        fooled = verdict.detach().sigmoid().mean().item()
        print(
            f"step {step + 1}/{args.steps}  loss D {loss_d:.4f}  loss G {loss_g.item():.4f}"
            f"  D(G(z)) {fooled:.4f}"
        )

    averaged.eval()
    with torch.no_grad():
        images = averaged(fixed_noise).cpu()
    print(f"generated {tuple(images.shape)}, mean {images.mean().item():.4f}")
    if args.samples:
        args.samples.mkdir(parents=True, exist_ok=True)
        save_grid(images, args.samples / "generated.png")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
