"""Tests that hold a training step to its memory: `pytest --vram-gpu "RTX 4090"` needs no card."""

import pytest
import torch
from train import build, train_step


@pytest.fixture
def training():
    model = build().cuda()
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.limit_vram("1 GiB")
@pytest.mark.parametrize("batch_size", [1, 8])
def test_a_step_fits(training, batch_size):
    train_step(*training, torch.randn(batch_size, 256, 512, device="cuda"))


@pytest.mark.no_vram_leak(rounds=5)
def test_steps_leave_nothing_behind(training):
    train_step(*training, torch.randn(2, 256, 512, device="cuda"))
