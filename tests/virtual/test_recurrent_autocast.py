"""Stacks of recurrent layers under autocast: float16 in cuDNN whatever autocast's type is, as CUDA builds have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.torch_versions  # a build for CUDA asks the driver on its own way

LAYERS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_runs_recurrent_layers_in_float16(kind: str, dtype: torch.dtype) -> None:
    with VirtualGPU("24GiB", alloc_conf=""):
        layer = LAYERS[kind](64, 32, 2, bidirectional=True).cuda()
        inputs = torch.randn(5, 4, 64, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype):
            output, _ = layer(inputs)
            assert torch.is_autocast_enabled("cuda")
        assert output.dtype is torch.float16
        weights = 2 * sum(weight.numel() for weight in layer.parameters())
        assert torch.cuda.memory_allocated() - before > weights
        output.float().sum().backward()
        assert inputs.grad is not None
        assert {weight.grad.dtype for weight in (*layer.parameters(), inputs)} == {torch.float32}


def test_what_is_half_or_double_already_stays_so_under_autocast() -> None:
    with VirtualGPU("24GiB", alloc_conf=""):
        for dtype in (torch.float16, torch.float64):
            layer = nn.LSTM(8, 8).to("cuda", dtype)
            with torch.autocast("cuda", torch.bfloat16):
                output, _ = layer(torch.randn(5, 4, 8, device="cuda", dtype=dtype))
            assert output.dtype is dtype
