"""A store of tiers: a dictionary of tensors, whose memory stays within the budgets."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.tiers.trouble import CPU, KIB, CopyLost, LateLane, check_budgets, make_store
from torch import nn

import vramfit
from vramfit.errors import StoreFull, UsageError, WriteError
from vramfit.runtime.tiers.access_order import AccessOrder
from vramfit.runtime.tiers.memory_tiers import DeviceTier
from vramfit.runtime.tiers.store import Store
from vramfit.runtime.tiers.tier import Copy, Layout, Tier
from vramfit.runtime.tiers.tier_lanes import ThreadLane

KIB2 = 512
"""Values of a tensor of 2 KiB, four of which fill the device's budget."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path, ThreadLane(), ahead=0) as made:
        yield made


def filled(store: Store, count: int) -> dict[int, torch.Tensor]:
    truth = {}
    for key in range(count):
        truth[key] = torch.rand(KIB2)
        store[key] = truth[key].clone()
    return truth


def test_what_is_not_used_goes_down_and_comes_back(store: Store) -> None:
    truth = filled(store, 10)
    assert [store.tier_of(key) for key in range(10)] == ["file"] * 2 + ["pinned"] * 4 + ["device"] * 4
    usage = store.usage()
    assert [usage[name].used for name in ("device", "pinned", "file")] == [8 * KIB, 8 * KIB, 8 * KIB]
    assert usage["file"].tensors == 2  # each a page of 4 KiB
    for key, expected in truth.items():
        assert torch.equal(store[key], expected)
        assert store.tier_of(key) == "device"
        check_budgets(store)
    assert len(store) == 10
    assert set(store) == set(range(10))
    del store[3]
    assert 3 not in store
    with pytest.raises(KeyError):
        store[3]


def test_writes_are_kept_however_they_are_made(store: Store) -> None:
    truth = filled(store, 10)
    for key, expected in truth.items():
        store[key] += 1
        with store.writing(key) as (found,):
            found.data.mul_(2)  # which torch does not count
        with store.reading(key) as (found,):
            found.add_(0.5)  # which it was promised not to do, and torch counts
        del found
        truth[key] = (expected + 1) * 2 + 0.5
    for key, expected in truth.items():
        assert torch.equal(store[key], expected)


def test_what_was_read_alone_is_not_written_again(store: Store) -> None:
    filled(store, 8)
    store.evict(*(key for key in range(8) if store.tier_of(key) == "device"))
    down = store.traffic.sent_down
    for _ in range(3):
        for key in range(4):
            with store.reading(key):
                pass
    spared = store.traffic.spared
    store.evict(*range(4))
    assert store.traffic.spared == spared + 4
    assert store.traffic.sent_down == down
    store[0]
    store.evict(0)  # it may have been written to
    assert store.traffic.sent_down == down + 2  # another of pinned memory makes room for it


def test_a_tensor_that_somebody_holds_stays(store: Store) -> None:
    filled(store, 4)
    view = store[0][3:5]  # a view of what was given out
    expected = view.clone()
    for key in range(4, 12):
        store[key] = torch.rand(KIB2)
    assert store.tier_of(0) == "device"
    with pytest.raises(StoreFull, match="in use"):
        store.evict(0)
    assert torch.equal(view, expected)
    del view
    store.evict(0)
    assert store.tier_of(0) == "pinned"


def test_a_graph_that_saved_a_tensor_keeps_it(store: Store) -> None:
    filled(store, 4)
    x = torch.rand(KIB2, requires_grad=True)
    loss = (x * store[0]).sum()
    with pytest.raises(StoreFull):
        store.evict(0)
    loss.backward()
    del loss
    store.evict(0)
    assert x.grad is not None
    assert torch.equal(x.grad, store[0])


def test_more_than_fits_at_once_is_refused_and_changes_nothing(store: Store) -> None:
    truth = filled(store, 8)
    words = r"2\.00 KiB do not fit beside what is in use"
    with pytest.raises(StoreFull, match=words), store.reading(0, 1, 2, 3, 4):
        pass
    with pytest.raises(StoreFull, match=r"12\.00 KiB is larger than the tier 'device' \(8\.00 KiB\)"):
        store["large"] = torch.rand(3 * KIB)
    assert "large" not in store
    for key, expected in truth.items():
        assert torch.equal(store[key], expected)


def test_a_failed_wake_is_rolled_back(tmp_path: Path) -> None:
    lane = LateLane(0, latest=0.0, failing=0.0)
    with make_store(tmp_path, lane, ahead=0) as store:
        truth = filled(store, 10)
        before = store.usage()
        lane.failing = 1.0
        for key in range(6):
            with pytest.raises(CopyLost):
                store[key]
        assert [store.tier_of(key) for key in range(10)] == ["file"] * 2 + ["pinned"] * 4 + ["device"] * 4
        assert {name: usage.used for name, usage in store.usage().items()} == {
            name: usage.used for name, usage in before.items()
        }
        store.prefetch(0)  # a hint: it may fail
        lane.failing = 0.0
        for key, expected in truth.items():
            assert torch.equal(store[key], expected)


