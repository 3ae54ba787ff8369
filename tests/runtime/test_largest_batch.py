"""The largest batch: exact, with few trials, and nothing of a trial left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.subjects import SUBJECTS, Subject
from torch import nn

import vramfit
from vramfit.errors import OutOfMemory, UsageError
from vramfit.runtime.batch_search import BatchTrial, batch_search
from vramfit.searching.largest import Largest


def searched(
    truth: int, start: int, *, predicted: bool, most: int = 1 << 20, peaks: bool = False
) -> Largest[BatchTrial]:
    def run(size: int) -> BatchTrial:
        return BatchTrial(
            size=size, fits=size <= truth, peak_bytes=100 + 7 * size if peaks and size <= truth else 0
        )

    limit = 100 + 7 * truth + 3 if peaks else 0
    largest = batch_search(run, start=start, most=most, predicted=predicted, limit_bytes=limit).run()
    assert largest.value == min(truth, most)
    return largest


@given(st.integers(0, 5000), st.integers(1, 6000), st.booleans(), st.integers(1, 6000))
def test_the_largest_is_run_and_the_next_fails(truth: int, start: int, predicted: bool, most: int) -> None:
    largest = searched(truth, start, predicted=predicted, most=most)
    ended = {tried.value: tried.fits for tried in largest.tries}
    assert len(ended) == len(largest.tries)  # none twice
    assert truth == 0 or ended[min(truth, most)]
    assert truth >= most or not ended[truth + 1]


@pytest.mark.parametrize("truth", [1, 2, 3, 8, 100, 8192, 123_457])
def test_a_prediction_that_is_off_by_one_costs_three_trials(truth: int) -> None:
    assert len(searched(truth, truth, predicted=True).tries) == 2
    for off in (truth - 1, truth + 1):
        if off:
            assert len(searched(truth, off, predicted=True).tries) <= 3


@pytest.mark.parametrize("truth", [60, 1000, 50_000])
def test_measured_peaks_say_where_the_end_is(truth: int) -> None:
    plain = len(searched(truth, 1, predicted=False).tries)
    assert len(searched(truth, 1, predicted=False, peaks=True).tries) <= plain / 2 + 4


# -- on a live process ---------------------------------------------------------------------------------------------


def batch_of(subject: Subject, size: int) -> Any:
    """Entries of a subject's first batch, repeated."""

    def repeated(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: repeated(one) for name, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(repeated, value))
        return value[:1].repeat(size, *[1] * (value.dim() - 1))

    return repeated(subject.batch(0))


