"""Adam's averages in few bits: how well it trains, what it keeps, and what it takes over."""

from __future__ import annotations

import copy
import io
import itertools
import sys
from dataclasses import replace

import pytest
import torch
from tests.techniques.optimizers import (
    held,
    profile_of,
    states_held,
    train,
    transformer,
    uncompiled,
    values,
    wide,
)
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics, with_choices
from vramfit.techniques.low_bit_optimizer import LowBitOptimizer, LowBitOptimizerSetting, StateBits
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.trace import Category
from vramfit.virtual.gpu import VirtualGPU

EIGHT = LowBitOptimizerSetting()
FP8 = LowBitOptimizerSetting(bits=StateBits.FP8)
FOUR = LowBitOptimizerSetting(bits=StateBits.FOUR)


def _live(kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **values: object) -> AttachedProgram:
    model = wide().model()
    return AttachedProgram(model, kind(model.parameters(), **values))  # type: ignore[call-arg]


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, or of those inside a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.nbytes
    return sum(_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


@pytest.mark.parametrize(
    ("setting", "bound"), [(EIGHT, 0.01), (FP8, 0.1), (FOUR, 0.1)], ids=lambda s: str(getattr(s, "bits", s))
)
def test_the_loss_falls_as_with_adamw(setting: LowBitOptimizerSetting, bound: float) -> None:
    plain, ours = _live(), _live()
    expected = train(plain, steps=50)
    LowBitOptimizer().attach(ours, setting)
    found = train(ours, steps=50)
    distance = max(abs(one - other) for one, other in zip(found, expected, strict=True)) / expected[0]
    assert distance < bound
    assert found[-1] < 0.05 * found[0]
    level = Numerics.PRECISION if setting is EIGHT else Numerics.APPROXIMATE
    assert LowBitOptimizer().promise(setting).numerics is level


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_hyperparameters_and_groups_are_carried_over(kind: type[torch.optim.Adam]) -> None:
    model = wide().model()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    old = kind(groups, lr=0.25, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.125, amsgrad=True)
    live = AttachedProgram(model, old)
    LowBitOptimizer().attach(live, replace(EIGHT, block_size=128))
    new = live.optimizer
    assert new is not None and type(new).__name__ == f"{kind.__name__}8bit"
    assert isinstance(new, torch.optim.Optimizer) and new.block_size == 128  # type: ignore[attr-defined]
    assert [float(group["lr"]) for group in new.param_groups] == [0.5, 0.25]
    for theirs, ours in zip(old.param_groups, new.param_groups, strict=True):
        assert all(one is other for one, other in zip(theirs["params"], ours["params"], strict=True))
        assert {k: ours[k] for k in ("betas", "eps", "weight_decay", "amsgrad")} == {
            "betas": (0.8, 0.9),
            "eps": 1e-6,
            "weight_decay": 0.125,
            "amsgrad": True,
        }


def test_states_are_taken_over_and_wait_for_the_undo() -> None:
    live = _live()
    train(live, steps=5)
    old = live.optimizer
    assert old is not None
    before = copy.deepcopy(old.state_dict())
    weight = live.model[2].weight  # type: ignore[index]
    LowBitOptimizer().attach(live, EIGHT)
    new = live.optimizer
    assert new is not None and new is not old
    assert float(new.state[weight]["step"]) == 5
    largest = float(old.state[weight]["exp_avg"].abs().max())
    taken = new.state[weight]["exp_avg"].dequantize()
    torch.testing.assert_close(taken, old.state[weight]["exp_avg"], atol=0.05 * largest, rtol=0)
    train(live, steps=2, seed=5)
    live.undo()
    assert live.optimizer is old and not new.state
    after = old.state_dict()
    for index, states in before["state"].items():
        assert all(torch.equal(after["state"][index][name], value) for name, value in states.items())
    train(live, steps=1)


def test_a_schedule_from_before_goes_on() -> None:
    live = _live(lr=0.5)
    assert live.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5)
    LowBitOptimizer().attach(live, EIGHT)
    for step, rate in enumerate((0.5, 0.25, 0.125)):
        train(live, steps=1, seed=step)
        assert float(live.optimizer.param_groups[0]["lr"]) == rate
        schedule.step()


def test_a_schedule_from_after_and_a_checkpoint_work() -> None:
    live, other = _live(lr=0.5), _live()
    for program in (live, other):
        LowBitOptimizer().attach(program, EIGHT)
    assert live.optimizer is not None and other.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5)
    train(live, steps=2)
    schedule.step()
    file = io.BytesIO()
    torch.save(live.optimizer.state_dict(), file)
    file.seek(0)
    other.optimizer.load_state_dict(torch.load(file))
    other.model.load_state_dict(live.model.state_dict())
    assert float(other.optimizer.param_groups[0]["lr"]) == 0.25
    assert train(live, steps=2, seed=2) == train(other, steps=2, seed=2)


