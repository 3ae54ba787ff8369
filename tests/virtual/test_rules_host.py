"""Copies to the host: pinned ones count, and values that nobody knows cost no memory of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


def resident_bytes() -> int:
    """Memory of this process that is backed by pages."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("only Linux tells a process its resident memory in /proc")
    return int(status.read_text(encoding="ascii").split()[1]) * 4096


def pinned() -> int:
    return int(torch.cuda.host_memory_stats()["active_bytes.current"])


def test_a_pinned_host_tensor_made_like_a_virtual_one_counts(gpu: VirtualGPU) -> None:
    parameter = nn.Parameter(torch.zeros(1000, 100, device="cuda"))
    host = torch.empty_like(parameter, device="cpu", pin_memory=True)
    assert host.is_pinned() and pinned() == 1 << 19  # 400,000 bytes, rounded up to a power of two
    copied = torch.empty_like(parameter, device="cpu").pin_memory()
    assert copied.is_pinned() and pinned() == 1 << 20
    del host, copied
    assert pinned() == 0


def test_a_pinned_copy_keeps_known_values(gpu: VirtualGPU) -> None:
    weight = nn.Parameter(torch.arange(4.0))
    assert weight.detach().pin_memory().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("pin", [True, False])
def test_activations_on_the_host_take_no_pages_here(gpu: VirtualGPU, pin: bool) -> None:
    layer = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)).cuda()
    data = torch.randn(64 * 1024, 1024, device="cuda")  # 256 MiB, as is each activation
    with torch.no_grad():
        layer(data)  # the libraries take their workspaces
    before, on_card = resident_bytes(), torch.cuda.memory_allocated()
    with save_on_cpu(pin_memory=pin):
        out = layer(data)
    assert torch.cuda.memory_allocated() - on_card == 256 * MIB
    assert (pinned() >= 3 * 256 * MIB) is pin
    out.sum().backward()
    assert layer[0].weight.grad is not None
    assert resident_bytes() - before < 128 * MIB


def test_large_unknown_values_come_as_zeros(gpu: VirtualGPU) -> None:
    values = torch.randn(1024, 1024, device="cuda").t().cpu()
    assert values.stride() == (1, 1024) and float(values.abs().sum()) == 0
    assert values.add_(1).sum().item() == 1024 * 1024


def test_a_buffer_on_the_host_keeps_its_values_where_nobody_knows_better(gpu: VirtualGPU) -> None:
    large, small = torch.ones(1024, 1024), torch.ones(4)
    large.copy_(torch.randn(1024, 1024, device="cuda"))
    small.copy_(torch.arange(4.0, device="cuda"))
    assert large.mean().item() == 1 and small.tolist() == [0, 1, 2, 3]
    assert "guessed-value" in {warning.code for warning in gpu.run.warnings}
    with pytest.raises(RuntimeError):
        large.copy_(torch.randn(3, 1024, device="cuda"))
