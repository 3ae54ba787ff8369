"""Training in bfloat16: rounding, steps in float32, files, and bytes."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.techniques.toys import Language, all_toys, class_loss, classes, language_loss, losses, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Profile, setting_from_plain, setting_to_plain
from vramfit.techniques.low_precision_training import (
    LowPrecisionTraining,
    LowPrecisionTrainingSetting,
    Master,
)
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.techniques.support import float32_steps
from vramfit.techniques.support.float32_steps import join_, round_at_random, split
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Batch, State, Workload

FLOAT32 = LowPrecisionTrainingSetting()
AT_RANDOM = LowPrecisionTrainingSetting(master=Master.STOCHASTIC_ROUNDING, bfloat16_states=True)
NONE = LowPrecisionTrainingSetting(master=Master.NONE)
KEPT = [FLOAT32, replace(FLOAT32, bfloat16_states=True), AT_RANDOM, replace(AT_RANDOM, bfloat16_states=False)]


# -- rounding ----------------------------------------------------------------------------------------------------------


def _float(bits: int) -> torch.Tensor:
    return torch.tensor([bits if bits < 1 << 31 else bits - (1 << 32)], dtype=torch.int32).view(torch.float32)


def _all_kinds() -> torch.Tensor:
    """Random bits, so that all exponents come up, and the corners: ties, zeros, subnormals, infinities, the largest."""
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=torch.Generator().manual_seed(0))
    ties = (bits[:5000] & ~0xFFFF) | 0x8000
    corners = torch.tensor([0, -(1 << 31), 1, -(1 << 31) + 1, 0x7F800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000])
    return torch.cat([bits, ties, corners]).to(torch.int32).view(torch.float32)


def test_two_halves_are_the_whole_bit_for_bit() -> None:
    wide = _all_kinds()
    wide = wide[~wide.isnan()]
    half, lost = split(wide)
    again = join_(half.to(torch.float32), lost)
    assert torch.equal(again.view(torch.int32), wide.view(torch.int32))
    usual = wide.to(torch.bfloat16)
    differs = half.view(torch.int16) != usual.view(torch.int16)
    assert 0 < int(differs.sum()) < 5100  # ties alone
    assert bool((wide.view(torch.int32)[differs] & 0xFFFF == 0x8000).all())


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0x7F800001, 0xFFC08000])
def test_what_is_no_number_stays_none(bits: int) -> None:
    wide = _float(bits)
    half, lost = split(wide)
    assert bool(half.isnan()) and bool(join_(half.to(torch.float32), lost).isnan())
    assert bool(round_at_random(wide.repeat(64)).isnan().all())


def test_remainders_of_weights_that_others_changed_are_rounding_errors() -> None:
    _, lost = split(numbers(50_000))
    zero = join_(torch.zeros(50_000), lost)
    assert bool((zero.abs() < 1e-38).all())
    zero = join_(-torch.zeros(50_000), lost)
    assert bool((zero.abs() < 1e-38).all())
    other = (3 * numbers(50_000) + 1).to(torch.bfloat16).float()
    assert bool(((join_(other.clone(), lost) - other).abs() <= other.abs() / 256).all())


@pytest.mark.parametrize("value", [1.0 + 1 / 1024, -(1.0 + 3 / 512), 3.1415927, -1e-20, 6e37, 1e-40])
def test_rounding_at_random_is_right_on_average(value: float) -> None:
    torch.manual_seed(0)
    wide, count = torch.tensor([value]), 100_000
    found = round_at_random(wide.repeat(count))
    low, high = found.min(), found.max()
    assert abs(int(low.view(torch.int16)) - int(high.view(torch.int16))) == 1  # neighbours
    unit = float(high) - float(low)
    share = (float(wide) - float(low)) / unit
    spread = (share * (1 - share) / count) ** 0.5
    assert abs((found == high).double().mean().item() - share) < 5 * spread


def test_rounding_at_random_leaves_what_bfloat16_has() -> None:
    half = numbers(10_000).to(torch.bfloat16)
    half[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    assert torch.equal(round_at_random(half.float()).view(torch.int16), half.view(torch.int16))


# -- steps -------------------------------------------------------------------------------------------------------------


def _adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam-amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.01),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": _adagrad,
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 3))


def _with_weights_kept_by_hand(make: Callable[..., torch.optim.Optimizer], steps: int) -> list[torch.Tensor]:
    """Float32 weights after some steps of the usual recipe: a second copy that the optimizer updates."""
    model = _mlp()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    model.bfloat16()
    optimizer = make(kept)
    for _ in range(steps):
        for half, wide in zip(model.parameters(), kept, strict=True):
            upper = (wide.view(torch.int32) + 0x8000) >> 16  # to nearest, ties upwards
            half.data.copy_(upper.to(torch.int16).view(torch.bfloat16))
        loss = nn.functional.cross_entropy(model(numbers(4, 16).bfloat16()).float(), classes(3, 4))
        loss.backward()
        for half, wide in zip(model.parameters(), kept, strict=True):
            assert half.grad is not None
            wide.grad = half.grad.float()
            half.grad = None
        optimizer.step()
    return kept


@pytest.mark.parametrize("limit", [float32_steps._SMALLEST_CHUNK, 50])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_float32_weights_are_those_of_the_recipe(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_steps, "_SMALLEST_CHUNK", limit)  # 50 elements cut a weight into pieces
    model = _mlp()
    live = AttachedProgram(model, OPTIMIZERS[name](model.parameters()))
    LowPrecisionTraining().attach(live, FLOAT32)
    for _ in range(4):
        live.backward(class_loss(model, (numbers(4, 16), classes(3, 4))))
        live.step()
    live.undo()
    for ours, theirs in zip(model.parameters(), _with_weights_kept_by_hand(OPTIMIZERS[name], 4), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("limit", [float32_steps._SMALLEST_CHUNK, 50])
@pytest.mark.parametrize("setting", KEPT)
def test_states_have_the_dtype_of_the_setting(
    setting: LowPrecisionTrainingSetting, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_steps, "_SMALLEST_CHUNK", limit)
    model = _mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    live = AttachedProgram(model, optimizer)
    LowPrecisionTraining().attach(live, setting)
    for _ in range(3):
        live.backward(class_loss(model, (numbers(4, 16), classes(3, 4))))
        live.step()
    expected = torch.bfloat16 if setting.bfloat16_states else torch.float32
    for parameter in model.parameters():
        states = optimizer.state[parameter]
        assert states["exp_avg"].dtype is states["exp_avg_sq"].dtype is expected
        assert states["exp_avg"].shape == parameter.shape
        assert float(states["step"]) == 3
    live.undo()
    assert all(states["exp_avg"].dtype is torch.float32 for states in optimizer.state.values())


@cache
def _plain_losses(toy: str) -> list[float]:
    return losses(all_toys()[toy], steps=50)


@pytest.mark.parametrize("setting", [*KEPT, replace(FLOAT32, float32_norms=True)])
@pytest.mark.parametrize("toy", ["language-tied", "batch-norm", "two-losses"])
def test_the_loss_falls_as_in_float32(toy: str, setting: LowPrecisionTrainingSetting) -> None:
    plain, expected = all_toys()[toy], _plain_losses(toy)
    found = losses(LowPrecisionTraining().apply(plain, setting), steps=50)
    fallen = expected[0] - expected[-1]
    assert fallen > 0.1
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.01 * fallen


def _after_tiny_updates(setting: LowPrecisionTrainingSetting) -> torch.Tensor:
    """Weights of 1 after 300 steps of 1e-4, a fortieth of bfloat16's unit below 1."""
    torch.manual_seed(0)
    model = nn.Linear(1000, 1, bias=False)
    nn.init.ones_(model.weight)
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=1e-4))
    LowPrecisionTraining().attach(live, setting)
    for _ in range(300):
        live.backward(model(torch.ones(1, 1000)).sum())
        live.step()
    live.undo()
    return model.weight.detach()


