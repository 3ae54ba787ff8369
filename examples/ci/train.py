"""A small training loop: the program whose memory the examples of this folder hold to a budget."""

import argparse

import torch
from torch import nn


def build() -> nn.Module:
    """A transformer of 13 M parameters."""
    layer = nn.TransformerEncoderLayer(d_model=512, nhead=8, dim_feedforward=2048, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    """One step of a loss that stands for yours."""
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(arguments.steps):
        train_step(model, optimizer, torch.randn(arguments.batch_size, 256, 512, device="cuda"))


if __name__ == "__main__":
    main()
