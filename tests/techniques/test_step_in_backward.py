"""Steps inside the backward pass: the same updates, and never more than one gradient."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.techniques.optimizers import held, profile_of, train, transformer, values, wide
from tests.techniques.toys import all_toys, gradients
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, with_choices
from vramfit.techniques.optimizer_kernel import OptimizerKernel, OptimizerKernelSetting
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.trace import Category
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

PLAIN = StepInBackwardSetting()
OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)


def _live(workload: Workload | None = None) -> tuple[AttachedProgram, AttachedProgram]:
    """The same program twice: with the steps in the backward pass, and plain."""
    workload = workload or wide()
    assert workload.optimizer is not None
    both = []
    for _ in range(2):
        model = workload.model()
        both.append(AttachedProgram(model, workload.optimizer(model.parameters())))
    StepInBackward().attach(both[0], PLAIN)
    return both[0], both[1]


@pytest.mark.parametrize("toy", sorted(all_toys()))
def test_gradients_of_later_steps_are_the_plain_ones(toy: str) -> None:
    plain = all_toys()[toy]
    expected = gradients(plain, steps=3)
    found = gradients(StepInBackward().apply(plain, PLAIN), steps=3)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_makes_the_same_updates(name: str) -> None:
    ours, plain = _live(replace(wide(), optimizer=partial(getattr(torch.optim, name), foreach=False)))
    assert train(ours, steps=4) == train(plain, steps=4)
    assert all(map(torch.equal, values(ours.model), values(plain.model)))
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_groups_keep_their_own_values_and_schedules_act_at_once() -> None:
    def two_groups(parameters: object) -> torch.optim.Optimizer:
        first, *others = parameters  # type: ignore[misc]
        return torch.optim.AdamW([{"params": [first], "weight_decay": 0.5}, {"params": others}], lr=0.01)

    both = _live(replace(wide(), optimizer=two_groups))
    schedules = [torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5) for live in both]  # type: ignore[arg-type]
    for step in range(3):
        for live, schedule in zip(both, schedules, strict=True):
            train(live, steps=1, seed=step)
            schedule.step()
    assert all(map(torch.equal, values(both[0].model), values(both[1].model)))


def test_checkpoints_of_the_optimizer_fit_both_ways() -> None:
    ours, plain = _live()
    train(ours, steps=2)
    train(plain, steps=2)
    assert ours.optimizer is not None and plain.optimizer is not None
    file = io.BytesIO()
    torch.save(ours.optimizer.state_dict(), file)
    file.seek(0)
    plain.optimizer.load_state_dict(torch.load(file))
    ours.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    train(ours, steps=2)
    train(plain, steps=2)
    assert all(map(torch.equal, values(ours.model), values(plain.model)))


def test_copies_and_saved_models_have_no_steps_in_them() -> None:
    ours, _ = _live()
    twin = copy.deepcopy(ours.model)
    file = io.BytesIO()
    torch.save(ours.model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        before = values(other)
        other(torch.ones(2, 16)).sum().backward()
        assert all(map(torch.equal, values(other), before))
        assert all(parameter.grad is not None for parameter in other.parameters())


def test_what_is_unfrozen_later_steps_at_the_end() -> None:
    plain = all_toys()["frozen-trunk"]
    model = plain.model()
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    StepInBackward().attach(live, PLAIN)
    frozen = model.trunk[0].weight
    frozen.requires_grad_(True)
    before = frozen.detach().clone()
    assert plain.loss is not None
    live.backward(plain.loss(model, plain.batch(**plain.sizes)))
    assert frozen.grad is not None
    live.step()
    assert not torch.equal(frozen, before)


def test_a_loop_that_calls_the_optimizer_itself_steps_once() -> None:
    ours, plain = _live()
    assert plain.optimizer is not None and ours.optimizer is not None
    for live in (ours, plain):
        for _ in range(2):
            live.model(torch.ones(2, 16)).sum().backward()
            live.optimizer.step()  # type: ignore[union-attr]
            live.optimizer.zero_grad()  # type: ignore[union-attr]
    assert all(map(torch.equal, values(ours.model), values(plain.model)))


def test_a_second_gradient_in_one_step_is_refused() -> None:
    ours, _ = _live()
    ours.backward(ours.model(torch.ones(2, 16)).sum())
    with pytest.raises(UsageError, match="got a second gradient in one step"):
        ours.backward(ours.model(torch.ones(2, 16)).sum())


def test_gradients_cannot_be_clipped() -> None:
    ours, _ = _live()
    ours.backward(ours.model(torch.ones(2, 16)).sum())
    with pytest.raises(UsageError, match="cannot be clipped together"):
        ours.step(clip_norm=1.0)


def test_loss_scaling_is_refused_whenever_it_comes() -> None:
    plain = wide()
    model = plain.model()
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    live.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match="cannot go with loss scaling"):
        StepInBackward().attach(live, PLAIN)
    assert not live.steps_in_backward
    ours, _ = _live()
    ours.scaler = torch.amp.GradScaler("cpu")
    before = values(ours.model)
    with pytest.raises(UsageError, match="cannot go with loss scaling"):
        ours.backward(ours.model(torch.ones(2, 16)).sum())
    assert all(map(torch.equal, values(ours.model), before))


class Coupled(torch.optim.SGD):
    """Of a kind that nobody knows here."""


def test_an_unknown_optimizer_needs_a_word() -> None:
    model = wide().model()
    live = AttachedProgram(model, Coupled(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="Coupled is not known to treat each parameter on its own"):
        StepInBackward().attach(live, PLAIN)
    StepInBackward().attach(live, StepInBackwardSetting(separable=True))
    train(live, steps=1)
    with pytest.raises(UsageError, match="LBFGS is not known"):
        StepInBackward().attach(AttachedProgram(model, torch.optim.LBFGS(model.parameters())), PLAIN)


def test_gradients_that_other_processes_add_to_are_waited_for() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
        live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
        with pytest.raises(UsageError, match="cannot wait for the gradients of other processes"):
            StepInBackward().attach(live, PLAIN)
    finally:
        torch.distributed.destroy_process_group()


def test_after_the_undo_gradients_stay_until_the_step() -> None:
    ours, plain = _live()
    train(ours, steps=1)
    ours.undo()
    assert not ours.steps_in_backward
    ours.backward(ours.model(torch.ones(2, 16)).sum())
    assert all(parameter.grad is not None for parameter in ours.model.parameters())
    ours.model.zero_grad()
    train(plain, steps=1)
    train(ours, steps=2, seed=1)
    train(plain, steps=2, seed=1)
    assert all(map(torch.equal, values(ours.model), values(plain.model)))


def test_nothing_holds_a_program_that_is_over() -> None:
    model = wide().model()
    live = AttachedProgram(model, torch.optim.AdamW(model.parameters()))
    StepInBackward().attach(live, PLAIN)
    train(live, steps=1)
    gone = weakref.ref(model[2].weight)  # type: ignore[index]
    del model, live
    gc.collect()
    assert gone() is None


def test_options_are_for_plain_steps_of_optimizers_that_are_known() -> None:
    profile = profile_of(wide())
    assert list(StepInBackward().options(profile)) == [PLAIN]
    assert list(StepInBackward().options(replace(profile, own_step=True))) == []
    other = replace(profile, optimizer=torch.optim.LBFGS(profile.model.parameters()))
    assert list(StepInBackward().options(other)) == []


@pytest.mark.parametrize("fused", [False, True])
def test_only_the_gradients_of_one_layer_are_there_at_a_time(gpu: VirtualGPU, fused: bool) -> None:
    workload = StepInBackward().apply(transformer(), PLAIN)
    if fused:
        workload = with_choices(
            workload, (Choice(technique=OptimizerKernel(), setting=OptimizerKernelSetting()),)
        )
    state = workload.start("cuda")
    sizes = [parameter.nbytes for parameter in state.model.parameters()]
    for _ in range(2):
        workload.run_step(state, workload.sizes)
    layers = [module for module in state.model.modules() if isinstance(module, nn.Linear)]
    largest = max(sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers)
    assert held(gpu, Category.GRADIENTS) == (0, largest)
    counters = 4 * len(sizes) if fused else 0
    assert held(gpu, Category.OPTIMIZER_STATE)[0] == 2 * sum(sizes) + counters


def test_plain_steps_hold_all_gradients(gpu: VirtualGPU) -> None:
    state = (workload := transformer()).start("cuda")
    workload.run_step(state, workload.sizes)
    assert held(gpu, Category.GRADIENTS) == (0, sum(p.nbytes for p in state.model.parameters()))