def test_tiny_updates_add_up() -> None:
    assert torch.equal(_after_tiny_updates(NONE), torch.ones(1, 1000))  # all of them are lost
    assert _after_tiny_updates(FLOAT32).sub(0.97).abs().max() < 1e-5
    rounded = _after_tiny_updates(AT_RANDOM)
    # Each of 300 steps rounds with a spread of at most half a unit of 2^-8, over 1000 weights.
    assert rounded.mean().sub(0.97).abs() < 5 * 2**-9 * 300**0.5 / 1000**0.5
    assert rounded.std() > 0


def test_the_step_is_one_for_schedules_hooks_and_closures() -> None:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    live = AttachedProgram(model, optimizer)
    LowPrecisionTraining().attach(live, FLOAT32)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    weight = model[0].weight.float()

    def closure() -> torch.Tensor:
        called.append("closure")
        optimizer.zero_grad()
        loss = class_loss(model, (numbers(4, 16), classes(3, 4)))
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, torch.Tensor) and loss.dtype is torch.float32
    assert called == ["closure", "before", "after"]  # ours is the first of the hooks
    gradient = model[0].weight.grad
    assert gradient is not None and gradient.dtype is torch.bfloat16
    torch.testing.assert_close(weight - model[0].weight.float(), 0.1 * gradient.float(), atol=2e-3, rtol=0)
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


