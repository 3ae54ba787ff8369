"""What a step moves beside gradients is put back when it is called again, or the step is not called again."""

from __future__ import annotations

import collections
import contextlib
import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.faults import Faults
from tests.runtime.trainings import TRAININGS, Training, run, same
from tests.runtime.trainings_of_optimizers import EightBit, MasterWeights, Orthogonal
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.runtime.survival.slice_copy import SliceCopy
from vramfit.training_state.container_kinds import MAPPING
from vramfit.training_state.reach import reached_from

pytestmark = pytest.mark.filterwarnings("ignore:.*complex.*")


class Failing:
    """Allocations that fail inside of a training's steps, in the way that `run` counts them."""

    def __init__(self, *at: int) -> None:
        self.faults = Faults(*at)

    def counting(self) -> Faults:
        return self.faults


@pytest.mark.parametrize("training", TRAININGS, ids=lambda one: one.name)
def test_a_training_ends_as_without_a_shortage(training: Training) -> None:
    """At two allocations of each; the benchmark takes eighty, inside of kernels too."""
    plain = run(training, survives=False)
    none = Failing()
    assert same(run(training, none), plain) == ""  # without a shortage it is not there
    for part in (0.3, 0.8):
        failing = Failing(int(part * none.faults.seen))
        try:
            left = run(training, failing)
        except torch.OutOfMemoryError as error:
            assert "cannot be called again" in str(error)
            continue
        assert failing.faults.raised == 1
        assert same(left, plain) == "", part


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


