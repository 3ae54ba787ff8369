"""Recovery on the virtual GPU, where the allocator answers as the card's would."""

from __future__ import annotations

import torch
from torch import nn

import vramfit
from vramfit.units import MIB


def _trained(limit: int | None) -> tuple[int, list[str], dict[int, int]]:
    """Live bytes after three steps within a limit, what was done, and wholly free segments as each retry begins."""
    idle: dict[int, int] = {}
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        if limit is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total)

        def loss(whole: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            segments = torch.cuda.memory_snapshot()
            idle.setdefault(len(survivor.events), sum(one["active_size"] == 0 for one in segments))
            return whole(batch).square().mean()  # type: ignore[no-any-return]

        with vramfit.survive(model, optimizer, loss=loss) as survivor:
            for _ in range(3):
                survivor.step(torch.empty(4096, 1024, device="cuda"))
        return torch.cuda.memory_allocated(), [event.kind for event in survivor.events], idle


def test_what_is_alive_afterwards_is_what_is_alive_without_a_shortage() -> None:
    plain, kinds, _ = _trained(None)
    assert not kinds
    for limit in (900 * MIB, 700 * MIB):
        alive, kinds, idle = _trained(limit)
        assert alive == plain
        assert "up" in kinds
        assert {retry for retry in idle if retry} == set(range(1, len(kinds) + 1))
        assert not any(idle[retry] for retry in idle if retry)


def test_a_program_that_catches_the_error_goes_on() -> None:
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        held = torch.empty(1 << 30, device="cuda")
        for _ in range(3):
            try:
                more = [torch.empty(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(4)]
            except torch.OutOfMemoryError:
                pass
            else:
                raise AssertionError(len(more))
        assert torch.cuda.memory_allocated() == held.nbytes
