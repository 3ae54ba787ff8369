"""A small GPT-2 of transformers, with dropout and tied weights, for the tests of techniques."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vramfit.workload import Workload


def tiny_gpt2() -> Workload:
    """Three blocks of width 32; skips the test where transformers is missing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_head=4, n_embd=32, vocab_size=97, n_positions=32)

    def model() -> nn.Module:
        torch.manual_seed(0)
        found: nn.Module = transformers.GPT2LMHeadModel(config)
        return found.train()

    return Workload(
        model=model,
        batch=lambda batch_size: torch.arange(12 * batch_size).view(batch_size, 12) % 97,
        sizes={"batch_size": 2},
        loss=lambda model, batch: model(batch, labels=batch).loss,
        optimizer=torch.optim.AdamW,
    )
