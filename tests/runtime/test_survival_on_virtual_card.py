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


def _with_states(limit: int | None, lengths: list[int]) -> tuple[list[tuple[str, str]], int, set[str]]:
    """What was done, live bytes after the steps, and where the optimizer's states are then."""
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        model = nn.Linear(4096, 4096, bias=False).cuda()  # 64 MiB, and states of 128
        optimizer = torch.optim.AdamW(model.parameters())
        if limit is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total)
        survivor = vramfit.survive(
            model, optimizer, loss=lambda whole, batch: whole(batch).square().mean(), patience=2
        )
        for length in lengths:
            survivor.step(torch.empty(1, length, 4096, device="cuda"))
        states = {value.device.type for value in optimizer.state[model.weight].values() if value.dim()}
        alive = torch.cuda.memory_allocated()
        survivor.close()
    return [(event.kind, event.rung.value) for event in survivor.events], alive, states


def test_states_of_the_optimizer_make_room_and_come_back() -> None:
    """Of one example, without blocks that could be recomputed, nothing else can be spared."""
    _, plain, _ = _with_states(None, [16, 16])
    long = [16, 6144]  # inputs and outputs of 96 MiB
    done, alive, states = _with_states(700 * MIB, long)
    assert ("up", "optimizer-states") in done
    assert states == {"cpu"} and alive == plain - 128 * MIB
    done, alive, states = _with_states(700 * MIB, [*long, 16, 16, 16])
    assert ("back", "plain") in done
    assert states == {"cuda"} and alive == plain