class Counting(torch.optim.SGD):
    """Keeps a number in its groups, as some optimizers do, and is of an unknown kind."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["seen"] = len(group["params"])
        return super().step(closure)


@pytest.mark.parametrize("islands", [(), ("0",)])  # the first group is updated by the rest of the step then
def test_an_unknown_optimizer_sees_all_parameters_at_once_and_keeps_what_it_counts(
    islands: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_steps, "_SMALLEST_CHUNK", 50)
    model = _mlp()
    optimizer = Counting(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.2}], lr=0.1
    )
    live = AttachedProgram(model, optimizer)
    LowPrecisionTraining().attach(live, replace(FLOAT32, islands=islands))
    kept = copy.deepcopy([group["params"] for group in optimizer.param_groups])
    for _ in range(2):
        live.backward(class_loss(model, (numbers(4, 16), classes(3, 4))))
        for group in optimizer.param_groups:
            group["seen"] = 0
        live.step()
    assert [group["count"] for group in optimizer.param_groups] == [2, 2]
    assert [group["seen"] for group in optimizer.param_groups] == [2, 2]
    assert [len(group["params"]) for group in optimizer.param_groups] == [len(group) for group in kept]


def test_steps_in_the_backward_pass_are_the_same() -> None:
    plain = LowPrecisionTraining().apply(all_toys()["language-tied"], FLOAT32)
    assert losses(StepInBackward().apply(plain, StepInBackwardSetting()), steps=3) == losses(plain, steps=3)


class RoundsItself(torch.optim.SGD):
    """Has the switch of torchao's optimizers."""

    bf16_stochastic_round = False


def test_an_optimizer_that_rounds_by_itself_is_told_to() -> None:
    model = _mlp()
    optimizer = RoundsItself(model.parameters(), lr=0.1)
    live = AttachedProgram(model, optimizer)
    LowPrecisionTraining().attach(live, AT_RANDOM)
    assert optimizer.bf16_stochastic_round
    assert not optimizer._optimizer_step_pre_hooks
    live.undo()
    assert not optimizer.bf16_stochastic_round


def test_sparse_gradients_are_taken() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    live = AttachedProgram(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    LowPrecisionTraining().attach(live, FLOAT32)
    before = model.weight.detach().clone()
    live.backward(model(torch.tensor([3])).sum())
    live.step()
    changed = (model.weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [3]


# -- the model ---------------------------------------------------------------------------------------------------------


def test_objects_ties_names_and_frozen_parts_stay() -> None:
    model = Language(dropout=0.0)
    objects, names = [id(p) for p in model.parameters()], list(model.state_dict())
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    LowPrecisionTraining().attach(live, FLOAT32)
    assert [id(p) for p in model.parameters()] == objects
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embed.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.zeros(1, 4, dtype=torch.long)).dtype is torch.float32


@pytest.mark.parametrize("toy", sorted(all_toys()))
def test_undo_gives_the_float32_values_back(toy: str) -> None:
    plain = all_toys()[toy]
    model = plain.model()
    assert plain.optimizer is not None
    live = AttachedProgram(model, plain.optimizer(model.parameters()))
    batch = plain.batch(**plain.sizes)
    assert plain.loss is not None and live.optimizer is not None
    live.backward(plain.loss(model, batch))
    live.step()
    plain.loss(model, batch).backward()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = copy.deepcopy(live.optimizer.state_dict())
    LowPrecisionTraining().attach(live, FLOAT32)
    assert all(p.grad is None or p.grad.dtype is p.dtype is torch.bfloat16 for p in model.parameters())
    live.undo()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, tensor in model.state_dict().items():
        assert tensor.dtype is values[name].dtype
        if name in trained:
            assert torch.equal(tensor, values[name])
        else:
            torch.testing.assert_close(tensor, values[name], rtol=2**-8, atol=0)
    torch.testing.assert_close(live.optimizer.state_dict(), states, rtol=0, atol=0)
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())
    assert type(model).__name__ == type(plain.model()).__name__
    plain.loss(model, batch).backward()


