"""Optimizers and models whose tensors are in a store: the same numbers as without it."""

from __future__ import annotations

import contextlib
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.tiers.trouble import CPU, CountedTier
from torch import nn

import vramfit
from vramfit.errors import StoreFull, UsageError
from vramfit.runtime.tiers.memory_tiers import PinnedTier
from vramfit.runtime.tiers.store import Store
from vramfit.runtime.tiers.stored_optimizer import StoredOptimizer

pytestmark = pytest.mark.torch_versions

WIDTH, LAYERS, STEPS = 32, 12, 5
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4

Optimizers = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizers] = {
    "adamw": lambda given: torch.optim.AdamW(given, lr=1e-2),
    "adamw-foreach": lambda given: torch.optim.AdamW(given, lr=1e-2, foreach=True),
    "adamw-fused": lambda given: torch.optim.AdamW(given, lr=1e-2, fused=True),
    "adam-amsgrad": lambda given: torch.optim.Adam(given, lr=1e-2, amsgrad=True),
    "sgd-momentum": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda given: torch.optim.Adafactor(given, lr=1e-2),
    "rmsprop": lambda given: torch.optim.RMSprop(given, lr=1e-2, centered=True, momentum=0.5),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    weights = [one for one in model.parameters() if one.dim() > 1]
    return [
        {"params": weights},
        {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 5e-3},
    ]


def train(
    made: Optimizers,
    hold: Callable[[torch.optim.Optimizer], Any] | None,
    between: Callable[[int, torch.optim.Optimizer], None] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Steps of a small network whose last bias has no gradient, with a schedule that was there before."""
    model = network()
    model[LAYERS - 1].bias.requires_grad_(False)
    optimizer = made(groups(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    held = None if hold is None else hold(optimizer)
    data = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH, generator=data)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if between is not None:
            between(step, optimizer)
    return model, optimizer, held


def assert_same_states(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for number, states in one.items():
        assert list(states) == list(other[number])
        for name, value in states.items():
            assert (
                torch.equal(value, other[number][name])
                if isinstance(value, torch.Tensor)
                else value == other[number][name]
            )


def test_an_optimizer_that_finds_no_room_keeps_its_states() -> None:
    _, optimizer, _ = train(OPTIMIZERS["adamw"], None)
    before = {
        (parameter, name): value.clone()
        for parameter, states in optimizer.state.items()
        for name, value in states.items()
    }
    room = PARAMETERS // 4
    with vramfit.TieredStore(room, device="cpu", pinned=room) as store:
        with pytest.raises(StoreFull, match="no room"):
            store.hold_optimizer(optimizer)
        assert len(store) == 0
    after = {
        (parameter, name): value for parameter, s in optimizer.state.items() for name, value in s.items()
    }
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)


@contextlib.contextmanager
def small_store(capacity: int) -> Iterator[Store]:
    """The device counts by itself what is alive there."""
    with Store([CountedTier(capacity), PinnedTier(1 << 22, pinned=False)], CPU) as store:
        yield store


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_twice_the_budget_train_to_the_same_parameters(name: str) -> None:
    made = OPTIMIZERS[name]
    plain, expected, _ = train(made, None)
    total = sum(
        value.nbytes for states in expected.state.values() for value in states.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )  # fmt: skip
    budget = max(
        total // 2, 5 * WIDTH * WIDTH * 4
    )  # Adafactor's states are rows and columns, all of which fit
    with small_store(budget) as store:
        model, optimizer, held = train(made, lambda one: StoredOptimizer(one, store))
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert_same_states(expected.state_dict()["state"], optimizer.state_dict()["state"])
        if budget < total:
            assert store.traffic.sent_down > LAYERS
            assert store.traffic.awaited > store.traffic.woken  # most come while others step
            assert store.usage()["device"].peak <= budget
            # All of them brought and sent down in each step, but for the first, which makes them.
            assert store.traffic.moved_bytes < 0.75 * total * (2 * STEPS - 1)
        held.undo()
        assert len(store) == 0
        assert_same_states(
            dict(enumerate(expected.state.values())), dict(enumerate(optimizer.state.values()))
        )


def test_it_may_begin_and_end_in_the_middle() -> None:
    made = OPTIMIZERS["adamw"]
    plain, *_ = train(made, None)
    with small_store(PARAMETERS) as store:
        held: list[StoredOptimizer] = []

        def change(step: int, optimizer: torch.optim.Optimizer) -> None:
            if step == 1:
                held.append(StoredOptimizer(optimizer, store))
            if step == 3:
                held[0].undo()

        model, *_ = train(made, None, change)
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_states_are_saved_and_loaded_as_without_it() -> None:
    made = OPTIMIZERS["adamw"]
    plain, expected, _ = train(made, None)

    def reload(step: int, optimizer: torch.optim.Optimizer) -> None:
        saved = optimizer.state_dict()
        for states in optimizer.state.values():
            assert "exp_avg" not in states
        optimizer.load_state_dict(saved)

    with small_store(PARAMETERS) as store:
        model, optimizer, _ = train(made, lambda one: StoredOptimizer(one, store), reload)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)
        assert_same_states(expected.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_step_with_a_closure_and_hooks_calls_them_once() -> None:
    model, calls = network(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        loss: torch.Tensor = model(torch.ones(1, WIDTH)).sum()
        loss.backward()
        return loss

    with vramfit.TieredStore(PARAMETERS // 2, pinned="4MiB", device="cpu") as store:
        store.hold_optimizer(optimizer)
        loss = optimizer.step(closure)
    assert loss is not None
    assert calls == ["closure", "before", "after"]


def test_optimizers_that_look_at_all_parameters_are_refused() -> None:
    with vramfit.TieredStore("1MiB", pinned="1MiB", device="cpu") as store:
        with pytest.raises(UsageError, match="LBFGS may not treat each parameter by itself"):
            store.hold_optimizer(torch.optim.LBFGS(network().parameters()))
        with pytest.raises(UsageError, match="is no optimizer"):
            store.hold_optimizer(network())  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="is no module"):
            store.hold_weights(3)  # type: ignore[arg-type]


def test_weights_come_while_their_module_runs() -> None:
    model = network().eval()
    model.append(model[0])  # a module that is there twice
    x = torch.randn(3, WIDTH)
    before = [one.detach().clone() for one in model.parameters()]
    places = [one.data_ptr() for one in model.parameters()]
    with torch.no_grad(), vramfit.TieredStore(3 * PARAMETERS // LAYERS, pinned="1MiB", device="cpu") as store:
        expected = model(x)
        held = store.hold_weights(model)
        assert sum(one.nbytes for one in model.parameters()) == 0
        for _ in range(4):
            assert torch.equal(model(x), expected)
            assert sum(one.nbytes for one in model.parameters()) == 0
        assert store.usage()["device"].peak <= 3 * PARAMETERS // LAYERS
        assert store.traffic.sent_down <= 2 * LAYERS  # once each: afterwards the copies below are current
        assert store.traffic.spared > 2 * LAYERS
        with torch.enable_grad(), pytest.raises(UsageError, match="gradients are on"):
            model(x)
        with pytest.raises(UsageError, match="not in the model"):
            model.state_dict()
        held.undo()
        assert len(store) == 0
        assert torch.equal(model(x), expected)
    for one, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, value)
    assert len(places) == 2 * LAYERS
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())


def test_weights_that_do_not_fit_stay_in_the_model() -> None:
    model = network()
    before = [one.detach().clone() for one in model.parameters()]
    with vramfit.TieredStore("8KiB", pinned="16KiB", device="cpu") as store, pytest.raises(StoreFull):
        store.hold_weights(model)
    for one, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, value)


def test_the_example_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = Path(__file__).parents[3] / "examples" / "survive" / "states_in_tiers.py"
    monkeypatch.setattr("sys.argv", [str(script), "--steps", "3", "--folder", str(tmp_path)])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:3]] == ["device", "pinned", "file"]
    assert not list(tmp_path.iterdir())