def test_steps_in_the_backward_pass_are_the_same() -> None:
    plain, ours = _live(), _live()
    LowBitOptimizer().attach(plain, EIGHT)
    ours.attach(
        (
            Choice(technique=StepInBackward(), setting=StepInBackwardSetting()),
            Choice(technique=LowBitOptimizer(), setting=EIGHT),
        )
    )
    assert train(ours, steps=3) == train(plain, steps=3)
    assert all(map(torch.equal, values(ours.model), values(plain.model)))


def test_what_it_cannot_take_over_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(live: AttachedProgram, message: str, setting: LowBitOptimizerSetting = EIGHT) -> None:
        old = live.optimizer
        with pytest.raises(UsageError, match=message):
            LowBitOptimizer().attach(live, setting)
        assert live.optimizer is old

    refused(_live(torch.optim.SGD), "takes the place of Adam or AdamW, and the program has SGD")
    refused(_live(maximize=True), "cannot take over maximize=True of AdamW")
    refused(_live(), "a block of 127 elements is not possible", replace(FOUR, block_size=127))
    refused(AttachedProgram(nn.Linear(3, 3), None), "low-bit-optimizer needs an optimizer")
    hooked = _live()
    assert hooked.optimizer is not None
    hooked.optimizer.register_step_pre_hook(lambda *_: None)
    refused(hooked, "would leave behind the step hooks of AdamW")
    monkeypatch.setitem(sys.modules, "torchao", None)
    refused(_live(), r"needs torchao, which is not installed. pip install vramfit\[torchao\]")


def test_two_optimizers_cannot_have_one_place() -> None:
    names = ("low-bit-optimizer", "optimizer-offload", "lean-optimizer", "gradient-projection")
    from vramfit.techniques import find_technique

    for one, other in itertools.permutations(names, 2):
        first, second = find_technique(one), find_technique(other)
        choices = tuple(Choice(technique=t, setting=t.setting_type()) for t in (first, second))
        with pytest.raises(UsageError, match="cannot be combined with"):
            with_choices(wide(), choices)


def test_options_depend_on_the_card_and_the_optimizer() -> None:
    def bits(**changed: object) -> list[StateBits]:
        return [s.bits for s in LowBitOptimizer().options(replace(profile, **changed))]  # type: ignore[arg-type]

    profile = profile_of(wide(), capability=(8, 9))
    assert bits() == [StateBits.EIGHT, StateBits.FP8, StateBits.FOUR]
    assert bits(capability=(8, 6)) == [StateBits.EIGHT, StateBits.FOUR]
    assert bits(optimizer=torch.optim.SGD(profile.model.parameters())) == []
    small = nn.Linear(3, 3)
    assert bits(model=small, optimizer=torch.optim.AdamW(small.parameters())) == []


@pytest.mark.parametrize("setting", [EIGHT, FP8, FOUR], ids=lambda s: s.bits.value)
def test_states_have_the_bytes_that_torchao_has_on_the_cpu(
    gpu: VirtualGPU, setting: LowBitOptimizerSetting
) -> None:
    with uncompiled():
        workload = LowBitOptimizer().apply(transformer(layers=1), setting)
        found = states_held(gpu, workload)
        state = workload.start("cpu")
        workload.run_step(state, workload.sizes)
    assert state.optimizer is not None
    expected = sum(
        _bytes(value)
        for states in state.optimizer.state.values()
        for name, value in states.items()
        if name != "step"  # it stays on the host
    )
    assert found == expected
    sizes = [parameter.numel() for parameter in state.model.parameters()]
    large = sum(size for size in sizes if size >= 4096)
    plain = 8 * sum(sizes)
    assert expected < plain - (5.5 if setting is not FOUR else 6.5) * large


def test_it_compiles_on_the_virtual_gpu(gpu: VirtualGPU) -> None:
    model = nn.Linear(128, 128, bias=False).cuda()
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    LowBitOptimizer().attach(live, EIGHT)
    live.backward(model(torch.ones(1, 128, device="cuda")).sum())
    live.step()
    # Codes, a scale for each block of 256, the table of 256 values.
    assert held(gpu, Category.OPTIMIZER_STATE)[0] == 2 * (128 * 128 + 4 * 64 + 1024)
    assert {warning.code for warning in gpu.run.warnings} <= {"compiled-estimate"}


def test_float8_needs_a_card_that_has_it() -> None:
    with VirtualGPU("RTX 3090", alloc_conf=""):
        model = wide().model().cuda()
        live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(UsageError, match=r"compute capability 8\.9, and the card has 8\.6"):
            LowBitOptimizer().attach(live, FP8)
