"""The kinds of tiers: what each counts, and what it leaves."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.tiers.trouble import CPU, KIB

import vramfit
from vramfit.errors import EnvironmentUnfitError, StoreFull, UsageError, WriteError
from vramfit.runtime.tiers import unified_memory
from vramfit.runtime.tiers.file_tier import FileTier, SharedTensor
from vramfit.runtime.tiers.memory_tiers import PinnedTier
from vramfit.runtime.tiers.offsets import Offsets
from vramfit.runtime.tiers.owned_folders import OwnedFolder, started_at, sweep
from vramfit.runtime.tiers.pool_tier import PoolTier
from vramfit.runtime.tiers.store import Store
from vramfit.runtime.tiers.tier import Layout, NoRoom

pytestmark = pytest.mark.torch_versions


def plain(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def lost(source: torch.Tensor, target: torch.Tensor) -> None:
    raise RuntimeError("lost")


# -- pinned memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "counted"), [(0, 0), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192), (3 << 20, 4 << 20)]
)
def test_pinned_memory_is_rounded_to_powers_of_two(nbytes: int, counted: int) -> None:
    assert PinnedTier(1 << 30, pinned=False).price(nbytes) == counted
    assert PinnedTier(1 << 30, pinned=False, round_limit=4096).price(nbytes) == (
        nbytes if nbytes > 4096 else counted
    )


def test_free_pinned_blocks_count_until_they_are_given_back() -> None:
    tier = PinnedTier(16 * KIB, pinned=False)
    large = [tier.put(torch.rand(2 * KIB), plain) for _ in range(2)]
    assert tier.reserved == 16 * KIB
    with pytest.raises(NoRoom):
        tier.put(torch.rand(1), plain)
    tier.drop(large.pop())
    assert tier.reserved == 16 * KIB
    again = tier.put(torch.rand(2 * KIB), plain)  # of the same size: the same block
    assert tier.reserved == 16 * KIB
    tier.drop(again)
    tier.put(torch.rand(1), plain)  # of another: the free one is given back first
    assert tier.reserved == 8 * KIB + 4
    with pytest.raises(RuntimeError, match="lost"):
        tier.put(torch.rand(1), lost)
    assert tier.reserved == 8 * KIB + 8


# -- files -------------------------------------------------------------------------------------------------------


def test_files_take_their_space_before_they_are_mapped(tmp_path: Path) -> None:
    tier = FileTier(1 << 20, tmp_path)
    handle = tier.put(torch.rand(KIB + 1), plain)
    (file,) = tier.folder.path.iterdir()
    assert file.stat().st_size == 4 * KIB + 4
    assert file.stat().st_blocks * 512 == tier.price(4 * KIB + 4) == 8 * KIB
    with pytest.raises(RuntimeError, match="lost"):
        tier.put(torch.rand(KIB), lost)
    assert list(tier.folder.path.iterdir()) == [file]
    tier.drop(handle)
    assert not list(tier.folder.path.iterdir())
    tier.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with vramfit.TieredStore("4KiB", file="1MiB", folder=tmp_path, device="cpu") as store:
        store[0] = torch.full((KIB,), 3.0)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WriteError, match="no space left on device"):
            store[1] = torch.rand(KIB)
        assert store.usage()["file"].used == 0
        assert torch.equal(store[0], torch.full((KIB,), 3.0))
        assert [one for one in tmp_path.rglob("*") if one.is_file()] == []


def test_folders_of_the_dead_go_and_those_of_others_stay(tmp_path: Path) -> None:
    mine = OwnedFolder(tmp_path)
    start = started_at(os.getpid())
    assert start is not None
    _, process, started, namespace, _ = mine.path.name.removeprefix("vramfit-").split("-")
    assert (int(process), int(started)) == (os.getpid(), start)
    names = {
        "dead": f"vramfit-tiers-{2**22 + 1}-{start}-{namespace}-00000000",
        "given again": f"vramfit-tiers-{process}-{start + 1}-{namespace}-00000000",
        "of a container": f"vramfit-tiers-{2**22 + 1}-{start}-{int(namespace) + 1}-00000000",
        "of somebody": "vramfit-tiers-1-2-3-mine",
    }
    for name in names.values():
        (tmp_path / name).mkdir()
        (tmp_path / name / "1").write_bytes(b"x")
    assert {one.name for one in sweep(tmp_path)} == {names["dead"], names["given again"]}
    assert {one.name for one in tmp_path.iterdir()} == {
        mine.path.name,
        names["of a container"],
        names["of somebody"],
    }
    mine.close()
    assert not mine.path.exists()
    assert started_at(2**22 + 1) is None


def test_folders_of_another_machine_on_the_same_disk_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes have other numbers here, or none; the number of its first namespace is the same."""
    mine = OwnedFolder(tmp_path)
    theirs = tmp_path / mine.path.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-")
    theirs.mkdir()
    read_text = Path.read_text

    def elsewhere(path: Path, *arguments: Any) -> str:
        if path.name == "boot_id":
            return "00000000-0000-4000-8000-000000000001\n"
        return read_text(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", elsewhere)
        assert sweep(tmp_path) == []
    assert sweep(tmp_path) == [theirs]


def test_a_ticket_whose_file_is_gone_says_so(tmp_path: Path) -> None:
    ticket = SharedTensor(path=str(tmp_path / "1"), layout=Layout((3,), (1,), torch.float32))
    with pytest.raises(UsageError, match="no longer shared"):
        ticket.open()


# -- pools -------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_offsets_are_those_of_brute_force(steps: list[tuple[bool, int]]) -> None:
    offsets, cells, ranges = Offsets(32), [False] * 32, []
    for takes, size in steps:
        if takes or not ranges:
            begin = offsets.take(size)
            runs = "".join(".#"[cell] for cell in cells).split("#")
            assert (begin is None) == (max(map(len, runs)) < size)
            if begin is not None:
                assert not any(cells[begin : begin + size])
                cells[begin : begin + size] = [True] * size
                ranges.append((begin, size))
        else:
            begin, size = ranges.pop(size % len(ranges))
            offsets.give(begin, size)
            cells[begin : begin + size] = [False] * size
        assert offsets.free == cells.count(False)
        assert offsets.largest == max(map(len, "".join(".#"[cell] for cell in cells).split("#")))


def pool_store(capacity: int) -> tuple[Store, PoolTier]:
    tier = PoolTier("device", capacity, CPU)
    return Store([tier, PinnedTier(1 << 20, pinned=False)], CPU, ahead=0), tier


def test_holes_are_closed_while_handles_stay() -> None:
    store, tier = pool_store(8 * KIB)
    truth = {key: torch.full((KIB // 4,), float(key)) for key in range(8)}
    for key, tensor in truth.items():
        store[key] = tensor
    with store.writing(1) as (found,):
        found += 10
    del found
    for key in (0, 2, 4, 6):
        del store[key]
    store["large"] = torch.full((KIB,), -1.0)  # the four holes together
    assert tier.moved == 4
    assert [store.tier_of(key) for key in (1, 3, 5, 7, "large")] == ["device"] * 5
    assert store[1].tolist() == [11.0] * (KIB // 4)
    assert all(torch.equal(store[key], truth[key]) for key in (3, 5, 7))
    assert store["large"].tolist() == [-1.0] * KIB


def test_what_is_held_is_not_moved() -> None:
    store, tier = pool_store(8 * KIB)
    for key in range(8):
        store[key] = torch.full((KIB // 4,), float(key))
    held = store[3][:2]
    place = held.data_ptr()
    for key in (0, 1, 2, 4, 5, 6):
        del store[key]
    store["large"] = torch.rand(
        KIB
    )  # 4 KiB; the hole after the held one is of 3, and the last moves into the first
    assert held.data_ptr() == place == store[3].data_ptr()
    assert held.tolist() == [3.0, 3.0]
    assert tier.moved == 1
    assert store.tier_of("large") == "device"


@pytest.mark.parametrize("writes", range(4))
def test_writes_are_known_after_a_move(writes: int) -> None:
    """A copy below must not be taken for current because the moved tensor counts its writes anew."""
    store, tier = pool_store(4 * KIB)
    for key in range(4):
        store[key] = torch.zeros(KIB // 4)
    store.evict(3)
    for _ in range(2):
        with store.reading(3) as (found,):
            for _ in range(writes):
                found += 1  # which the count alone tells
        del found
        expected, moved = store.on_host(3), tier.moved
        first = min(store)
        del store[first]
        tier._close_holes()
        assert tier.moved > moved
        with store.reading(3) as (found,):
            found += 1
        del found
        store.evict(3)
        assert torch.equal(store[3], expected + 1)
        store.evict(3)


def test_what_is_deleted_while_it_is_held_keeps_its_place() -> None:
    store, _ = pool_store(2 * KIB)
    store[0] = torch.full((KIB // 4,), 5.0)
    held = store[0]
    del store[0]
    store[1] = torch.rand(KIB // 4)
    with pytest.raises(StoreFull):
        store.put(2, torch.rand(KIB // 2), tier="device")
    assert held.tolist() == [5.0] * (KIB // 4)
    del held
    store.put(2, torch.rand(KIB // 2), tier="device")


def test_a_pool_moves_overlapping_memory_rightly() -> None:
    chance = random.Random(0)
    for _ in range(30):
        store, _ = pool_store(64 * 512)
        truth = {}
        for key in range(12):
            truth[key] = torch.rand(chance.randrange(1, 600))
            store.put(key, truth[key], tier="device")
        for key in chance.sample(range(12), 5):
            del store[key], truth[key]
        free = 64 * 512 - store.usage()["device"].used
        store.put("rest", torch.zeros(free // 4), tier="device")
        assert all(torch.equal(store[key], expected) for key, expected in truth.items())


# -- unified memory ----------------------------------------------------------------------------------------------


def test_unified_memory_is_refused_where_there_is_none() -> None:
    assert unified_memory.unified_refused(CPU) == "there is no card"
    with pytest.raises(EnvironmentUnfitError, match="there is no card"):
        unified_memory.UnifiedTier(1 << 20, CPU, unified_memory.Unified.WITHIN)
