"""What is known of small values that come from unknown ones."""

from __future__ import annotations

import torch

from vramfit.virtual.gpu import VirtualGPU


def test_the_branch_that_where_takes_is_known_though_the_other_is_not(gpu: VirtualGPU) -> None:
    unknown = torch.randn(64, 1024, device="cuda").amax(dim=1)  # of too many values to follow
    known = torch.full((64,), -1e9, device="cuda")
    never = torch.zeros(64, dtype=torch.bool, device="cuda")
    assert torch.where(never, unknown, known).max().item() == -1e9
    assert torch.where(~never, known, unknown).max().item() == -1e9
    assert not gpu.run.warnings


def test_a_mixed_where_is_guessed(gpu: VirtualGPU) -> None:
    unknown = torch.randn(64, 1024, device="cuda").amax(dim=1)
    some = torch.arange(64, device="cuda") < 3
    torch.where(some, unknown, torch.zeros(64, device="cuda")).max().item()
    assert [warning.code for warning in gpu.run.warnings] == ["guessed-value"]


def test_values_made_in_inference_mode_can_be_looked_at_later(gpu: VirtualGPU) -> None:
    with torch.inference_mode():
        total = torch.arange(4.0, device="cuda").sum()
    assert total.item() == 6 and bool(total > 5)
