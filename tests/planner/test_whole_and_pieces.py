"""Pieces of a batch, tried: losses that couple examples in one way or another are found by their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.devices.cpu_backend import CPU_FLOPS
from vramfit.planner.whole_and_pieces import (
    LargeBatch,
    NoPiecesError,
    NotComparableError,
    spans_of_many_sizes,
    try_pieces,
)
from vramfit.techniques.micro_batching import MicroBatchingSetting, Reduction, Splitter
from vramfit.workload import Workload

WIDTH, LENGTH = 8, 6


def pair(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch_size, LENGTH, WIDTH), torch.randn(batch_size, LENGTH, WIDTH)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))


def workload(
    loss: Callable[..., torch.Tensor],
    model: Callable[[], nn.Module] = two_layers,
    batch: Callable[..., Any] = pair,
) -> Workload:
    return Workload(
        model=model,
        batch=batch,
        sizes={"batch_size": 8},
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(list(parameters), lr=0.1),
    )


def squares(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class Mixture(nn.Module):
    """Experts with a router, which a loss of its own keeps balanced over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        best = shares.max(-1)
        chosen = F.one_hot(best.indices, 4).to(x.dtype)
        self.balance = 4 * (chosen.flatten(0, -2).mean(0) * shares.flatten(0, -2).mean(0)).sum()
        seen = torch.stack([expert(x) for expert in self.experts], -1)
        return (seen * chosen.unsqueeze(-2)).sum(-1) * best.values.unsqueeze(-1)


class CoupledInTraining(nn.Module):
    """Takes the mean of the batch away, in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x - x.mean(0, keepdim=True) if self.training else x)


class NormalisedByFunction(nn.Module):
    """Batch norm that no layer tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = F.batch_norm(self.first(x), torch.zeros(LENGTH), torch.ones(LENGTH), training=self.training)
        return self.last(seen)


