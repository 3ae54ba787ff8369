"""Train a spectrally normalised network in channels_last memory format, with parametrized weights.

Usage:

    python channels_last.py                                 # batch 64 x 128 x 128, float16
    python channels_last.py --format contiguous
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


class Symmetric(nn.Module):
    """A parametrization: the matrix is symmetric whatever the optimizer does."""

    def forward(self, matrix):
        return matrix.triu() + matrix.triu(1).transpose(-1, -2)


def make_network(width, classes):
    layers, channels = [], 3
    for factor in (1, 2, 4, 4):
        conv = spectral_norm(nn.Conv2d(channels, factor * width, 3, stride=2, padding=1, bias=False))
        layers += [conv, nn.BatchNorm2d(factor * width), nn.LeakyReLU(0.1, inplace=True)]
        channels = factor * width
    mix = nn.Linear(channels, channels)
    parametrize.register_parametrization(mix, "weight", Symmetric())
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), mix, weight_norm(nn.Linear(channels, classes))
    )


def parse_args():
    parser = argparse.ArgumentParser(description="Train in channels_last with parametrized weights.")
    parser.add_argument("--format", choices=sorted(FORMATS), default="channels_last")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cudnn.benchmark = True
    memory_format = FORMATS[args.format]
    network = make_network(args.width, args.classes).to("cuda", memory_format=memory_format)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    strides = []
    for layer in network:
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_hook(lambda module, inputs, output: strides.append(output.stride()))

    for step in range(args.steps):
        strides.clear()
        images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
        images = images.to("cuda", memory_format=memory_format, non_blocking=True)
        labels = torch.randint(args.classes, (args.batch_size,)).to("cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(network(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}")
    print("activation strides " + " ".join(str(stride) for stride in strides))
    print(f"parametrized: {[name for name, _ in network.named_parameters() if 'parametrizations' in name]}")
    for layer in network:
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight")
    print(f"{sum(p.numel() for p in network.parameters())} parameters once the parametrizations are baked in")
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.3f} GiB")


if __name__ == "__main__":
    main()