class Fast(torch.optim.Optimizer):
    """Attributes, groups' values, a generator of its own; where a product fails, it rounds instead."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weights": [0.0, 0.0]})
        self.seen, self.noise = collections.Counter[str](), torch.Generator().manual_seed(1)
        self.scale = np.ones(2)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.seen["steps"] += 1
        self.scale[0] *= 0.9
        for group in self.param_groups:
            group["k"] += 1
            group["weights"][0] += group["lr"]
            for one in group["params"]:
                try:
                    change = one.grad * float(self.scale[0])
                except (torch.OutOfMemoryError, ValueError):
                    change = one.grad.round()
                one.add_(change + 1e-3 * torch.randn(one.shape, generator=self.noise), alpha=-group["lr"])


@pytest.mark.parametrize("kind", [MasterWeights, EightBit, Orthogonal, Fast], ids=lambda one: one.__name__)
def test_optimizers_of_others_step_once_as_a_whole(kind: Any) -> None:
    def trained(faults: Faults) -> tuple[list[Any], Any]:
        model = _model()
        optimizer = kind(model.parameters(), lr=0.1)
        survivor = vramfit.survive(model, optimizer, loss=_square)
        for number in range(3):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            with faults:
                survivor.step(batch)
        held = [
            value
            for name, value in vars(optimizer).items()
            if name in ("masters", "moments", "counter", "scale")
        ]
        draw = torch.rand((), generator=optimizer.noise) if kind is Fast else None
        return [
            *model.parameters(),
            optimizer.state_dict(),
            held,
            getattr(optimizer, "seen", 0),
            draw,
        ], survivor

    none = Faults()
    plain, survivor = trained(none)
    assert survivor.copying_ratio > 1
    for at in range(0, none.seen, 11):
        faults = Faults(at)
        left, _ = trained(faults)
        assert faults.raised == 1
        assert same(left, plain) == "", at


def test_a_copying_optimizer_is_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    model = _model()
    vramfit.survive(model, MasterWeights(model.parameters(), lr=0.1), loss=_square)
    (record,) = caplog.records
    assert "MasterWeights is not one of torch's optimizers: before each of its steps" in record.getMessage()


def test_an_iterator_in_the_step_is_said_at_once_and_ends_it_at_a_shortage() -> None:
    model = _model()
    batches = iter(torch.ones(9, 4, 6))
    survivor = vramfit.survive(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        loss=lambda net, x: _square(net, x + next(batches)),
    )
    survivor.step(torch.ones(4, 6))
    (event,) = survivor.events
    assert event.kind == "cannot-put-back"
    before = [one.detach().clone() for one in model.parameters()]
    with Faults(4), pytest.raises(torch.OutOfMemoryError, match="cannot be called again: it moves"):
        survivor.step(torch.ones(4, 6))
    assert survivor.events[-1].kind == "refused"
    assert all(map(torch.equal, before, model.parameters()))


class Samples:
    """Gives one number after the other, and can be set back by its state."""

    def __init__(self) -> None:
        self._place = [0]

    def state_dict(self) -> dict[str, int]:
        return {"place": self._place[0]}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place[0] = state["place"]

    def draw(self) -> float:
        self._place[0] += 1
        return float(self._place[0])


Samples.__module__ = "vramfit.samples"  # what is not looked into, as of a library in C


def test_what_is_declared_is_put_back_by_its_state() -> None:
    def trained(faults: Faults) -> tuple[list[Any], int]:
        model, samples = _model(), Samples()
        survivor = vramfit.survive(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            loss=lambda net, x: _square(net, x + samples.draw()),
            state=[samples],
        )
        with faults:
            survivor.step(torch.ones(4, 6))
        return list(model.parameters()), samples.state_dict()["place"]

    assert same(trained(Faults(5)), trained(Faults())) == ""
    with pytest.raises(UsageError, match="an iterator, which cannot be set back"):
        vramfit.survive(_model(), torch.optim.SGD(_model().parameters()), state=[iter([1])])


def test_a_step_takes_what_its_loss_takes_and_gives_what_it_gives() -> None:
    model = _model()
    survivor = vramfit.survive(model, torch.optim.SGD(model.parameters(), lr=0.1))

    @survivor
    def step(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> Any:
        off = (model(x) - y).square().mean() * scale
        return {"loss": off, "largest": off.detach().max(), "name": "off"}

    with Faults(3) as faults:
        found = step(torch.ones(4, 6), torch.zeros(4, 3), scale=2.0)
    assert faults.raised == 1
    assert found["name"] == "off" and not found["loss"].requires_grad
    two = vramfit.survive(
        model, torch.optim.SGD(model.parameters()), loss=lambda net, x, y: ((net(x) - y).mean(), 7)
    )
    assert two.step(torch.ones(4, 6), torch.zeros(4, 3))[1] == 7
    for wrong, line in (
        (lambda _net, _x: 3, "gave int, in which there is no loss"),
        (lambda _net, _x: {}, "gave dict, in which there is no loss"),
    ):
        with pytest.raises(UsageError, match=line):
            vramfit.survive(model, torch.optim.SGD(model.parameters()), loss=wrong).step(torch.ones(1))
    with pytest.raises(UsageError, match="step has no batch"):
        two.step()


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_switched_off_it_is_a_plain_loop(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "environment":
        monkeypatch.setenv("VRAMFIT_SURVIVE", "0")
    model = _model()
    survivor = vramfit.survive(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=_square,
        enabled=False if way == "argument" else None,
    )
    with Faults(2), pytest.raises(torch.OutOfMemoryError):
        survivor.step(torch.ones(4, 6))
    survivor.step(torch.ones(4, 6))
    assert survivor.steps == 1 and not survivor.events
    monkeypatch.setenv("VRAMFIT_SURVIVE", "perhaps")
    with pytest.raises(UsageError, match="VRAMFIT_SURVIVE=perhaps is neither 0 nor 1"):
        vramfit.survive(model, torch.optim.SGD(model.parameters()))


def test_errors_of_the_program_keep_their_frames() -> None:
    model = _model()

    def inner(value: float) -> None:
        raise KeyError(value)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        told = float(x.sum())
        inner(told)
        return _square(net, x)

    with pytest.raises(KeyError) as caught:
        vramfit.survive(model, torch.optim.SGD(model.parameters()), loss=loss).step(torch.ones(4, 6))
    frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)}
    assert frames["loss"].f_locals["told"] == 24.0
    assert frames["inner"].f_locals["value"] == 24.0


def test_schedules_and_optimizers_that_do_not_go_with_it_are_one_line() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="ReduceLROnPlateau steps by a metric"):
        vramfit.survive(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))

    class Closed(torch.optim.SGD):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            closure()

    with pytest.raises(UsageError, match="Closed wants a closure"):
        vramfit.survive(model, Closed(model.parameters()))


def test_the_first_shortage_says_what_the_default_allows() -> None:
    for numerics, said in ((None, True), ("bitwise", False)):
        model = _model()
        survivor = vramfit.survive(
            model, torch.optim.SGD(model.parameters()), loss=_square, numerics=numerics
        )
        with Faults(2, 9):
            survivor.step(torch.ones(4, 6))
        evidence = [event.evidence for event in survivor.events]
        assert ('the default); numerics="rounding" allows pieces' in evidence[0]) is said
        assert not any("the default" in one for one in evidence[1:])


def test_what_functions_name_is_reached() -> None:
    counts, chance, table = {"steps": 0}, random.Random(0), np.zeros(3)
    hidden = torch.zeros(3)

    class Holder:
        __slots__ = ("rate",)

        def __init__(self) -> None:
            self.rate = [hidden]

    holder = Holder()

    def loss(x: torch.Tensor) -> None:
        counts["steps"] += 1
        holder.rate[0].add_(chance.random())
        table[0] += 1

    found = reached_from([loss])
    assert any(one is counts for one in found.of(MAPPING))
    assert any(one is hidden for one in found.tensors)
    assert any(one is table for one in found.arrays)
    assert any(one is chance for one in found.generators)
    assert found.whole


def test_a_frozen_average_of_the_weights_is_put_back_in_the_first_step_too() -> None:
    def trained(faults: Faults) -> list[torch.Tensor]:
        model = nn.ModuleList([_model(), _model().requires_grad_(False)])

        def loss(net: Any, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for slow, fast in zip(net[1].parameters(), net[0].parameters(), strict=True):
                    slow.mul_(0.9).add_(fast, alpha=0.3)
            return (net[0](x) - net[1](x)).square().mean()  # type: ignore[no-any-return]

        survivor = vramfit.survive(model, torch.optim.SGD(model[0].parameters(), lr=0.1), loss=loss)
        batch = torch.ones(4, 6)
        with faults:
            survivor.step(batch)
        return list(model.parameters())

    assert same(trained(Faults(6)), trained(Faults())) == ""


def test_of_a_sparse_gradient_the_rows_that_step_are_copied() -> None:
    table = nn.Embedding(1000, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.tensor([3, 8, 3])).sum().backward()
        optimizer.step()
    before = [table.weight.detach().clone(), optimizer.state[table.weight]["exp_avg"].clone()]
    copy = SliceCopy(optimizer, [table.weight], torch.device("cpu"))
    assert sum(one.values.numel() for one in copy._values) <= 3 * 2 * 4 + 1
    optimizer.step()
    assert not torch.equal(before[0], table.weight)
    copy.restore()
    assert torch.equal(before[0], table.weight)
    assert torch.equal(before[1], optimizer.state[table.weight]["exp_avg"])


def test_copies_of_a_slice_stay_below_the_peak_of_a_card() -> None:
    with vramfit.VirtualGPU("RTX 4090", profile="none"):
        weight = nn.Parameter(torch.zeros(1 << 20, device="cuda"))
        optimizer = torch.optim.Adadelta([weight])
        assert SliceCopy(optimizer, [weight], weight.device)._values[0].values.device.type == "cpu"
        del [torch.empty(3 << 20, device="cuda")][:]
        peak = torch.cuda.max_memory_allocated()
        copy = SliceCopy(optimizer, [weight], weight.device)
        assert copy._values[0].values.device.type == "cuda"
        assert torch.cuda.max_memory_allocated() == peak


def _frozen_for_a_while(critic: nn.Module) -> Any:
    """A critic whose parameters record nothing while the loss is computed."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        penalty = critic(batch[:, :3]).square().mean()
        slopes = torch.autograd.grad(penalty, list(critic.parameters()))
        critic.requires_grad_(False)
        value = critic(model(batch)).square().mean()
        critic.requires_grad_(True)
        return value * (1 + slopes[1].sum().detach().square())

    return loss


