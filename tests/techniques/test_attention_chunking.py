"""Attention chunking as a technique: the outputs stay, the scores go, and it can be undone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.techniques.peaks import peak_bytes
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics, Profile, with_choices
from vramfit.techniques.attention_chunking import AttentionChunking, AttentionChunkingSetting
from vramfit.techniques.input_chunking import InputChunking, InputChunkingSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload


class Attending(nn.Module):
    """A block that writes its scores out, and gives them if asked to."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor, scores: bool = False) -> Any:
        parts = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (parts[0] @ parts[1].mT / 4).softmax(-1)
        x = x + (weights @ parts[2]).transpose(1, 2).flatten(2)
        x = x + self.down(torch.relu(self.up(x)))
        return (x, weights) if scores else x


def attached(model: nn.Module, **setting: Any) -> AttachedProgram:
    live = AttachedProgram(model, None)
    live.attach([Choice(technique=AttentionChunking(), setting=AttentionChunkingSetting(**setting))])
    return live


def test_outputs_are_the_same_and_it_can_be_undone() -> None:
    torch.manual_seed(0)
    model, x = Attending().double(), torch.randn(2, 128, 64, dtype=torch.double)
    expected, weights = (one.detach() for one in model(x, scores=True))
    live = attached(model, slice_bytes=1 << 12)
    with torch.no_grad():
        for found in (model(x), copy.deepcopy(model)(x), model(x, scores=True)[0]):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        shown = model(x, scores=True)[1]
        assert type(shown) is torch.Tensor  # who asks for the scores gets them
        torch.testing.assert_close(shown, weights, rtol=0, atol=1e-12)
    assert model(x).requires_grad
    live.undo()
    assert type(model) is Attending


def test_what_cannot_be_is_refused() -> None:
    model = Attending()
    with pytest.raises(UsageError, match="nothing to do"):
        attached(model, attention=False, feed_forward=False)
    with pytest.raises(UsageError, match="slice_bytes=0"):
        attached(model, slice_bytes=0)
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="for models that do not train"):
        live.attach([Choice(technique=AttentionChunking(), setting=AttentionChunkingSetting())])


def test_the_card_never_holds_the_scores(gpu: VirtualGPU) -> None:
    length = 1024
    plain = Workload(
        model=Attending, batch=lambda batch_size: torch.zeros(batch_size, length, 64), sizes={"batch_size": 8}
    )
    scores, states = 8 * 4 * length**2 * 4, 8 * length * 64 * 4
    assert peak_bytes(plain) >= 2 * scores
    setting = AttentionChunkingSetting(slice_bytes=1 << 20)
    chunked = peak_bytes(AttentionChunking().apply(plain, setting))
    assert chunked < scores / 4 and chunked < 12 * states + (16 << 20)
    both = with_choices(
        plain,
        (
            Choice(technique=AttentionChunking(), setting=setting),
            Choice(technique=InputChunking(), setting=InputChunkingSetting(size=1)),
        ),
    )
    assert peak_bytes(both) < chunked - 4 * states


def test_options_are_for_inference_with_linear_layers() -> None:
    def options(model: nn.Module, *, trains: bool = False, peak: int = 1 << 30) -> list[int]:
        profile = Profile(
            model=model, optimizer=None, sizes={"batch_size": 2}, trains=trains, peak_allocated_bytes=peak
        )
        return [one.slice_bytes for one in AttentionChunking().options(profile)]

    assert options(Attending()) == [64 << 20, 16 << 20, 4 << 20]
    assert options(Attending(), peak=40 << 20) == [16 << 20, 4 << 20]
    assert options(Attending(), trains=True) == options(nn.Conv2d(3, 3, 3)) == []
    assert AttentionChunking().promise(AttentionChunkingSetting()).numerics is Numerics.ROUNDING
