"""Batches brought to virtual cards: bytes as the allocator counts them, copies, streams and pinned buffers."""

from __future__ import annotations

import time
from collections import UserDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import vramfit
from vramfit.units import MIB

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Item:
    x: torch.Tensor
    name: str


def loader(count: int, nbytes: int = MIB) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {
            "x": torch.zeros(nbytes // 8),
            "y": [torch.zeros(nbytes // 2, dtype=torch.uint8)],
            "at": number,
        }


def await_allocated(nbytes: int) -> None:
    until = time.perf_counter() + 5
    while torch.cuda.memory_allocated() < nbytes and time.perf_counter() < until:
        time.sleep(0.001)
    time.sleep(0.01)  # and a little longer, to see what should not come


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_the_peak_is_depth_times_a_batch(depth: int) -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        batches = vramfit.prefetch(loader(16), depth=depth)
        numbers = []
        for batch in batches:  # enumerate would hold the last one
            numbers.append(batch["at"])
            assert batch["x"].is_cuda and batch["y"][0].is_cuda
            if depth == 1:
                del batch  # with one alone the loop may not keep it while it asks for the next
            if len(numbers) in (4, 8):  # let the thread come to where it can do no more
                await_allocated(depth * MIB)
        batch = None
        assert numbers == list(range(16))
        assert torch.cuda.max_memory_allocated() == depth * MIB
        assert torch.cuda.memory_allocated() == 0
        report = batches.report
        assert report is not None and report.peak_bytes == depth * MIB
        # Two buffers, each of the next power of two.
        assert report.pinned_bytes == torch.cuda.host_memory_stats()["allocated_bytes.peak"] == 2 * MIB
        assert torch.cuda.host_memory_stats()["active_bytes.current"] == 0


def test_a_budget_bounds_batches_of_all_sizes() -> None:
    sizes = [1, 3, 1, 1, 2, 8, 1, 1, 4, 1]

    def uneven() -> Iterator[torch.Tensor]:
        for size in sizes:
            yield torch.zeros(size * MIB, dtype=torch.uint8)

    with vramfit.VirtualGPU("RTX 4090"):
        found = []
        for batch in vramfit.prefetch(uneven(), depth=8, budget="5MiB"):
            found.append(batch.nbytes // MIB)
            time.sleep(0.01)
            if found[-1] < 8 and 8 not in found:
                assert torch.cuda.memory_allocated() <= 5 * MIB
        assert found == sizes
        assert (
            torch.cuda.max_memory_allocated() <= 10 * MIB
        )  # the one that is larger, beside the one before it


def test_a_card_without_room_for_the_depth_gets_what_fits() -> None:
    with vramfit.VirtualGPU("1GiB", context_bytes=0):
        others = torch.empty(900 * MIB, dtype=torch.uint8, device="cuda")
        count = 0
        for _ in vramfit.prefetch(loader(12, 40 * MIB), depth=8):
            count += 1
            time.sleep(0.01)
        assert count == 12
        more = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
        feed = iter(vramfit.prefetch(loader(3, 100 * MIB)))
        with pytest.raises(torch.OutOfMemoryError):
            next(feed)
        assert list(feed) == []
        del feed, others, more


def test_the_consumers_stream_waits_and_memory_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event on the stream that is current where the batch is asked for; each tensor is recorded there."""
    recorded, waited = [], []
    with vramfit.VirtualGPU("RTX 4090"):
        record, wait = torch.Tensor.record_stream, torch.cuda.Stream.wait_event
        monkeypatch.setattr(
            torch.Tensor,
            "record_stream",
            lambda one, stream: (recorded.append(stream), record(one, stream))[1],
        )
        monkeypatch.setattr(
            torch.cuda.Stream, "wait_event", lambda one, event: (waited.append(one), wait(one, event))[1]
        )
        own = torch.cuda.Stream()
        with torch.cuda.stream(own):
            for batch in vramfit.prefetch(loader(3)):
                batch["x"].sum()
        assert recorded == [own] * 6
        assert waited.count(own) == 3
        monkeypatch.undo()


def test_kinds_of_tensors_and_containers() -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        twice = torch.zeros(4)
        on_card = torch.zeros(4, device="cuda")
        batch = {
            "twice": [twice, twice],
            "card": on_card,
            "pinned": torch.zeros(4).pin_memory(),
            "strided": torch.zeros(4, 3).t(),
            "expanded": torch.zeros(4, 1).expand(4, 3),
            "channels": torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last),
            "bf16": torch.zeros(3, dtype=torch.bfloat16),
            "bool": torch.zeros(3, dtype=torch.bool),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.0),
            "complex": torch.zeros(3, dtype=torch.complex64).conj(),
            "user": UserDict(x=torch.zeros(2)),
            "item": Item(torch.zeros(2), "name"),
            "pair": Pair(torch.zeros(2), "y"),
            "words": ["a", 3, None],
        }
        (found,) = vramfit.prefetch([batch])
        assert found["twice"][0] is found["twice"][1]
        assert found["card"] is on_card
        for name in (
            "pinned",
            "strided",
            "expanded",
            "channels",
            "bf16",
            "bool",
            "empty",
            "scalar",
            "complex",
        ):
            plain = batch[name].to("cuda")
            assert (found[name].shape, found[name].dtype) == (plain.shape, plain.dtype), name
            assert found[name].device == plain.device, name
            assert name == "expanded" or found[name].stride() == plain.stride(), name
        assert isinstance(found["user"], UserDict) and found["user"]["x"].is_cuda
        assert isinstance(found["item"], Item) and found["item"].x.is_cuda and found["item"].name == "name"
        assert isinstance(found["pair"], Pair) and found["pair"].x.is_cuda
        assert found["words"] == ["a", 3, None]
        assert batch["twice"][0] is twice and not batch["user"]["x"].is_cuda  # the loader's own is as it was
        del found, on_card


def test_leaving_the_loop_frees_the_card_and_the_buffers() -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        feed = iter(vramfit.prefetch(loader(50), depth=4))
        next(feed)
        time.sleep(0.02)
        del feed
        assert torch.cuda.memory_allocated() == 0
        assert torch.cuda.host_memory_stats()["active_bytes.current"] == 0


def test_a_training_step_takes_one_batch_more_than_without() -> None:
    def peak(batches: Any) -> int:
        model = torch.nn.Linear(1024, 1024, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        for batch in batches:
            time.sleep(0.03)
            model(batch.cuda()).sum().backward()
        return torch.cuda.max_memory_allocated()

    data = [torch.zeros(256, 1024) for _ in range(6)]
    with vramfit.VirtualGPU("RTX 4090"):
        plain = peak(data)
    with vramfit.VirtualGPU("RTX 4090"):
        assert peak(vramfit.prefetch(data)) == plain + MIB
