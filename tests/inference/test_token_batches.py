"""Batches by tokens: within the bound, little padding, results in order, and a bound that learns."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import vramfit
from vramfit.errors import UsageError
from vramfit.inference.peak_bound import PeakBound, fitted_bound
from vramfit.inference.token_batches import TokenBatch
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


def peak(items: int, length: int) -> int:
    """Bytes of an encoder that writes its scores out, rounded as an allocator does."""
    each = 20_000 * length + 48 * length**2
    return 400 * MIB + -(-items * each // (2 * MIB)) * 2 * MIB


def lengths(count: int = 2000, longest: int = 2048) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(np.log(200), 1.0, count)
    found = np.clip(drawn.round().astype(int), 1, longest)
    found[int(found.argmax())] = longest
    return [int(one) for one in found]


def test_batches_fit_with_little_padding_and_results_come_in_order() -> None:
    texts = lengths()
    budget = 1024 * MIB
    plan = vramfit.batches(texts, peak=peak, budget=budget)
    results = plan.ordered()
    computed, streamed = 0, []
    for batch in plan:
        assert peak(len(batch), batch.length) <= budget
        assert batch.length >= max(texts[number] for number in batch)
        assert batch.tokens == sum(texts[number] for number in batch)
        computed += len(batch) * batch.length
        results.add(batch, torch.tensor([texts[number] for number in batch]))
        streamed += [int(one) for one in results.ready()]
    assert streamed == texts and 1 - sum(texts) / computed <= 0.03
    assert len(plan) < len(texts) / 10


def test_batches_are_as_large_as_the_bound_allows() -> None:
    plan = vramfit.batches([512] * 1000, peak=peak, budget=1024 * MIB)
    first = next(iter(plan))
    assert len(first) == plan.largest(512)
    assert peak(len(first) + 1, 512) > 1024 * MIB >= peak(len(first), 512)
    assert len(next(iter(vramfit.batches([512] * 99, peak=peak, budget="1GiB", most_items=7)))) == 7


def test_the_longest_item_is_checked_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"an item of 2048 tokens takes .* bytes alone"):
        vramfit.batches(lengths(), peak=peak, budget=500 * MIB)
    # Rounded up it would not fit, as it is it does.
    tight = vramfit.batches([1001], peak=lambda _items, length: length, budget=1001)
    assert next(iter(tight)).length == 1001


def test_a_bound_through_measured_shapes_is_nowhere_below_them() -> None:
    shapes = [(items, length) for items in (1, 4, 32) for length in (16, 128, 1024, 2048)]
    measured = {shape: peak(*shape) for shape in shapes}
    bound = fitted_bound(measured)
    for items in (1, 2, 7, 50, 300):
        for length in (1, 33, 500, 2048):
            assert bound(items, length) >= peak(items, length) - 2 * MIB
    assert all(bound(*shape) >= found for shape, found in measured.items())
    assert max(bound(*shape) / found for shape, found in measured.items()) < 1.05
    assert bound(5, 100) <= bound(6, 100) <= bound(6, 101)
    with pytest.raises(UsageError, match="4 measured shapes are too few"):
        fitted_bound(dict(list(measured.items())[:4]))


def test_what_is_observed_raises_the_bound_for_all_that_follow() -> None:
    texts = [512] * 400
    plan = vramfit.batches(texts, peak=peak, budget=1024 * MIB)
    batches = iter(plan)
    first = next(batches)
    truth = 2 * peak(len(first), 512)
    plan.observe(truth)
    assert plan.bound(len(first), 512) == pytest.approx(truth)
    assert len(next(batches)) < len(first)
    plan.observe(1)  # less than predicted: nothing changes
    assert plan.bound.factor == pytest.approx(2.0)


def test_a_batch_that_ran_out_of_memory_comes_again_in_halves() -> None:
    texts = lengths(300)
    plan = vramfit.batches(texts, peak=lambda items, length: peak(items, length) / 3, budget=1024 * MIB)
    results, ooms = plan.ordered(), 0
    for batch in plan:
        took = peak(len(batch), batch.length)
        if took > 1024 * MIB:
            ooms += 1
            plan.split()
        else:
            plan.observe(took)
            results.add(batch, [texts[number] for number in batch])
    assert results.all() == texts and 1 <= ooms < 6
    with pytest.raises(UsageError, match="an item of 8 tokens does not fit alone"):
        plan.split(TokenBatch([3], length=8))


def test_a_stream_waits_for_a_window() -> None:
    texts = [("x" * length, length) for length in lengths(500)]
    seen = 0

    def stream() -> Iterator[str]:
        nonlocal seen
        for text, _ in texts:
            seen += 1
            yield text

    plan = vramfit.batches(stream(), length=len, peak=peak, budget="1GiB", window=64)
    results = plan.ordered()
    for batch in plan:
        assert seen <= 64 * (max(batch) // 64 + 1) and [len(item) for item in batch.items] == [
            texts[number][1] for number in batch
        ]
        results.add(batch, batch.items)
    assert results.all() == [text for text, _ in texts]
    with pytest.raises(UsageError, match="items come as a stream"):
        vramfit.batches(stream(), length=len, peak=peak, budget="1GiB")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_takes_it(workers: int) -> None:
    texts = lengths(200)
    plan = vramfit.batches(texts, peak=peak, budget="1GiB")
    loader = DataLoader(texts, batch_sampler=plan, num_workers=workers, collate_fn=list)  # type: ignore[arg-type]
    found = [length for batch in loader for length in batch]
    assert found == sorted(texts, reverse=True) and len(loader) == len(plan)


def test_results_that_do_not_fit_are_refused() -> None:
    results = vramfit.batches([5], peak=peak, budget="1GiB").ordered()
    with pytest.raises(UsageError, match="2 results came for a batch of 1"):
        results.add([0], [1, 2])
    results.add([1], [1])
    with pytest.raises(UsageError, match="item 1 has a result already"):
        results.add([1], [1])
    with pytest.raises(UsageError, match="item 0 has no result yet"):
        results.all()


def test_bad_input_is_one_line() -> None:
    for arguments, message in (
        ({"budget": 0}, "budget=0"),
        ({"max_padding": 1.5}, "max_padding=1.5"),
        ({"multiple": 0}, "multiple=0"),
        ({"peak": 5}, "peak is of type int"),
        ({"peak": lambda items, length: float("nan")}, "peak gives nan for 1 items of 5 tokens"),
        ({"peak": lambda items, length: None}, "peak gives None"),
        ({"peak": dict.fromkeys(range(5), 1.0)}, "no pairs"),
    ):
        with pytest.raises(UsageError, match=message):
            vramfit.batches([5], **{"peak": peak, "budget": "1GiB"} | arguments)
    with pytest.raises(UsageError, match="an item has no tokens"):
        vramfit.batches([5, 0], peak=peak, budget="1GiB")
    for items in (["text"], [[1, 2]], [None], [3.5], [float("nan")], "text"):
        with pytest.raises(UsageError, match="which is no whole number"):
            vramfit.batches(items, peak=peak, budget="1GiB")
        with pytest.raises(UsageError, match="which is no whole number"):
            vramfit.batches(items, model=torch.nn.Identity(), budget="1GiB", gpu="RTX 4090")
    tables = [5, 5.0, np.int32(5), np.float64(5), torch.tensor(5)]
    assert {batch.length for batch in vramfit.batches(tables, peak=peak, budget="1GiB")} == {5}
    with pytest.raises(UsageError, match="None came for a batch of 1"):
        vramfit.batches([5], peak=peak, budget="1GiB").run(lambda batch: None)
    with pytest.raises(UsageError, match="no batch was given out yet"):
        vramfit.batches([5], peak=peak, budget="1GiB").observe(3)


def test_batches_travel_to_workers() -> None:
    batch = TokenBatch([3, 1], length=8, tokens=11)
    again = pickle.loads(pickle.dumps(batch))
    assert again == batch and (again.length, again.tokens) == (8, 11)
    assert list(vramfit.batches([], peak=peak, budget="1GiB")) == []
    assert PeakBound.of(peak)(1, 1) == peak(1, 1)


def test_a_run_splits_what_does_not_fit_and_gives_results_in_order() -> None:
    texts, ran = lengths(300), []

    def call(batch: TokenBatch) -> list[int]:
        ran.append(peak(len(batch), batch.length) <= 1024 * MIB)
        if not ran[-1]:
            raise torch.OutOfMemoryError("too large")
        return [texts[number] for number in batch]

    low = vramfit.batches(texts, peak=lambda items, length: peak(items, length) / 2, budget=1024 * MIB)
    assert low.run(call) == texts and 1 <= ran.count(False) <= 3
    ran.clear()
    assert vramfit.batches(texts, peak=peak, budget=1024 * MIB).run(call) == texts and all(ran)


def test_a_run_on_a_card_never_takes_more_than_the_budget(gpu: VirtualGPU) -> None:
    texts = lengths(60, longest=512)

    def took(items: int, length: int) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        work(items, length)
        return torch.cuda.max_memory_reserved()

    def work(items: int, length: int) -> torch.Tensor:
        x = torch.zeros(items, length, 256, device="cuda")
        return ((x @ x.mT).exp() @ x).sum((1, 2))

    measured = {(items, length): took(items, length) for items in (1, 4, 16) for length in (8, 64, 256, 512)}
    plan = vramfit.batches(texts, peak=measured, budget="64MiB")
    gc.collect()
    most: list[int] = []

    def call(batch: TokenBatch) -> torch.Tensor:
        found = work(len(batch), batch.length).cpu()
        most.append(torch.cuda.max_memory_reserved())
        return found

    assert len(plan.run(call)) == len(texts)
    assert max(most) <= 64 * MIB and max(most) > 40 * MIB


def test_shapes_are_confirmed_before_they_run() -> None:
    """What an allocator reserves jumps between lengths, which no bound through a few of them follows."""
    texts = lengths(500)

    def reserved(items: int, length: int) -> float:
        return peak(items, length) * (1.3 if length % 64 else 1.0)

    grid = {(items, length): reserved(items, length) for items in (1, 4, 32) for length in (64, 256, 2048)}
    plan = vramfit.batches(texts, peak=grid, budget=1024 * MIB)
    assert any(reserved(len(batch), batch.length) > 1024 * MIB for batch in plan)
    asked: list[tuple[int, int]] = []

    def measure(items: int, length: int) -> float | None:
        asked.append((items, length))
        found = reserved(items, length)
        return found if found <= 1024 * MIB else None

    count = plan.confirm(measure)
    assert count == len(asked) == len(set(asked)) < 3 * len({batch.length for batch in plan})
    assert all(reserved(len(batch), batch.length) <= 1024 * MIB for batch in plan)
    assert sorted(number for batch in plan for number in batch) == list(range(len(texts)))
    with pytest.raises(UsageError, match=r"takes .* bytes alone"):
        vramfit.batches([8], peak=peak, budget="1GiB").confirm(lambda _items, _length: None)
