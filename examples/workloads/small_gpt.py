"""Workloads for vramfit stress: a small GPT that trains, and the same answering.

vramfit stress examples/workloads/small_gpt.py:training --gpu "RTX 4090" --vary batch_size --vary sequence_length
vramfit stress examples/workloads/small_gpt.py:inference --device cpu --budget 512MiB
"""

import torch
import torch.nn.functional as F
from torch import nn

from vramfit import Workload

VOCABULARY, WIDTH, HEADS, LAYERS = 8192, 512, 8, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding.weight.T


def batch(batch_size: int, sequence_length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch_size, sequence_length))


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


training = Workload(
    model=Model,
    batch=batch,
    sizes={"batch_size": 8, "sequence_length": 512},
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
)

inference = Workload(model=Model, batch=batch, sizes={"batch_size": 1, "sequence_length": 256})
