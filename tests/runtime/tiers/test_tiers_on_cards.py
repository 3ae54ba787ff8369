"""Tiers on virtual cards: bytes as the allocator counts them; and tensors shared between processes."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import EnvironmentUnfitError, UsageError
from vramfit.gpus import catalogue
from vramfit.runtime.tiers import unified_memory
from vramfit.runtime.tiers.card_tiers import has_one_memory
from vramfit.runtime.tiers.unified_memory import Unified, UnifiedTier
from vramfit.units import GIB, MIB

LAYERS, WIDTH = 16, 256
PARAMETERS = LAYERS * WIDTH * WIDTH * 4
STATES = 2 * PARAMETERS


def bytes_of_steps(**given: Any) -> list[tuple[int, int]]:
    """What is allocated before, and at most in, each of three steps of AdamW; with a store where one is given."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    store = vramfit.TieredStore(**given) if given else None
    if store is not None:
        store.hold_optimizer(optimizer)
    found = []
    for _ in range(3):
        model(torch.randn(4, WIDTH, device="cuda")).square().mean().backward()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
        found.append((before, torch.cuda.max_memory_allocated()))
    if store is not None:
        assert store.usage()["device"].peak == STATES // 2
        assert (
            torch.cuda.host_memory_stats()["allocated_bytes.peak"] == store.usage()["pinned"].peak == STATES
        )
        store.close()
        assert torch.cuda.memory_allocated() == before - STATES // 2
    return found


def test_states_twice_the_budget_take_the_budget() -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        plain = bytes_of_steps()
    with vramfit.VirtualGPU("RTX 4090"):
        stored = bytes_of_steps(budget=STATES // 2, pinned=STATES)
    (first, _), (before, most), _ = plain
    assert before - first == STATES
    assert stored[0][0] == first
    for stored_before, stored_most in stored[1:]:
        assert stored_before == before - STATES // 2
        assert stored_most - stored_before <= most - before


def test_a_card_with_less_than_the_budget_is_made_do_with() -> None:
    """Others have taken memory since the budget was given: what runs out sends more down."""
    with vramfit.VirtualGPU("1GiB", context_bytes=0), vramfit.TieredStore("2GiB", pinned="2GiB") as store:
        for key in range(8):
            store.put(key, torch.empty(32 * MIB, device="cuda"), tier="pinned")
        assert torch.cuda.memory_allocated() == 0
        others = torch.empty(128 * MIB, device="cuda")  # half of the card
        for key in range(8):
            store[key]
        assert torch.cuda.memory_allocated() == GIB
        assert [store.tier_of(key) for key in range(8)] == ["pinned"] * 4 + ["device"] * 4
        more = [store[key] for key in range(4, 8)]
        with pytest.raises(torch.OutOfMemoryError):
            store[0]
        assert store.tier_of(0) == "pinned"
        del others, more
        store[0]


def test_a_pool_takes_its_memory_once() -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        before = torch.cuda.memory_allocated()
        with vramfit.TieredStore("64MiB", pinned="64MiB", allocation="pool") as store:
            assert torch.cuda.memory_allocated() == before + 64 * MIB
            for key in range(24):
                store[key] = torch.zeros(MIB, device="cuda")
                assert torch.cuda.memory_allocated() == before + 64 * MIB
            assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] == 64 * MIB
            for key in range(24):
                store[key]
                assert torch.cuda.memory_allocated() == before + 64 * MIB
        assert torch.cuda.memory_allocated() == before