def test_a_prefetch_that_fails_is_done_again(tmp_path: Path) -> None:
    lane = LateLane(0, latest=0.0, failing=0.0)
    with make_store(tmp_path, lane, ahead=0) as store:
        truth = filled(store, 5)
        store.evict(4)
        lane.failing = 1.0
        store.prefetch(0)
        assert store.tier_of(0) == "device"  # on its way
        lane.failing = 0.0
        assert torch.equal(store[0], truth[0])
        assert store.traffic.woken == 1
        store.evict(0)
        store.prefetch(0)
        assert torch.equal(store[0], truth[0])
        assert store.traffic.awaited == 1


def test_hinted_victims_go_first(store: Store) -> None:
    filled(store, 4)
    store.done(2)
    store["new"] = torch.rand(KIB2)
    assert [store.tier_of(key) for key in (0, 1, 2, 3, "new")] == [
        "device",
        "device",
        "pinned",
        "device",
        "device",
    ]
    store.done(3)
    with store.reading(3):
        pass  # it is asked for again: the hint is gone
    store["newer"] = torch.rand(KIB2)
    assert store.tier_of(3) == "device"
    with pytest.raises(KeyError):
        store.prefetch("nobody")


def test_hints_keep_a_part_of_a_loop_on_the_device(tmp_path: Path) -> None:
    """Six tensors in a circle with room for four: brute force says that each round must bring at least two or three."""
    with make_store(tmp_path, ThreadLane(), ahead=0) as store:
        truth = filled(store, 6)
        woken = []
        for _ in range(6):
            before = store.traffic.woken
            for key, expected in truth.items():
                with store.reading(key) as (found,):
                    assert torch.equal(found, expected)
                del found
                store.done(key)
            woken.append(store.traffic.woken - before)
        assert max(woken[1:]) <= 3  # without hints all six


def test_an_order_that_was_seen_twice_is_brought_ahead(tmp_path: Path) -> None:
    with make_store(tmp_path, ThreadLane(), ahead=1) as store:
        truth = filled(store, 8)
        for _ in range(4):
            for key, expected in truth.items():
                with store.reading(key) as (found,):
                    assert torch.equal(found, expected)
        traffic = store.traffic
        assert traffic.found + traffic.woken + traffic.awaited == 32
        assert traffic.awaited >= 14  # all of the last two rounds but the first or two


def test_the_order_is_learnt_by_thread_and_forgotten() -> None:
    order = AccessOrder()
    for _ in range(2):
        for key in "abc":
            order.note(1, key)
            order.note(2, "x")
    assert list(order.after("a", 5)) == ["b", "c"]
    order.note(1, "a")
    assert list(order.after("a", 5)) == ["b", "c"]  # and not round again
    order.note(1, "c")
    assert list(order.after("a", 5)) == []
    order.forget("c")
    assert list(order.after("b", 5)) == []


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.rand(4, 3, 5).transpose(0, 2),
        lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.rand(6)[::2],
        lambda: torch.rand(3).expand(4, 3),
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0, 7),
        lambda: torch.rand(5) > 0.5,
        lambda: torch.rand(5, dtype=torch.complex64).conj(),
        lambda: torch.rand(5, dtype=torch.bfloat16),
        lambda: torch.rand(8).to(torch.float8_e4m3fn),
        lambda: nn.Parameter(torch.rand(3)),
    ],
)
def test_any_dense_layout_and_dtype_comes_back(store: Store, made: Any) -> None:
    given = made()
    store["it"] = given
    expected = given.detach().resolve_conj().clone()
    del given
    for tier in ("pinned", "file", "device"):
        store.put("it", store["it"], tier=tier)
        assert store.tier_of("it") == tier
        found = store["it"]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(
            found.contiguous().view(torch.uint8) if found.dim() else found,
            expected.contiguous().view(torch.uint8) if found.dim() else expected,
        )
        del found


def test_strides_of_dense_tensors_stay(store: Store) -> None:
    store["it"] = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    store.evict("it")
    assert store["it"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "given",
    [3, torch.rand(3, 3).to_sparse(), torch.empty(3, device="meta")],
)
def test_what_has_no_one_piece_of_memory_is_refused(store: Store, given: Any) -> None:
    with pytest.raises(UsageError):
        store["it"] = given
    assert "it" not in store


def test_one_tensor_under_two_keys_is_two(store: Store) -> None:
    tensor = torch.rand(KIB2)
    store["one"] = tensor
    store["two"] = tensor
    del tensor
    store["two"] += 1
    store.evict("one", "two")
    assert torch.equal(store["one"] + 1, store["two"])


