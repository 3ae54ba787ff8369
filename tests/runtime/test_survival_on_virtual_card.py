"""Recovery on the virtual GPU, where the allocator answers as the card's would."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.units import MIB


class Witness:
    """Notes what each attempt finds; passed by as an object of ours, since what a step reaches is put back."""

    def __init__(self) -> None:
        self.idle: dict[int, int] = {}


Witness.__module__ = "vramfit.witness"


def _trained(limit: int | None) -> tuple[int, list[str], dict[int, int]]:
    """Live bytes after three steps within a limit, what was done, and wholly free segments as each retry begins."""
    witness = Witness()
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        if limit is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total)

        def loss(whole: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            segments = torch.cuda.memory_snapshot()
            witness.idle.setdefault(len(survivor.events), sum(one["active_size"] == 0 for one in segments))
            return whole(batch).square().mean()  # type: ignore[no-any-return]

        with vramfit.survive(model, optimizer, loss=loss) as survivor:
            for _ in range(3):
                survivor.step(torch.empty(4096, 1024, device="cuda"))
        return torch.cuda.memory_allocated(), [event.kind for event in survivor.events], witness.idle


def test_what_is_alive_afterwards_is_what_is_alive_without_a_shortage() -> None:
    plain, kinds, _ = _trained(None)
    assert not kinds
    for limit in (900 * MIB, 860 * MIB):
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
            model,
            optimizer,
            loss=lambda whole, batch: whole(batch).square().mean(),
            patience=2,
            numerics="rounding",
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


def _stepped(reserve: str, conf: str = "") -> tuple[set[str], int, list[tuple[str, str]]]:
    """Where states are after three steps, of which two have room for gradients alone; slices done again; events."""
    with vramfit.VirtualGPU("RTX 4090", alloc_conf=conf, profile="none"):
        model = nn.Linear(4096, 4096, bias=False).cuda()  # 64 MiB, and states of 128
        optimizer = torch.optim.AdamW(model.parameters())
        survivor = vramfit.survive(
            model, optimizer, loss=lambda whole, batch: whole(batch).square().mean(), reserve=reserve
        )
        batch = torch.empty(16, 4096, device="cuda")
        survivor.step(batch)
        model.weight.grad = torch.empty_like(model.weight)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 1) / total)
        model.weight.grad = None
        retries = 0
        for _ in range(2):
            survivor.step(batch)
            retries += survivor._guard.retries
        states = {value.device.type for value in optimizer.state[model.weight].values() if value.dim()}
        events = [(event.kind, event.evidence) for event in survivor.events if event.kind != "back"]
        survivor.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
        # The model and its states, in whole pages of 20 MiB where segments expand; the reserve is gone.
        assert torch.cuda.memory_allocated() < 210 * MIB and torch.cuda.memory_reserved() < 270 * MIB
    return states, retries, events


def test_a_step_that_finds_no_room_takes_the_reserve() -> None:
    states, retries, events = _stepped("0B")
    assert retries and states == {"cpu"} and ("hosted", "states of 1 parameters are on the host") in events
    assert _stepped("448MiB") == ({"cuda"}, 0, [])
    assert _stepped("448MiB", "expandable_segments:True") == ({"cuda"}, 0, [])


def test_states_that_were_made_in_the_reserve_are_told_until_there_is_room_for_another() -> None:
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        model = nn.Linear(4096, 4096, bias=False).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        survivor = vramfit.survive(
            model, optimizer, loss=lambda whole, batch: whole(batch).square().mean(), reserve="448MiB"
        )
        total = torch.cuda.get_device_properties(0).total_memory
        batch = torch.empty(16, 4096, device="cuda")
        room = torch.cuda.memory_reserved() + 90 * MIB  # for gradients, not for states
        torch.cuda.set_per_process_memory_fraction(room / total)
        survivor.step(batch)
        assert all(value.is_cuda for value in optimizer.state[model.weight].values() if value.dim())
        told = [("reserve", "what the step made lies in it")]
        assert [(event.kind, event.evidence) for event in survivor.events] == told
        torch.cuda.set_per_process_memory_fraction(1.0)
        survivor.step(batch)
        told.append(("reserve", "it is whole again"))
        assert [(event.kind, event.evidence) for event in survivor.events] == told
        survivor.close()


class Failing(torch.optim.SGD):
    """Steps, and then fails from its second step on: one that failed is taken back, with its count."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 2:
            raise ValueError("a user's own error")


def test_a_reserve_is_whole_after_an_error_and_gone_after_the_end() -> None:
    """Also one beside another, and after the end steps go on without it."""
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        model = nn.Linear(64, 64).cuda()
        optimizer, batch = Failing(model.parameters()), torch.empty(4, 64, device="cuda")

        def loss(whole: nn.Module, given: torch.Tensor) -> torch.Tensor:
            return whole(given).square().mean()

        loss(model, batch).backward()  # with cuBLAS' workspace
        model.zero_grad()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with (
            vramfit.survive(model, optimizer, loss=loss, reserve="64MiB") as survivor,
            vramfit.survive(model, optimizer, loss=loss, reserve="32MiB"),
        ):
            for fails in (False, True, True, True):
                with pytest.raises(ValueError, match="own") if fails else contextlib.nullcontext():
                    survivor.step(batch)
                torch.cuda.empty_cache()
                assert torch.cuda.memory_reserved() == before + 96 * MIB
                assert torch.cuda.memory_allocated() > 96 * MIB  # nobody else gets it
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == before
        optimizer.steps = 2
        survivor.step(batch)
        assert survivor.events == []


def test_a_reserve_needs_a_card_with_room() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="a reserve is kept on a card of CUDA, and the model is on cpu"):
        vramfit.survive(model, torch.optim.SGD(model.parameters()), reserve="1MiB")
    with vramfit.VirtualGPU("RTX 4090", alloc_conf="", profile="none"):
        model.cuda()
        before = torch.cuda.memory_reserved()
        with pytest.raises(UsageError, match=r"no room for a reserve of 25\.00 GiB: .* free"):
            vramfit.survive(model, torch.optim.SGD(model.parameters()), reserve="25GiB")
        assert torch.cuda.memory_reserved() == before
