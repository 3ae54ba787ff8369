"""Adam in a subspace of the gradients: against the formula, how it trains, and what it keeps."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from tests.techniques.optimizers import profile_of, states_held, train, transformer, values, wide
from tests.techniques.toys import all_toys, losses
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics
from vramfit.techniques.gradient_projection import (
    GradientProjection,
    GradientProjectionSetting,
    ProjectedAdam,
)
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.virtual.gpu import VirtualGPU

SMALL = GradientProjectionSetting(rank=16, update_interval=10, scale=1.0)


def _live(kind: type[torch.optim.Adam] = torch.optim.AdamW, **values: object) -> AttachedProgram:
    model = wide().model()
    return AttachedProgram(model, kind(model.parameters(), **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_a_projected_update_is_that_of_the_paper(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    expected = weight.detach().clone()
    groups = [{"params": [weight], "each_projected": [True]}]
    optimizer = ProjectedAdam(groups, lr=0.1, weight_decay=0.5, rank=3, update_interval=2, scale=0.25)
    first = second = torch.zeros(())
    for step in range(1, 5):
        gradient = torch.randn(shape, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        if step % 2:
            u, _, v = torch.linalg.svd(gradient.float(), full_matrices=False)
            left = shape[0] <= shape[1]
            mine = (u[:, :3] if left else v[:3].T).double()
            # Any basis of the subspace would do for one step; take that which the optimizer has, sign and order.
            basis = optimizer.state[weight]["basis"]
            torch.testing.assert_close(mine @ mine.T, basis @ basis.T, atol=1e-4, rtol=0)
        low = basis.T @ gradient if left else gradient @ basis
        first = 0.9 * first + 0.1 * low
        second = 0.999 * second + 0.001 * low**2
        direction = (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        expected = expected * (1 - 0.1 * 0.5)
        expected = expected - 0.1 * 0.25 * (basis @ direction if left else direction @ basis.T)
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_what_is_not_projected_is_updated_as_before(kind: type[torch.optim.Adam]) -> None:
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(30))
    theirs = nn.Parameter(ours.detach().clone())
    plain = kind([theirs], lr=0.1, weight_decay=0.5)
    decoupled = plain.param_groups[0]["decoupled_weight_decay"]
    optimizer = ProjectedAdam([ours], lr=0.1, weight_decay=0.5, decoupled_weight_decay=decoupled)
    for _ in range(5):
        ours.grad = torch.randn(30)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("toy", ["language-untied", "two-losses"])
def test_the_loss_falls_nearly_as_far_as_with_adamw(toy: str) -> None:
    plain = all_toys()[toy]
    expected = losses(plain, steps=100)
    found = losses(GradientProjection().apply(plain, SMALL), steps=100)
    assert found[0] == expected[0]
    assert found[-1] < expected[-1] + 0.25 * expected[0]
    assert GradientProjection().promise(SMALL).numerics is Numerics.APPROXIMATE


def test_embeddings_and_what_is_no_large_matrix_are_left_alone() -> None:
    model = all_toys()["language-tied"].model()
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    GradientProjection().attach(live, SMALL)
    assert live.optimizer is not None
    names = [name for name, _ in model.named_parameters()]
    marks = live.optimizer.param_groups[0]["each_projected"]
    projected = {name for name, mark in zip(names, marks, strict=True) if mark}
    assert projected == {f"layers.{n}.{m}.weight" for n in range(3) for m in ("qkv", "proj", "up", "down")}


def test_states_of_the_rest_are_taken_over_and_the_undo_gives_all_back() -> None:
    live = _live()
    train(live, steps=3)
    old = live.optimizer
    assert old is not None
    before = copy.deepcopy(old.state_dict())
    GradientProjection().attach(live, SMALL)
    new = live.optimizer
    assert isinstance(new, ProjectedAdam)
    bias, weight = live.model[2].bias, live.model[2].weight  # type: ignore[index]
    assert new.state[bias]["step"] == 3
    assert torch.equal(new.state[bias]["exp_avg"], old.state[bias]["exp_avg"])
    assert weight not in new.state
    train(live, steps=2)
    live.undo()
    assert live.optimizer is old
    for index, states in before["state"].items():
        assert all(torch.equal(old.state_dict()["state"][index][name], states[name]) for name in states)


def test_checkpoints_and_schedules_work() -> None:
    live, other = _live(lr=0.01), _live(lr=0.5)
    for program in (live, other):
        GradientProjection().attach(program, SMALL)
    assert live.optimizer is not None and other.optimizer is not None
    schedule = torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5)
    train(live, steps=3)
    schedule.step()
    file = io.BytesIO()
    torch.save(live.optimizer.state_dict(), file)
    file.seek(0)
    other.optimizer.load_state_dict(torch.load(file))
    other.model.load_state_dict(live.model.state_dict())
    assert other.optimizer.param_groups[0]["lr"] == 0.005
    assert train(live, steps=2, seed=3) == train(other, steps=2, seed=3)


def test_steps_in_the_backward_pass_are_the_same() -> None:
    plain, ours = _live(), _live()
    GradientProjection().attach(plain, SMALL)
    ours.attach(
        (
            Choice(technique=StepInBackward(), setting=StepInBackwardSetting()),
            Choice(technique=GradientProjection(), setting=SMALL),
        )
    )
    assert train(ours, steps=3) == train(plain, steps=3)
    assert all(map(torch.equal, values(ours.model), values(plain.model)))


@pytest.mark.parametrize(
    ("setting", "values", "message"),
    [
        (replace(SMALL, rank=0), {}, "a projection of rank 0"),
        (replace(SMALL, rank=128), {}, "no matrix of the model has a shorter side above the rank of 128"),
        (SMALL, {"amsgrad": True}, "cannot take over amsgrad=True"),
    ],
)
def test_what_cannot_be_projected_is_refused(
    setting: GradientProjectionSetting, values: dict[str, bool], message: str
) -> None:
    live = _live(**values)
    old = live.optimizer
    with pytest.raises(UsageError, match=message):
        GradientProjection().attach(live, setting)
    assert live.optimizer is old


def test_options_are_parts_of_the_usual_side() -> None:
    assert [s.rank for s in GradientProjection().options(profile_of(transformer()))] == [32, 16]
    assert list(GradientProjection().options(profile_of(all_toys()["lstm"]))) == []
    profile = profile_of(replace(wide(), optimizer=torch.optim.SGD))
    assert list(GradientProjection().options(profile)) == []


def test_bytes_of_the_states(gpu: VirtualGPU) -> None:
    workload = transformer()
    model, rank = workload.model(), SMALL.rank
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    expected = 0
    for parameter in model.parameters():
        if parameter.ndim == 2 and id(parameter) not in tables:
            short, long = sorted(parameter.shape)
            expected += 4 * (short * rank + 2 * rank * long)
        else:
            expected += 2 * parameter.nbytes
    assert states_held(gpu, GradientProjection().apply(workload, SMALL)) == expected