def test_norms_in_float32_are_islands() -> None:
    workload = LowPrecisionTraining().apply(all_toys()["batch-norm"], replace(FLOAT32, float32_norms=True))
    model = workload.start("cpu").model
    seen: list[torch.dtype] = []
    norm, convolution = model.blocks[0][1], model.blocks[0][0]
    norm.register_forward_hook(lambda _m, inputs, output: seen.extend((inputs[0].dtype, output.dtype)))
    model(numbers(2, 3, 8, 8))
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert norm.weight.dtype is norm.running_mean.dtype is torch.float32
    assert convolution.weight.dtype is torch.bfloat16
    model = (
        LowPrecisionTraining().apply(all_toys()["mlp"], replace(FLOAT32, islands=("3",))).start("cpu").model
    )
    inner: list[torch.dtype] = []
    model[3].register_forward_pre_hook(lambda _m, inputs: inner.append(inputs[0].dtype))
    assert model[3].weight.dtype is torch.float32
    assert model(numbers(2, 16)).dtype is torch.float32 and inner == [torch.bfloat16]
    language = Language(dropout=0.0)  # norms inside an island compute with it
    both = replace(FLOAT32, float32_norms=True, islands=("layers.1",))
    LowPrecisionTraining().attach(AttachedProgram(language, None), both)
    language_loss(language, torch.zeros(1, 4, dtype=torch.long)).backward()
    assert language.norm.weight.dtype is language.layers[1].up.weight.dtype is torch.float32


class Scaled(nn.Module):
    """Has a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.linear(x)


@pytest.mark.parametrize("setting", KEPT)
def test_a_scalar_is_a_parameter_too(setting: LowPrecisionTrainingSetting) -> None:
    model = Scaled()
    optimizer = torch.optim.NAdam(model.parameters())  # counts in scalars, the shape of this parameter
    live = AttachedProgram(model, optimizer)
    LowPrecisionTraining().attach(live, setting)
    for _ in range(2):
        live.backward(class_loss(model, (numbers(4, 16), classes(3, 4))))
        live.step()
    assert {value.dtype for value in optimizer.state[model.scale].values()} == {torch.float32}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[model.scale]["mu_product"].dtype is torch.float32
    live.backward(class_loss(model, (numbers(4, 16), classes(3, 4))))
    live.step()
    assert float(optimizer.state[model.linear.weight]["step"]) == 3


class Rotary(nn.Module):
    """Has frequencies as rotary embeddings have, and another buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(4), persistent=False)
        self.register_buffer("table", torch.rand(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        angles = (torch.arange(4) * self.get_buffer("inv_freq")).to(x.dtype)
        return {"y": self.linear(x + angles + self.get_buffer("table")) * scale, "mask": x > 0}


def test_buffers_are_cast_but_for_rotary_frequencies() -> None:
    model = Rotary()
    live = AttachedProgram(model, None)
    LowPrecisionTraining().attach(live, replace(FLOAT32, float32_outputs=False))
    assert model.get_buffer("inv_freq").dtype is torch.float32
    assert model.get_buffer("table").dtype is torch.bfloat16
    output = model(torch.randn(2, 4), scale=torch.ones(4))
    assert output["y"].dtype is torch.bfloat16 and output["mask"].dtype is torch.bool
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 4), scale=torch.ones(4))["y"].dtype is torch.bfloat16
    live.undo()
    assert model.get_buffer("table").dtype is torch.float32 and not live.loss_surroundings