def test_threads_wait_for_room_that_others_hold(store: Store) -> None:
    truth = filled(store, 8)
    inside, leave, got = threading.Event(), threading.Event(), []

    def hold() -> None:
        with store.reading(4, 5, 6, 7):
            inside.set()
            leave.wait()

    def ask() -> None:
        got.append(torch.equal(store[0], truth[0]))

    first, second = threading.Thread(target=hold), threading.Thread(target=ask)
    first.start()
    inside.wait()
    second.start()
    second.join(0.2)
    assert second.is_alive()
    leave.set()
    first.join()
    second.join()
    assert got == [True]


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with Store(
        [DeviceTier("device", 2 * KIB, CPU), DeviceTier("below", 8 * KIB, CPU)], CPU, patience=0.1
    ) as store:
        store[0], store[1] = torch.rand(KIB2), torch.rand(KIB2)
        with store.reading(1):
            failed: list[BaseException] = []

            def ask() -> None:
                try:
                    store[0]
                except StoreFull as error:
                    failed.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        assert len(failed) == 1
        store[0]


class DictionaryTier(Tier):
    """A tier of one's own: the four methods."""

    def __init__(self, capacity: int) -> None:
        super().__init__("arrays", capacity)
        self.kept: dict[int, tuple[bytes, Layout]] = {}

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        del copy  # it has no memory that a tensor could be copied to
        layout = Layout.of(source)
        flat = source.as_strided((source.numel(),), (1,)).view(torch.uint8)
        self.kept[key := len(self.kept)] = flat.numpy().tobytes(), layout
        return key

    def get(self, handle: Any) -> torch.Tensor:
        values, layout = self.kept[handle]
        return layout.over(torch.frombuffer(bytearray(values), dtype=torch.uint8))

    def drop(self, handle: Any) -> None:
        self.kept[handle] = b"", self.kept[handle][1]


def test_a_new_tier_is_one_small_class() -> None:
    tier = DictionaryTier(64 * KIB)
    with vramfit.TieredStore("8KiB", more=[tier], device="cpu") as store:
        truth = filled(store, 20)
        assert store.tier_of(0) == "arrays"
        assert sum(len(values) for values, _ in tier.kept.values()) == 16 * 2 * KIB
        for key, expected in truth.items():
            assert torch.equal(store[key], expected)


def test_it_belongs_to_one_process(store: Store, tmp_path: Path) -> None:
    filled(store, 12)
    for broken in (pickle.dumps, copy.deepcopy):
        with pytest.raises(UsageError, match="cannot be pickled"):
            broken(store)
    child = os.fork()
    if not child:  # it can neither use the store nor remove the files
        try:
            store[0]
        except UsageError:
            store.close()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(store[0], store[0])
    store.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="closed"):
        store[0]
    store.close()


def test_tensors_outlive_the_store(tmp_path: Path) -> None:
    for pool in (False, True):
        store = make_store(tmp_path, None, pool=pool)
        store[0] = torch.full((4,), 3.0)
        held = store[0]
        store.close()
        torch.rand(4 * KIB)
        assert held.tolist() == [3.0] * 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"budget": "much", "pinned": "1MiB"}, "budget='much'"),
        ({"budget": "1MiB"}, "no tier below"),
        ({"budget": "1MiB", "pinned": 0}, "pinned=0"),
        (
            {"budget": "1MiB", "pinned": "1MiB", "allocation": "both"},
            "allocation='both' is none of 'separate', 'pool'",
        ),
        ({"budget": "1MiB", "pinned": "1MiB", "unified": "within"}, "there is no card"),
        (
            {"budget": "1MiB", "pinned": "1MiB", "unified": "within", "allocation": "pool"},
            "not taken as a pool",
        ),
        ({"budget": "1MiB", "peers": {"cpu": "1MiB"}}, "the peer 'cpu' is no other card than cpu"),
        ({"budget": "1MiB", "more": [3]}, "3 in more is no tier"),
        ({"budget": "1MiB", "pinned": "1MiB", "device": "tpu"}, "device='tpu'"),
        ({"budget": "1MiB", "pinned": "1MiB", "device": "meta"}, "is neither a CUDA device nor the CPU"),
        ({"budget": "1MiB", "pinned": "1MiB", "ahead": -1}, "ahead=-1"),
        ({"budget": "1MiB", "pinned": "1MiB", "patience": "long"}, "patience='long'"),
    ],
)
def test_arguments_are_checked(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        vramfit.TieredStore(**{"device": "cpu", **given})
    assert words in str(caught.value)


def test_a_folder_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="no such file"):
        vramfit.TieredStore("1MiB", file="1MiB", folder=tmp_path / "nowhere", device="cpu")


def test_a_tier_that_is_none_is_said(store: Store) -> None:
    with pytest.raises(UsageError, match="no tier 'tape'"):
        store.put(0, torch.rand(3), tier="tape")
