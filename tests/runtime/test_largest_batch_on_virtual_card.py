"""The largest batch of a live process on a virtual card, beside plain loops of processes that begin with it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

import vramfit
from vramfit.gpus import find_gpu
from vramfit.units import MIB

CARD = replace(find_gpu("RTX 4090"), total_bytes=512 * MIB + find_gpu("RTX 4090").typical_context_bytes)


class Training:
    """Convolutions, with a product of matrices at their end: cuBLAS' workspace comes when memory is full of images."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        ).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, batch: torch.Tensor) -> None:
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def images(size: int) -> torch.Tensor:
    return torch.empty(size, 3, 64, 64, device="cuda")


def plainly_fits(size: int) -> bool:
    with vramfit.VirtualGPU(CARD, alloc_conf="", profile="none"):
        try:
            there = Training()
            for _ in range(3):
                there.step(images(size))
        except torch.OutOfMemoryError:
            return False
    return True


def test_each_trial_finds_the_card_as_a_new_process_does() -> None:
    with vramfit.VirtualGPU(CARD, alloc_conf="", profile="none"):
        live = Training()
        before = torch.cuda.memory_allocated()
        live.step(images(1))  # leaves cuBLAS' workspace where later steps have room for more
        assert torch.cuda.memory_allocated() > before + 8 * MIB
        live.optimizer.state.clear()
        found = vramfit.largest_batch(
            live.step,
            images,
            model=live.model,
            optimizer=live.optimizer,
            predict="never",
            predicted=255,
            margin=0.0,
        )
        assert torch.cuda.memory_allocated() == before and found.left_bytes == 0
    assert [trial.fits for trial in found.trials] == [True, False]
    assert plainly_fits(found.size) and not plainly_fits(found.size + 1)
