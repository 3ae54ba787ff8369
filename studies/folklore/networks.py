"""Networks that the sayings name, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ResNetConfig
from transformers import ResNetForImageClassification as ResNet

DEPTHS = {50: [3, 4, 6, 3], 152: [3, 8, 36, 3]}


def resnet(depth: int) -> nn.Module:
    """ResNet-50 or ResNet-152 for the 1,000 classes of ImageNet."""
    return ResNet(ResNetConfig(depths=DEPTHS[depth], num_labels=1000, downsample_in_bottleneck=False))


def bert_large() -> nn.Module:
    """BERT-Large with its masked-language head."""
    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return BertForMaskedLM(config)


def gpt2(*, layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """GPT-2 small, or another size of it."""
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, n_head=heads, use_cache=False))


class ConvBlock(nn.Module):
    """Two convolutions of 3 x 3 x 3 with batch norm, as in the 3D U-Net of Çiçek et al. (2016)."""

    def __init__(self, before: int, between: int, after: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(before, between, 3, padding=1),
            nn.BatchNorm3d(between),
            nn.ReLU(inplace=True),
            nn.Conv3d(between, after, 3, padding=1),
            nn.BatchNorm3d(after),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet3d(nn.Module):
    """3D U-Net of four levels; ``width`` is 32 in the paper."""

    def __init__(self, width: int = 32, classes: int = 2) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(
            ConvBlock(1 if level == 0 else widths[level - 1] * 2, size, size * 2)
            for level, size in enumerate(widths)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(4 * size, 4 * size, 2, stride=2) for size in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(ConvBlock(6 * size, 2 * size, 2 * size) for size in reversed(widths[:-1]))
        self.head = nn.Conv3d(2 * width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool3d(x, 2) if level else x)
            kept.append(x)
        for grow, block, skipped in zip(self.up, self.merge, reversed(kept[:-1]), strict=True):
            x = block(torch.cat([skipped, grow(x)], dim=1))
        return self.head(x)


def train_images(model: nn.Module, batch: int, *, amp: bool = False, side: int = 224, steps: int = 2) -> None:
    """Train a classifier of images with SGD and momentum."""
    model.cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        images = torch.randn(batch, 3, side, side, device="cuda")
        labels = torch.randint(0, 1000, (batch,), device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(images).logits.float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_text(
    model: nn.Module,
    batch: int,
    length: int,
    *,
    amp: bool = False,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    accumulate: int = 1,
    steps: int = 2,
    **options: float,
) -> None:
    """Train a language model; the batch is split into ``accumulate`` parts whose gradients are summed."""
    model.cuda().train()
    chosen = optimizer(model.parameters(), lr=1e-4, **options)
    vocabulary = model.config.vocab_size
    for _ in range(steps):
        for _ in range(accumulate):
            tokens = torch.randint(0, vocabulary, (batch // accumulate, length), device="cuda")
            with torch.autocast("cuda", torch.bfloat16, enabled=amp):
                loss = model(input_ids=tokens, labels=tokens).loss / accumulate
            loss.backward()
            del loss
        chosen.step()
        chosen.zero_grad()


class Checkpointed(nn.Module):
    """A block that keeps its input alone and runs again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)
