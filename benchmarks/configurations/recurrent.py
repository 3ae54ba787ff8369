"""Recurrent models in plain PyTorch: a language model on LSTM or GRU layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from configurations.training import Program, place, tokens, training

LAYERS = {"lstm": nn.LSTM, "gru": nn.GRU}


class Recurrent(nn.Module):
    """Tokens [B, S] in, logits [B, S, V] out."""

    def __init__(self, kind: str, vocabulary: int, width: int, layers: int, *, both_ways: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = LAYERS[kind](
            width, width, layers, batch_first=True, dropout=0.2, bidirectional=both_ways
        )
        self.head = nn.Linear(2 * width if both_ways else width, vocabulary)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        hidden, _ = self.layers(self.embedding(tokens_BS))
        return self.head(hidden)


def recurrent(
    *,
    kind: str = "lstm",
    vocabulary: int = 20_000,
    width: int = 1024,
    layers: int = 2,
    both_ways: bool = False,
    batch: int = 32,
    length: int = 128,
    precision: str,
    optimizer: str,
    clip: float | None = 0.25,
    **loop: Any,
) -> Program:
    """A recurrent language model in training."""
    model = place(lambda: Recurrent(kind, vocabulary, width, layers, both_ways=both_ways), precision)
    batch_BS = tokens(batch, length, vocabulary)

    def loss() -> Tensor:
        return F.cross_entropy(model(batch_BS).flatten(0, 1), batch_BS.flatten())

    return training(model, loss, precision=precision, optimizer=optimizer, clip=clip, **loop)