def test_copies_and_files_of_the_model_compute_alike() -> None:
    model, x = _mlp().eval(), numbers(3, 16)
    LowPrecisionTraining().attach(AttachedProgram(model, None), FLOAT32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        expected = model(x)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), expected)
    model.load_state_dict(_mlp().state_dict())  # of float32
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("trained", [0, 2])
@pytest.mark.parametrize("setting", KEPT)
def test_training_goes_on_from_files(setting: LowPrecisionTrainingSetting, trained: int) -> None:
    def start() -> AttachedProgram:
        model = _mlp()
        live = AttachedProgram(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        LowPrecisionTraining().attach(live, setting)
        return live

    def train(live: AttachedProgram, steps: int) -> None:
        for step in range(steps):
            torch.manual_seed(step)
            live.backward(class_loss(live.model, (numbers(4, 16), classes(3, 4))))
            live.step()

    first, second = start(), start()
    assert first.optimizer is not None and second.optimizer is not None
    train(first, trained)
    file = io.BytesIO()
    torch.save((first.model.state_dict(), first.optimizer.state_dict()), file)
    file.seek(0)
    train(second, 1)  # what it has is to go
    model, optimizer = torch.load(file)
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    train(first, 3)
    train(second, 3)
    first.undo()
    second.undo()
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_that_the_program_clamps_stay_clamped() -> None:
    model = nn.Linear(64, 64)
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=1e-6))
    LowPrecisionTraining().attach(live, FLOAT32)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    live.backward(model(torch.ones(1, 64)).sum())
    live.step()
    assert all(parameter.abs().max().float() <= 0.01 * (1 + 2**-7) for parameter in model.parameters())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_be_cast_is_refused_and_left_as_it_was() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="LBFGS computes the loss several times"):
        LowPrecisionTraining().attach(AttachedProgram(model, torch.optim.LBFGS(model.parameters())), FLOAT32)
    tied = Language()
    with pytest.raises(UsageError, match=r"embed\.weight is shared with an island"):
        LowPrecisionTraining().attach(AttachedProgram(tied, None), replace(FLOAT32, islands=("head",)))
    with pytest.raises(UsageError, match="no module 'heads'"):
        LowPrecisionTraining().attach(AttachedProgram(tied, None), replace(FLOAT32, islands=("heads",)))
    assert {p.dtype for p in (*tied.parameters(), *model.parameters())} == {torch.float32}
    with pytest.raises(UsageError, match="no float32 parameter"):
        LowPrecisionTraining().attach(AttachedProgram(nn.Linear(2, 2, dtype=torch.bfloat16), None), FLOAT32)
    plain = replace(all_toys()["mlp"], optimizer=torch.optim.LBFGS)
    with pytest.raises(UsageError, match="LBFGS"):
        LowPrecisionTraining().apply(plain, FLOAT32).start("cpu")


def test_options_follow_the_card_and_the_program() -> None:
    def options(
        model: nn.Module, *, optimizer: bool = True, **other: Any
    ) -> list[LowPrecisionTrainingSetting]:
        known = {"capability": (8, 0), "trains": True, **other}
        adam = torch.optim.AdamW(model.parameters()) if optimizer else None
        profile = Profile(model=model, optimizer=adam, sizes={"batch_size": 1}, **known)
        return list(LowPrecisionTraining().options(profile))

    linear = nn.Linear(2, 2)
    lean = replace(FLOAT32, bfloat16_states=True)
    assert options(linear) == [FLOAT32, lean, AT_RANDOM]
    assert options(linear, device_type="cpu", capability=(0, 0)) == [FLOAT32, lean, AT_RANDOM]
    assert options(linear, trains=False, optimizer=False) == []
    assert options(linear, capability=(7, 5)) == []
    assert options(linear, own_step=True) == []
    assert options(linear, optimizer=False) == []
    assert options(nn.Linear(2, 2, dtype=torch.bfloat16)) == []
    assert all(setting.float32_norms for setting in options(nn.BatchNorm1d(2)))


def test_settings_go_through_plain_values_and_promises_tell_them() -> None:
    plain = {"master": "stochastic-rounding", "bfloat16_states": True}
    assert setting_to_plain(AT_RANDOM) == plain
    assert setting_from_plain(LowPrecisionTraining(), plain) == AT_RANDOM
    notes = [LowPrecisionTraining().promise(setting).note for setting in (FLOAT32, AT_RANDOM, NONE)]
    assert "add up in float32" in notes[0] and "states" not in notes[0]
    assert "rounded at random" in notes[1] and "are lost" in notes[2]
    assert "states are in bfloat16" in notes[1] and "states are in bfloat16" in notes[2]