def test_a_peer_takes_what_the_device_does_not() -> None:
    budget = 4 * MIB
    with vramfit.VirtualGPU("RTX 4090", gpus=2):
        store = vramfit.TieredStore(budget, peers={"cuda:1": budget}, pinned=8 * MIB)
        for key in range(12):
            store[key] = torch.zeros(MIB // 4, device="cuda")
        assert [store.tier_of(key) for key in range(12)] == ["pinned"] * 4 + ["cuda:1"] * 4 + ["device"] * 4
        for _ in range(3):
            for key in range(12):
                found = store[key]
                assert found.device == torch.device("cuda:0")
                del found
                assert torch.cuda.memory_allocated(0) <= budget
                assert torch.cuda.memory_allocated(1) == budget
                assert torch.cuda.host_memory_stats()["allocated_bytes.current"] <= 8 * MIB
        store.close()
        assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == 0
        assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == 0
        with pytest.raises(UsageError, match="is no other card than cuda:0"):
            vramfit.TieredStore(budget, peers={"cuda:0": budget})


def test_a_peer_of_another_number_that_is_not_there_is_refused() -> None:
    with vramfit.VirtualGPU("RTX 4090"), pytest.raises(UsageError, match="there is no 'cuda:1'"):
        vramfit.TieredStore("1MiB", peers={"cuda:1": "1MiB"})


@pytest.mark.parametrize("name", ["Jetson AGX Orin 32GB", "DGX Spark"])
def test_on_one_memory_pinned_is_the_device_s(name: str) -> None:
    with vramfit.VirtualGPU(name):
        assert has_one_memory(torch.device("cuda:0"))
        with vramfit.TieredStore("4MiB", pinned="4MiB") as store:
            assert list(store.usage()) == ["device"]
            assert store.capacity == 8 * MIB
            for key in range(8):
                store[key] = torch.zeros(MIB // 4, device="cuda")
            assert torch.cuda.memory_allocated() == 8 * MIB
            assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] == 0


def test_every_card_of_the_catalogue_has_the_tiers_of_its_memory() -> None:
    """GH200 has two memories under one address space, and two tiers."""
    one = {card.name for card in catalogue() if card.integrated}
    assert {card.name for card in catalogue() if card.link == "unified memory"} == one
    assert not any(name.startswith("GH200") for name in one)
    with vramfit.VirtualGPU("GH200"), vramfit.TieredStore("4MiB", pinned="4MiB") as store:
        assert list(store.usage()) == ["device", "pinned"]


def test_unified_memory_never_exceeds_the_card_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    class Block:
        def __enter__(self) -> None:
            opened.append("in")

        def __exit__(self, *_: object) -> None:
            opened.append("out")

    with vramfit.VirtualGPU("RTX 4090"):
        with (
            monkeypatch.context() as without,
            pytest.raises(EnvironmentUnfitError, match="cuda-python is not"),
        ):
            without.setattr(unified_memory.importlib.util, "find_spec", lambda name: None)
            vramfit.TieredStore("4MiB", pinned="4MiB", unified="within")
        monkeypatch.setattr(unified_memory, "unified_refused", lambda device: None)
        monkeypatch.setitem(vars(torch.cuda), "_use_uvm", lambda device: Block())
        free, _ = torch.cuda.mem_get_info()
        with pytest.raises(
            UsageError, match=r'Give a smaller budget, or unified="beyond": 1\.00 GiB beyond .* 0\.\d\d s'
        ):
            vramfit.TieredStore(free + GIB, pinned="4MiB", unified="within")
        tier = UnifiedTier(free + GIB, torch.device("cuda:0"), Unified.BEYOND)
        assert tier.cost.beyond == GIB
        assert tier.cost.seconds_a_pass == 2 * GIB / 31.504e9  # PCIe 4.0 x16, both ways
        with vramfit.TieredStore("4MiB", pinned="4MiB", unified="within") as store:
            for key in range(8):
                store[key] = torch.zeros(MIB // 4, device="cuda")
            assert torch.cuda.memory_allocated() == 4 * MIB
            assert opened == ["in"]
        assert opened == ["in", "out"]


def shared_memory() -> set[str]:
    return {one.name for one in Path("/dev/shm").iterdir()}


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_two_processes_share_a_tensor_and_leave_nothing() -> None:
    before = shared_memory()
    with vramfit.TieredStore("1MiB", file="4MiB", folder="/dev/shm", device="cpu") as store:
        store["it"] = torch.arange(1000.0).reshape(10, 100).t()
        ticket = pickle.loads(pickle.dumps(store.share("it")))
        assert store.usage()["file"].used == 4096
        mine = ticket.open()
        assert torch.equal(mine, store["it"])
        assert mine.stride() == (1, 100)
        child = os.fork()
        if not child:  # it writes what the other reads
            theirs = ticket.open()
            theirs[3, 4] = -theirs[3, 4]
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert mine[3, 4] == -store["it"][3, 4] == -403.0
        store.unshare("it")
        assert store.usage()["file"].used == 0
        with pytest.raises(UsageError, match="no longer shared"):
            ticket.open()
        assert mine[3, 4] == -403.0  # who has opened it keeps the memory
        store.share("it")
    assert shared_memory() == before
    with (
        vramfit.TieredStore("1MiB", pinned="4MiB", device="cpu") as store,
        pytest.raises(UsageError, match="no tier of files"),
    ):
        store.share("it")