def everything(model: nn.Module, optimizer: torch.optim.Optimizer, others: list[Any]) -> list[Any]:
    """All that a step changes, by value, with the tensors' identities."""
    states = [
        (id(parameter), name, value)
        for parameter, known in optimizer.state.items()
        for name, value in known.items()
    ]
    return [
        [(id(one), one.detach().clone()) for one in (*model.parameters(), *model.buffers())],
        [None if one.grad is None else one.grad.clone() for one in model.parameters()],
        [
            (key, name, id(value), value.clone()) if isinstance(value, torch.Tensor) else (key, name, value)
            for key, name, value in states
        ],
        [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ],
        [module.training for module in model.modules()],
        [one.state_dict() for one in others],
        torch.get_rng_state(),
        random.getstate(),
        repr(np.random.get_state()),  # noqa: NPY002
    ]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def training(
    subject: Subject, most: int
) -> tuple[nn.Module, torch.optim.Optimizer, list[Any], Callable[[Any], None]]:
    """A training whose steps run out above a size, after the forward and backward pass."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model, optimizer, more = subject.make()
    scaler, scheduler = more.get("scaler"), more.get("scheduler")

    def step(batch: Any) -> None:
        loss = subject.loss(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if len(next(iter(torch.utils._pytree.tree_leaves(batch)))) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        model.eval()
        optimizer.zero_grad()
        model.train()

    return model, optimizer, [one for one in (scaler, scheduler) if one is not None], step


def test_a_buffer_that_steps_replace_is_put_back() -> None:
    class Averaging(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.average = 0.5 * self.average + x.detach().mean(0)
            return super().forward(x)

    model = Averaging(4, 2)
    average = torch.arange(4.0)
    model.register_buffer("average", average)
    found = vramfit.largest_batch(
        lambda size: model(torch.ones(size, 4)).sum().backward(), model=model, most=2, predict="never"
    )
    assert found.size == 2
    assert model.average is average
    assert torch.equal(average, torch.arange(4.0))


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.name)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_all_is_left_as_it_was_found(subject: Subject, steps_before: int) -> None:
    model, optimizer, others, step = training(subject, 9)
    for number in range(steps_before):
        step(subject.batch(number))
    if steps_before:  # in the middle of an accumulation
        subject.loss(model, subject.batch(3)).backward()
    before = everything(model, optimizer, others)
    gradients = [one.grad for one in model.parameters()]
    found = vramfit.largest_batch(
        step,
        lambda size: batch_of(subject, size),
        model=model,
        optimizer=optimizer,
        others=others,
        predicted=8,
    )
    assert (found.size, found.failing, [trial.size for trial in found.trials]) == (9, 10, [8, 9, 10])
    assert same(before, everything(model, optimizer, others))
    # Gradients that others hold are the same tensors again.
    assert all(one.grad is gradient for one, gradient in zip(model.parameters(), gradients, strict=True))


def test_a_training_goes_on_as_if_nothing_had_been_tried() -> None:
    ends, subject = [], SUBJECTS[2]
    for searches in (0, 1):
        model, optimizer, others, step = training(subject, 6)
        for number in range(4):
            if searches and number == 2:
                vramfit.largest_batch(
                    step,
                    lambda size: batch_of(subject, size),
                    model=model,
                    optimizer=optimizer,
                    others=others,
                )
            step(subject.batch(number))
        ends.append([one.detach().clone() for one in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_a_gradient_that_a_step_dropped_is_there_again() -> None:
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    values = [one.grad.clone() for one in model.parameters()]  # type: ignore[union-attr]

    def step(size: int) -> None:
        if size > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        assert model.weight.grad is not None  # the first step of a training that accumulates finds it
        model(torch.ones(size, 3)).sum().backward()
        with torch.no_grad():
            for one in model.parameters():
                one.add_(one.grad)  # type: ignore[arg-type]

    assert int(vramfit.largest_batch(step, model=model)) == 5
    assert all(map(torch.equal, values, (one.grad for one in model.parameters())))


def test_other_errors_pass_with_all_as_before() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()

    def step(size: int) -> None:
        with torch.no_grad():
            model.weight.add_(1)
        if size > 5:
            raise ValueError("too many entries for this table")

    with pytest.raises(ValueError, match="too many entries"):
        vramfit.largest_batch(step, model=model)
    assert torch.equal(before, model.weight)


def test_a_step_that_catches_its_own_shortage_does_not_fit() -> None:
    done: list[int] = []

    def step(size: int) -> None:
        try:
            if size > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        except torch.OutOfMemoryError:
            return
        done.append(size)

    assert vramfit.largest_batch(step, model=nn.Linear(3, 2)).size == 5


def test_a_schedule_that_nobody_named_is_put_back() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(size: int) -> None:
        if size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        model(torch.ones(size, 3)).sum().backward()
        optimizer.step()
        schedule.step()

    assert vramfit.largest_batch(step, model=model, optimizer=optimizer).size == 3
    assert (
        schedule.last_epoch == 0
        and schedule.get_last_lr() == [1.0]
        and optimizer.param_groups[0]["lr"] == 1.0
    )


def test_not_even_one() -> None:
    def step(size: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")

    with pytest.raises(OutOfMemory, match="not even a batch of 1 fits: CUDA out of memory"):
        vramfit.largest_batch(step, model=nn.Linear(3, 2), start=4)


def test_arguments() -> None:
    model = nn.Linear(3, 2)
    for wrong in (
        {"model": 3},
        {"model": model, "optimizer": 3},
        {"model": model, "others": [3]},
        {"model": model, "predict": "perhaps"},
        {"model": model, "steps": 1},
        {"model": model, "margin": 0.1},  # of the CPU
        {"model": model, "make_batch": []},
        {"model": []},
    ):
        with pytest.raises(UsageError):
            vramfit.largest_batch(lambda size: None, **wrong)  # type: ignore[arg-type]


def test_a_margin_is_left_free_on_metered_memory() -> None:
    model, optimizer, _, step = training(SUBJECTS[3], 1 << 30)

    def search(predicted: int, **more: Any) -> int:
        # Batches of 65,536 rows, whose tensors have segments of their own.
        return int(
            vramfit.largest_batch(
                step,
                lambda size: torch.rand(size << 16, 6),
                model=model,
                optimizer=optimizer,
                predicted=predicted,
                **more,
            )
        )

    with vramfit.Track(device="cpu", budget="256MiB"):
        plain, less = search(16), search(8, margin="128MiB")
    assert (plain, less) == (16, 8)