def _frozen_layer(_critic: nn.Module) -> Any:
    """A layer of the model itself."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        first = model.get_submodule("0")
        whole = model(batch).mean()
        first.requires_grad_(False)
        value = model(batch).square().mean()
        first.requires_grad_(True)
        return value + whole

    return loss


def _without_recording(critic: nn.Module) -> Any:
    """Autograd switched off and on by calls, not by a block."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        out = model(batch)
        torch.set_grad_enabled(False)
        weight = critic(torch.ones(1, 3)).abs() + 1
        torch.set_grad_enabled(True)
        return (out * weight).square().mean()

    return loss


def _evaluated(critic: nn.Module) -> Any:
    """A module in evaluation."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scale = 2.0 if model.training else 1.0
        model.eval()
        with torch.no_grad():
            target = critic(model(batch))
        model.train()
        return scale * (model(batch).mean() - target.mean()).square()

    return loss


@pytest.mark.parametrize("kind", [_frozen_for_a_while, _frozen_layer, _without_recording, _evaluated])
def test_flags_that_a_loss_changes_for_a_while_are_put_back(kind: Any) -> None:
    """Wherever in the loss memory runs out."""

    def trained(*at: int) -> tuple[Any, Faults]:
        model, batch, faults = _model(), torch.ones(4, 6), Faults(*at)
        critic = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        survivor = vramfit.survive(model, optimizer, loss=kind(critic))
        try:
            for step in range(3):
                with faults if step == 2 else contextlib.nullcontext():
                    survivor.step(batch)
            recording = torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)
        flags = [
            recording,
            model.training,
            *(p.requires_grad for m in (model, critic) for p in m.parameters()),
        ]
        return (flags, [p.detach().clone() for p in model.parameters()]), faults

    (flags, plain), counting = trained()
    for at in range(counting.seen):
        (left, parameters), faults = trained(at)
        assert faults.raised == 1
        assert left == flags, at
        assert all(map(torch.equal, parameters, plain)), at