class BehindZeros(nn.Module):
    """A last layer of zeros, as diffusion models begin with, lets no gradient through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = CoupledInTraining(), nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


def contrastive(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    seen, other = (F.normalize(model(part).mean(1), dim=-1) for part in batch)
    return F.cross_entropy(10 * seen @ other.T, torch.arange(len(seen)))


def balanced(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return squares(model, batch) + 0.01 * model.balance


def varied(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    seen = model(batch[0])
    return (seen - batch[1]).square().mean() + 0.1 * F.relu(1 - seen.flatten(0, 1).std(0)).mean()


@pytest.mark.parametrize(
    ("loss", "model"),
    [
        (contrastive, two_layers),
        (balanced, Mixture),
        (varied, two_layers),
        (squares, CoupledInTraining),
        (squares, lambda: CoupledInTraining().eval()),
        (squares, NormalisedByFunction),
        (squares, BehindZeros),
    ],
    ids=["contrastive", "balance", "variance", "training", "made-in-eval", "batch-norm", "behind-zeros"],
)
def test_what_couples_examples_has_no_pieces(
    loss: Callable[..., torch.Tensor], model: Callable[[], nn.Module]
) -> None:
    with pytest.raises(NoPiecesError, match=r"do not give its gradients: that of .* differs by"):
        try_pieces(workload(loss, model))


def with_mask(dtype: torch.dtype, value: int, name: str = "mask") -> Callable[..., dict[str, torch.Tensor]]:
    def batch(batch_size: int) -> dict[str, torch.Tensor]:
        x, y = pair(batch_size)
        shape = (batch_size,) if name == "length" else (batch_size, LENGTH)
        return {"x": x, "y": y, name: torch.full(shape, value).to(dtype)}

    return batch


def masked(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    off = (model(batch["x"]) - batch["y"]).square().mean(-1)
    if "length" in batch:
        mask = torch.arange(LENGTH) < batch["length"][:, None]
    else:
        mask = ~batch["padding"] if "padding" in batch else batch["mask"]
    return (off * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("batch", "reduction", "labels"),
    [
        (with_mask(torch.bool, 1), Reduction.WEIGHTS, "mask"),
        (with_mask(torch.float32, 1), Reduction.WEIGHTS, "mask"),
        (with_mask(torch.int64, LENGTH, "length"), Reduction.WEIGHTS, "length"),
        (with_mask(torch.bool, 0, "padding"), Reduction.TOKENS, "padding"),
    ],
    ids=["mask", "weights", "lengths", "padding"],
)
def test_a_mean_over_what_a_mask_leaves_is_weighed_by_it(
    batch: Callable[..., Any], reduction: Reduction, labels: str
) -> None:
    """The batch that the workload makes is even, and a mean over examples would look right."""
    plain = workload(masked, batch=batch)
    found = try_pieces(plain)
    assert (found.setting.reduction, found.setting.labels) == (reduction, labels)
    assert labels in found.varied
    uneven = batch(batch_size=5)
    uneven[labels][0] = 1 if labels == "length" else labels == "padding"
    if labels != "length":
        uneven[labels][0, 0] = labels != "padding"
    model = two_layers().eval()
    masked(model, uneven).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    setting = MicroBatchingSetting(
        count=3, reduction=reduction, labels=labels, ignore_index=found.setting.ignore_index
    )
    for piece in Splitter(setting, shifts=False)(uneven):
        (masked(model, piece.batch) * piece.weight).backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_masked_mean_that_is_no_plain_one_has_no_pieces() -> None:
    def smoothed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return masked(model, batch) * batch["mask"].sum() / (batch["mask"].sum() + 1)

    with pytest.raises(NoPiecesError):
        try_pieces(workload(smoothed, batch=with_mask(torch.float32, 1)))


# -- losses that change their form with the batch -----------------------------------------------------------------

LARGE = LargeBatch(examples=96)


def classes(batch_size: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(batch_size, LENGTH, WIDTH), "y": torch.randint(WIDTH, (batch_size,))}


def of_each(model: nn.Module, batch: dict[str, torch.Tensor], reduction: str = "none") -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]).mean(1), batch["y"], reduction=reduction)


def worst_losses(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return of_each(model, batch).sort(descending=True).values[:24].mean()


def with_variance_of_many(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    seen = model(batch["x"]).mean(1)
    spread = F.relu(1 - seen.std(0)).mean() if len(seen) >= 32 else 0.0
    return of_each(model, batch, "mean") + spread


def normalised_by_the_batch(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """By a count that the loss takes for at least 8: a sum of few examples, a mean of many."""
    return of_each(model, batch, "sum") / max(8, len(batch["x"]))


def two_masks(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    off = of_each(model, batch)
    return sum((off * batch[name]).sum() / batch[name].sum().clamp(min=1) for name in ("m1", "m2"))  # type: ignore[return-value]


def with_two_masks(batch_size: int) -> dict[str, torch.Tensor]:
    return {**classes(batch_size), "m1": torch.ones(batch_size), "m2": torch.ones(batch_size)}


@pytest.mark.parametrize(
    ("loss", "batch"),
    [
        (worst_losses, classes),
        (with_variance_of_many, classes),
        (normalised_by_the_batch, classes),
        (two_masks, with_two_masks),
    ],
)
def test_a_loss_that_changes_its_form_with_the_batch_is_seen_in_a_large_one(
    loss: Callable[..., torch.Tensor], batch: Callable[..., Any]
) -> None:
    """Four examples do not show it."""
    plain = workload(loss, batch=batch)
    assert try_pieces(plain).examples == 4
    with pytest.raises(NoPiecesError, match="pieces of a batch of 96 do not give its gradients"):
        try_pieces(plain, large=LARGE)


def test_labels_of_which_few_are_ignored_are_counted() -> None:
    found = try_pieces(
        workload(lambda model, batch: of_each(model, batch, "mean"), batch=classes), large=LARGE
    )
    assert (found.setting.reduction, found.setting.labels) == (Reduction.TOKENS, "y")
    assert (found.setting.ignore_index, found.varied, found.examples) == (-100, ("y",), 96)


def test_two_masks_with_one_mean_each_are_told_apart_from_one() -> None:
    def one_mask(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (of_each(model, batch) * batch["m1"]).sum() / batch["m1"].sum().clamp(min=1)

    found = try_pieces(workload(one_mask, batch=with_two_masks), large=LARGE)
    assert (found.setting.reduction, found.setting.labels) == (Reduction.WEIGHTS, "m1")


def test_a_large_batch_is_as_large_as_time_and_memory_allow() -> None:
    flops = CPU_FLOPS / 1000  # an example takes a hundredth of a second with ten parameters
    assert LargeBatch(examples=1000, flops=flops, seconds=4.0).affordable(10) == 100
    assert LargeBatch(examples=50, flops=flops, seconds=4.0).affordable(10) == 50
    assert LargeBatch(examples=1000, flops=flops, seconds=4.0).affordable(1000) == 1
    assert LargeBatch(examples=1000, flops=flops, memory=2.0**30, seconds=4.0).affordable(1) == 2


@pytest.mark.parametrize("size", [2, 3, 5, 17, 100, 8192])
@pytest.mark.parametrize("pieces", [2, 5, 16])
def test_pieces_of_many_sizes_fill_the_batch(size: int, pieces: int) -> None:
    spans = spans_of_many_sizes(size, pieces)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == size
    assert len(spans) <= pieces
    lengths = [stop - start for start, stop in spans]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 1


def test_dropout_by_layers_and_functions_is_off_and_other_random_numbers_are_told() -> None:
    def dropped(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.dropout(model(batch[0]), 0.2, model.training).square().mean()

    def noisy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return model(batch[0] + torch.randn_like(batch[0])).square().mean()

    assert try_pieces(workload(dropped)).setting.reduction is Reduction.MEAN
    with pytest.raises(NotComparableError, match="draws random numbers in training"):
        try_pieces(workload(noisy))


def test_layers_of_batch_norm_are_left_to_what_micro_batching_says_of_them() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), nn.Linear(WIDTH, WIDTH))

    assert try_pieces(workload(squares, model)).setting.reduction is Reduction.MEAN
    with pytest.raises(NoPiecesError):
        try_pieces(workload(contrastive, model))


@pytest.mark.parametrize("coupled", [False, True])
def test_lists_of_what_each_example_holds_are_made_uneven(coupled: bool) -> None:
    """A mean over all boxes of a batch is one over examples only while each has as many."""

    def batch(batch_size: int) -> dict[str, Any]:
        seen = torch.randn(batch_size, LENGTH, WIDTH)
        return {"x": seen, "boxes": [{"y": torch.randn(LENGTH, WIDTH)} for _ in range(batch_size)]}

    def boxes(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        offs = [
            (seen[: len(known["y"])] - known["y"]).square()
            for seen, known in zip(model(batch["x"]), batch["boxes"], strict=True)
        ]
        return torch.cat(offs).mean() if coupled else torch.stack([off.mean() for off in offs]).mean()

    plain = workload(boxes, batch=batch)
    if coupled:
        with pytest.raises(NoPiecesError):
            try_pieces(plain)
    else:
        assert try_pieces(plain).varied == ("boxes",)


def test_lengths_of_packed_sequences_are_varied_in_their_order() -> None:
    def batch(batch_size: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(batch_size, LENGTH, WIDTH), "length": torch.full((batch_size,), LENGTH)}

    def packed(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sequences = nn.utils.rnn.pack_padded_sequence(batch["x"], batch["length"], batch_first=True)
        return model(sequences)[0].data.square().mean()

    found = try_pieces(workload(packed, lambda: nn.LSTM(WIDTH, WIDTH), batch))
    assert (found.setting.reduction, found.setting.labels) == (Reduction.WEIGHTS, "length")


def test_a_model_in_16_bits_is_tried_in_32() -> None:
    def batch(batch_size: int) -> tuple[torch.Tensor, ...]:
        return tuple(part.bfloat16() for part in pair(batch_size))

    found = try_pieces(workload(squares, lambda: two_layers().bfloat16(), batch))
    assert found.setting.reduction is Reduction.MEAN
    assert found.worst < 1


def test_a_loss_that_is_no_number_is_told() -> None:
    asked = workload(lambda model, batch: squares(model, batch) / 0 - squares(model, batch) / 0)
    with pytest.raises(UsageError, match="the loss of a batch is nan"):
        try_pieces(asked)
