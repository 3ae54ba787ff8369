"""Adafactor and SGD in the place of Adam: how they train, their schedule, and the memory that is left."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from tests.techniques.optimizers import held, profile_of, states_held, train, transformer, values, wide
from tests.techniques.toys import all_toys, losses
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics
from vramfit.techniques.lean_optimizer import LeanKind, LeanOptimizer, LeanOptimizerSetting
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.trace import Category
from vramfit.virtual.gpu import VirtualGPU

ADAFACTOR = LeanOptimizerSetting()
SGD = LeanOptimizerSetting(kind=LeanKind.SGD)
ANNEALED = replace(SGD, steps=10, warm_up=2, final=0.1)


def _live(**values: object) -> AttachedProgram:
    model = wide().model()
    return AttachedProgram(model, torch.optim.AdamW(model.parameters(), **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("toy", ["language-untied", "batch-norm", "two-losses", "unet-3d"])
@pytest.mark.parametrize("setting", [ADAFACTOR, SGD], ids=lambda s: s.kind.value)
def test_the_loss_falls_at_least_nearly_as_far_as_with_adamw(toy: str, setting: LeanOptimizerSetting) -> None:
    plain = replace(all_toys()[toy], optimizer=torch.optim.AdamW)
    expected = losses(plain, steps=60)
    found = losses(LeanOptimizer().apply(plain, setting), steps=60)
    assert found[0] == expected[0]
    assert found[-1] < expected[-1] + 0.15 * expected[0]
    assert LeanOptimizer().promise(setting).numerics is Numerics.APPROXIMATE


def test_rates_and_decay_are_carried_over_in_proportion() -> None:
    model = wide().model()
    groups = [{"params": model[0].parameters(), "lr": 2e-3}, {"params": model[2].parameters()}]
    live = AttachedProgram(model, torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1))
    LeanOptimizer().attach(live, replace(SGD, lr=0.2))
    new = live.optimizer
    assert isinstance(new, torch.optim.SGD)
    assert [group["lr"] for group in new.param_groups] == pytest.approx([0.2, 0.1])
    # A step shrinks the parameters by the same part; momentum multiplies what is in the gradient by 10.
    assert [10 * group["lr"] * group["weight_decay"] for group in new.param_groups] == pytest.approx(
        [2e-4, 1e-4]
    )
    live.undo()
    LeanOptimizer().attach(live, ADAFACTOR)
    new = live.optimizer
    assert isinstance(new, torch.optim.Adafactor)
    assert [group["lr"] for group in new.param_groups] == pytest.approx([0.01, 0.005])
    assert [group["lr"] * group["weight_decay"] for group in new.param_groups] == pytest.approx([2e-4, 1e-4])


def _expected_rates(base: float) -> list[float]:
    rise = [base / 2, base]
    fall = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    return [*rise, *(base * factor for factor in fall), 0.1 * base, 0.1 * base]


def test_the_rate_rises_and_follows_a_cosine() -> None:
    live, rates = _live(lr=1e-3), []
    LeanOptimizer().attach(live, ANNEALED)
    assert live.optimizer is not None
    for step in range(12):
        train(live, steps=1, seed=step)
        rates.append(live.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(_expected_rates(0.1))


def test_a_checkpoint_keeps_the_place_in_the_schedule() -> None:
    live, other = _live(lr=1e-3), _live(lr=1e-3)
    for program in (live, other):
        LeanOptimizer().attach(program, ANNEALED)
    assert live.optimizer is not None and other.optimizer is not None
    train(live, steps=5)
    file = io.BytesIO()
    torch.save(live.optimizer.state_dict(), file)
    file.seek(0)
    other.optimizer.load_state_dict(torch.load(file))
    other.model.load_state_dict(live.model.state_dict())
    assert train(live, steps=3, seed=5) == train(other, steps=3, seed=5)
    assert other.optimizer.param_groups[0]["lr"] == pytest.approx(_expected_rates(0.1)[7])


@pytest.mark.parametrize("setting", [ADAFACTOR, ANNEALED], ids=lambda s: s.kind.value)
def test_steps_in_the_backward_pass_are_the_same(setting: LeanOptimizerSetting) -> None:
    plain, ours = _live(), _live()
    LeanOptimizer().attach(plain, setting)
    ours.attach(
        (
            Choice(technique=StepInBackward(), setting=StepInBackwardSetting()),
            Choice(technique=LeanOptimizer(), setting=setting),
        )
    )
    assert train(ours, steps=5) == train(plain, steps=5)
    assert all(map(torch.equal, values(ours.model), values(plain.model)))


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_schedule_from_before_goes_on_at_the_new_rate(in_backward: bool) -> None:
    live = _live(lr=1e-3)
    assert live.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5)
    LeanOptimizer().attach(live, SGD)
    plain = _live(lr=1e-3)
    LeanOptimizer().attach(plain, SGD)
    assert plain.optimizer is not None
    fresh = torch.optim.lr_scheduler.StepLR(plain.optimizer, 1, 0.5)
    if in_backward:
        StepInBackward().attach(live, StepInBackwardSetting())
    for step in range(3):
        assert train(live, steps=1, seed=step) == pytest.approx(train(plain, steps=1, seed=step))
        assert live.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**step)
        schedule.step()
        fresh.step()


def test_the_old_optimizer_is_back_with_its_states_after_the_undo() -> None:
    live = _live()
    train(live, steps=2)
    old = live.optimizer
    assert old is not None
    before = copy.deepcopy(old.state_dict())
    LeanOptimizer().attach(live, ADAFACTOR)
    train(live, steps=2)
    live.undo()
    assert live.optimizer is old
    for index, states in before["state"].items():
        assert all(torch.equal(old.state_dict()["state"][index][name], states[name]) for name in states)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (replace(SGD, momentum=1.0), "the momentum is 1"),
        (replace(SGD, lr=-1.0), "the learning rate is -1"),
        (replace(SGD, steps=5, warm_up=5), "a schedule of 5 steps with 5 of warm-up is not possible"),
    ],
)
def test_impossible_settings_are_refused(setting: LeanOptimizerSetting, message: str) -> None:
    live = _live()
    old = live.optimizer
    with pytest.raises(UsageError, match=message):
        LeanOptimizer().attach(live, setting)
    assert live.optimizer is old


def test_the_same_optimizer_and_a_rate_of_zero_are_refused() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(UsageError, match="the program has SGD already"):
        LeanOptimizer().attach(AttachedProgram(model, torch.optim.SGD(model.parameters())), SGD)
    with pytest.raises(UsageError, match="the learning rate of AdamW is 0"):
        LeanOptimizer().attach(_live(lr=0.0), ADAFACTOR)


def test_options_offer_sgd_where_it_trains_well() -> None:
    def kinds(toy: str) -> list[LeanKind]:
        workload = replace(all_toys()[toy], optimizer=torch.optim.AdamW)
        return [setting.kind for setting in LeanOptimizer().options(profile_of(workload))]

    assert kinds("batch-norm") == [LeanKind.ADAFACTOR, LeanKind.SGD]
    assert kinds("language-tied") == kinds("unet-3d") == [LeanKind.ADAFACTOR]  # no batch norm
    own = replace(profile_of(replace(all_toys()["batch-norm"], optimizer=torch.optim.AdamW)), own_step=True)
    assert [setting.kind for setting in LeanOptimizer().options(own)] == [LeanKind.ADAFACTOR]
    profile = profile_of(all_toys()["batch-norm"])  # with SGD
    assert list(LeanOptimizer().options(profile)) == []


@pytest.mark.parametrize(
    "setting", [ADAFACTOR, SGD, replace(SGD, momentum=0.0)], ids=["adafactor", "sgd", "sgd-0"]
)
def test_bytes_of_the_states(gpu: VirtualGPU, setting: LeanOptimizerSetting) -> None:
    workload = transformer()
    parameters = list(workload.model().parameters())
    if setting.kind is LeanKind.ADAFACTOR:
        sizes = [sum(p.shape) if p.ndim == 2 else p.numel() for p in parameters]
        expected = 4 * sum(sizes)
    else:
        expected = sum(p.nbytes for p in parameters) if setting.momentum else 0
    assert states_held(gpu, LeanOptimizer().apply(workload, setting)) == expected


def test_old_states_leave_the_card_until_the_undo(gpu: VirtualGPU) -> None:
    workload = transformer()
    model = workload.model().cuda()
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    size = sum(parameter.nbytes for parameter in model.parameters())

    def step() -> None:
        assert workload.loss is not None
        live.backward(workload.loss(model, workload.batch(**workload.sizes).cuda()))
        live.step()

    step()
    assert held(gpu, Category.OPTIMIZER_STATE)[0] == 2 * size
    before = torch.cuda.memory_allocated()
    LeanOptimizer().attach(live, SGD)
    assert before - torch.cuda.memory_allocated() >= 2 * size
    step()
    assert held(gpu, Category.OPTIMIZER_STATE)[0] == size
    live.undo()
    assert torch.cuda.memory_allocated() == before
    step()