# -- bytes on the virtual GPU ------------------------------------------------------------------------------------------


def _perceptron(batch_size: int) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    return Workload(
        model=model,
        batch=lambda batch_size: (numbers(batch_size, 256), classes(10, batch_size)),
        sizes={"batch_size": batch_size},
        loss=class_loss,
        optimizer=torch.optim.AdamW,
    )


def _decoder(batch_size: int) -> Workload:
    return Workload(
        model=lambda: Language(layers=3, width=256, words=8000),
        batch=lambda batch_size: torch.zeros(batch_size, 128, dtype=torch.long),
        sizes={"batch_size": batch_size},
        loss=language_loss,
        optimizer=torch.optim.AdamW,
    )


def _by_hand(plain: Workload) -> Workload:
    """The recipe: the model in bfloat16, inputs cast, the loss in float32 by autocast."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain.model().bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", enabled=False):
                return self.inner(x.bfloat16() if x.is_floating_point() else x)  # type: ignore[no-any-return]

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert plain.loss is not None
        with torch.autocast("cuda", torch.bfloat16):
            return plain.loss(model, batch)

    return replace(plain, model=Half, loss=loss)


def _run(workload: Workload, steps: int = 3) -> tuple[tuple[int, int], int, State]:
    """Peaks allocated and reserved over some steps on a fresh card, and what is held after them."""
    gc.collect()
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=256 << 20):
        state = workload.start("cuda")
        for _ in range(steps):
            workload.run_step(state, workload.sizes)
        gc.collect()
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return peaks, torch.cuda.memory_stats()["requested_bytes.all.current"], state


@pytest.mark.parametrize("plain", [_perceptron(8192), _decoder(64)])
def test_without_a_remedy_it_holds_the_bytes_of_the_recipe(plain: Workload) -> None:
    found, held, _ = _run(LowPrecisionTraining().apply(plain, NONE))
    expected, held_by_hand, _ = _run(_by_hand(plain))
    assert found == expected
    assert held == held_by_hand


@pytest.mark.parametrize(
    ("setting", "widths"),
    [(FLOAT32, (2, 2, 4, 4)), (KEPT[1], (2, 2, 2, 2)), (AT_RANDOM, (2, 2, 2)), (NONE, (2, 2, 2))],
)
def test_what_rests_between_steps_is_exact(
    setting: LowPrecisionTrainingSetting, widths: tuple[int, ...]
) -> None:
    _, held, state = _run(LowPrecisionTraining().apply(_decoder(4), setting), steps=2)
    _, plain, _ = _run(_decoder(4), steps=2)

    count = sum(parameter.numel() for parameter in state.model.parameters())
    assert plain - held == count * (12 - sum(widths))


@pytest.mark.parametrize("setting", [FLOAT32, AT_RANDOM])
def test_the_steps_room_is_that_of_a_chunk(
    setting: LowPrecisionTrainingSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beyond(limit: int) -> int:
        monkeypatch.setattr(float32_steps, "_SMALLEST_CHUNK", limit)
        workload = LowPrecisionTraining().apply(_perceptron(1), setting)
        with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=256 << 20):
            state = workload.start("cuda")
            workload.run_step(state, workload.sizes)
            workload.run_step(state, workload.sizes)
            for parameter in state.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            assert state.optimizer is not None
            state.optimizer.step()
            return torch.cuda.max_memory_allocated() - before

    assert beyond(1 << 16) <= 28 << 16
    assert 10 << 20 < beyond(1 << 20) <= 28 << 20


def test_it_takes_fewer_bytes_than_float32_and_runs_recurrent_layers_and_norms() -> None:
    toys = all_toys()
    for name in ("lstm", "batch-norm"):
        large = replace(toys[name], sizes={"batch_size": 128})
        found, _, _ = _run(LowPrecisionTraining().apply(large, replace(FLOAT32, float32_norms=True)), steps=1)
        plain, _, _ = _run(large, steps=1)
        assert found[0] < plain[0]
