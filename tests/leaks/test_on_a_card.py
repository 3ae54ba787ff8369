"""Leak checks on a card: its recording knows addresses, not storages. The virtual GPU plays the card here."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from vramfit import VirtualGPU, check_leaks
from vramfit.analysis import LeakVerdict, Release
from vramfit.api import leak_check
from vramfit.api.tracking import track


@contextmanager
def recorded(device: str | None) -> Iterator[Any]:
    """What `leakcheck` does where no virtual GPU is active."""
    with track(device=device or "cuda") as tracked:
        yield leak_check._Metering(tracked, None, leak_check._index(device))


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module to keep things in, on a heap that holds nothing else, and a card that is recorded."""
    monkeypatch.setattr(leak_check, "_metered", recorded)
    gc.freeze()
    module = sys.modules["program"] = types.ModuleType("program")
    with VirtualGPU("RTX 4090", alloc_conf=""):
        yield module
    del sys.modules["program"]
    vars(module).clear()
    gc.collect()
    gc.unfreeze()


def test_a_kept_graph_is_found_by_its_addresses(program: Any) -> None:
    program.losses = []
    model = nn.Linear(64, 64).cuda()

    def train() -> None:
        loss = model(torch.ones(32, 64, device="cuda")).square().mean()
        loss.backward(retain_graph=True)
        model.zero_grad()
        program.losses.append(loss)

    found = check_leaks(train)
    assert found.verdict is LeakVerdict.GROWING
    texts = [owner.text for stack in found.growing for owner in stack.owners]
    assert any(
        text.startswith("program.losses[2] -> grad_fn MeanBackward0 -> PowBackward0") for text in texts
    )
    assert all(stack.release is Release.HELD for stack in found.growing)


def test_dead_cycles_are_told_apart(program: Any) -> None:
    gc.disable()
    try:

        def serve() -> None:
            node: list[Any] = [torch.ones(64, 64, device="cuda")]
            node.append(node)

        found = check_leaks(serve)
    finally:
        gc.enable()
    assert [stack.release for stack in found.growing] == [Release.COLLECTOR]
    assert found.growing[0].owners[0].text.startswith("dead reference cycle of list: list[0]")


def test_a_clean_program_is_steady(program: Any) -> None:
    assert check_leaks(lambda: torch.ones(64, 64, device="cuda") * 2).verdict is LeakVerdict.STEADY
