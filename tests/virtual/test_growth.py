"""Growth of programs on a virtual card: leaks are told with the iteration at which memory runs out, caches are none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from vramfit.analysis import Verdict, verdict
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

WIDTH = 1024
STEPS = 8
Kept = dict[str, Any]
Step = Callable[[nn.Module, torch.optim.Optimizer, int, Kept], object]


def batch(rows: int = 1024) -> torch.Tensor:
    return torch.empty(rows, WIDTH, device="cuda")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, retain: bool = False) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(batch()).square().sum()
    loss.backward(retain_graph=retain)
    optimizer.step()
    return loss


def train(one: Step, steps: int = STEPS) -> Iterator[int]:
    """Train, and say which iteration begins; what it holds goes with it, as with a function that trains."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda()
    optimizer, kept = torch.optim.AdamW(model.parameters()), Kept()
    for number in range(steps):
        yield number
        one(model, optimizer, number, kept)


def on_card(one: Step, steps: int = STEPS) -> tuple[Verdict, int]:
    """The verdict, and the iteration that was the last to begin."""
    number = 0
    try:
        with VirtualGPU("512MiB", context_bytes=0) as gpu:
            for number in train(one, steps):  # noqa: B007
                pass
    except torch.OutOfMemoryError:
        pass
    return verdict(gpu.run), number


def losses_with_their_graphs(model: nn.Module, optimizer: torch.optim.Optimizer, _: int, kept: Kept) -> None:
    kept.setdefault("losses", []).append(step(model, optimizer, retain=True))


def sum_of_losses(model: nn.Module, optimizer: torch.optim.Optimizer, _: int, kept: Kept) -> None:
    kept["total"] = kept.get("total", 0) + step(model, optimizer, retain=True)


def outputs(model: nn.Module, optimizer: torch.optim.Optimizer, _: int, kept: Kept) -> None:
    step(model, optimizer)
    kept.setdefault("outputs", []).append(batch())


def outputs_of_every_second(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, kept: Kept
) -> None:
    step(model, optimizer)
    kept.setdefault("outputs", []).append(batch(3072 if number % 2 else 1024))


LEAKS = (losses_with_their_graphs, sum_of_losses, outputs, outputs_of_every_second)


# Where workspaces come and go, as since torch 2.15, what is kept cuts the blocks that they came back to, and memory
# runs out up to a fifth earlier than the growth of what is held says.
@pytest.mark.usefixtures("kept_workspaces")
@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_is_told_with_the_iteration_at_which_memory_runs_out(leak: Step) -> None:
    found, _ = on_card(leak, 12)
    assert found.fits
    assert found.grows_by >= 4 * MIB
    assert found.runs_out_at is not None
    ended, last = on_card(leak, 1000)
    assert not ended.fits
    assert abs(found.runs_out_at - last) <= 3


def zeroed_last(model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_between(model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
    loss = model(batch()).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(batch()).sum().backward()
    optimizer.step()


def zeroed_never(model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
    model(batch()).sum().backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, *_: object) -> None:
    for _piece in range(4):
        model(batch(256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def averaged_weights(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, kept: Kept) -> None:
    step(model, optimizer)
    if number == 2:
        kept["average"] = copy.deepcopy(model)
    elif number > 2:
        with torch.no_grad():
            for mean, weight in zip(kept["average"].parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)


def cache_that_is_full_at_last(
    model: nn.Module, optimizer: torch.optim.Optimizer, number: int, kept: Kept
) -> None:
    step(model, optimizer)
    if number < 5:
        kept.setdefault("cache", []).append(batch())


def ring(model: nn.Module, optimizer: torch.optim.Optimizer, _: int, kept: Kept) -> None:
    step(model, optimizer)
    kept["ring"] = [*kept.get("ring", ()), batch()][-3:]


def rising_batches(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, _: Kept) -> None:
    optimizer.zero_grad()
    model(batch(512 * (number + 1))).sum().backward()
    optimizer.step()


def evaluated(model: nn.Module, optimizer: torch.optim.Optimizer, _: int, kept: Kept) -> None:
    step(model, optimizer)
    with torch.no_grad():
        kept["answers"] = model(batch())


def generated(model: nn.Module, optimizer: torch.optim.Optimizer, _: int, kept: Kept) -> None:
    """A cache of keys and values that grows token by token, and begins anew with each sequence."""
    step(model, optimizer)
    with torch.inference_mode():
        kept["cache"] = model(batch(256))
        for _token in range(5):
            kept["cache"] = torch.cat([kept["cache"], model(batch(256))])


STEADY = (
    zeroed_last,
    zeroed_between,
    zeroed_in_place,
    zeroed_never,
    accumulated,
    averaged_weights,
    cache_that_is_full_at_last,
    ring,
    rising_batches,
    evaluated,
    generated,
)


@pytest.mark.parametrize("one", STEADY)
def test_no_leak_is_told_where_there_is_none(one: Step) -> None:
    found, _ = on_card(one)
    assert found.fits
    assert found.grows_by == 0
    assert found.runs_out_at is None


def test_a_cache_of_keys_and_values_is_no_leak() -> None:
    with VirtualGPU("512MiB", context_bytes=0) as gpu, torch.inference_mode():
        model = nn.Linear(WIDTH, WIDTH, device="cuda")
        cache = model(batch())
        for _token in range(8):
            cache = torch.cat([cache, model(batch())])
    assert verdict(gpu.run).grows_by == 0
