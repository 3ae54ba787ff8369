"""The implementation of the optimizer: updates, counters, checkpoints, and temporaries of a step."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from tests.techniques.optimizers import profile_of, rounded, train, transformer, values, wide
from tests.techniques.toys import all_toys
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics
from vramfit.techniques.optimizer_kernel import Implementation, OptimizerKernel, OptimizerKernelSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

pytestmark = pytest.mark.torch_versions

FUSED = OptimizerKernelSetting()
LOOP = OptimizerKernelSetting(implementation=Implementation.LOOP)
FOREACH = OptimizerKernelSetting(implementation=Implementation.FOREACH)

# Those of which loop and foreach give the same bits on the CPU in float32.
BITWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RMSprop", "Rprop", "SGD")
ROUNDING = ("ASGD", "Adafactor", "NAdam", "RAdam")


def _after(workload: Workload, *, steps: int = 4) -> list[torch.Tensor]:
    """The parameters after steps with the same gradients each time.

    True ones would not do for Adam: where a gradient is zero but for rounding it makes whole steps of the rounding.
    """
    state = workload.start("cpu")
    assert state.optimizer is not None
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in state.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        state.optimizer.step()
    return values(state.model)


@pytest.mark.parametrize("setting", [FUSED, LOOP, FOREACH], ids=lambda s: s.implementation.value)
@pytest.mark.parametrize("toy", sorted(all_toys()))
def test_updates_are_the_plain_ones(toy: str, setting: OptimizerKernelSetting) -> None:
    plain = all_toys()[toy]
    for ours, theirs in zip(_after(OptimizerKernel().apply(plain, setting)), _after(plain), strict=True):
        if setting is FUSED:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", [*BITWISE, *ROUNDING])
def test_loop_and_foreach_of_every_optimizer(name: str) -> None:
    plain = replace(wide(), optimizer=getattr(torch.optim, name))
    loop, foreach = (_after(OptimizerKernel().apply(plain, setting)) for setting in (LOOP, FOREACH))
    if name in BITWISE:
        assert all(map(torch.equal, loop, foreach))
    else:
        for one, other in zip(loop, foreach, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert OptimizerKernel().promise(LOOP).numerics is Numerics.ROUNDING


def test_an_optimizer_with_states_goes_on_with_them() -> None:
    model = wide().model()
    optimizer = torch.optim.AdamW(model.parameters())
    live = AttachedProgram(model, optimizer)
    train(live, steps=2)
    plain = AttachedProgram(copy.deepcopy(model), None)
    plain.optimizer = torch.optim.AdamW(plain.model.parameters())
    plain.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    OptimizerKernel().attach(live, FUSED)
    train(live, steps=2, seed=2)
    train(plain, steps=2, seed=2)
    for ours, theirs in zip(values(model), values(plain.model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert all(states["step"] == 4 for states in optimizer.state.values())


def test_the_choice_outlasts_a_loaded_checkpoint_and_ends_with_the_undo() -> None:
    model = wide().model()
    optimizer = torch.optim.AdamW(model.parameters())
    saved = copy.deepcopy(optimizer.state_dict())
    live = AttachedProgram(model, optimizer)
    OptimizerKernel().attach(live, FUSED)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is True
    live.undo()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["fused"] is None
    assert optimizer.param_groups[0]["foreach"] is None
    assert "_step_supports_amp_scaling" not in vars(optimizer)


@pytest.mark.parametrize(
    ("optimizer", "setting", "message"),
    [
        (torch.optim.NAdam, FUSED, "NAdam has no fused implementation"),
        (torch.optim.LBFGS, LOOP, "LBFGS has no foreach implementation"),
        (partial(torch.optim.AdamW, differentiable=True), FUSED, "differentiable=True needs the loop"),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), FOREACH, "needs capturable=True"),
    ],
)
def test_what_is_not_there_is_refused(
    optimizer: type[torch.optim.Optimizer], setting: OptimizerKernelSetting, message: str
) -> None:
    made = optimizer(nn.Linear(3, 3).parameters())
    before = copy.deepcopy(made.state_dict())
    with pytest.raises(UsageError, match=message):
        OptimizerKernel().attach(AttachedProgram(nn.Linear(3, 3), made), setting)
    assert made.state_dict() == before


def test_a_fused_kernel_of_torch_that_is_wrong_is_refused() -> None:
    model = nn.Linear(3, 3).bfloat16()
    with pytest.raises(UsageError, match=r"fused SGD on the CPU is wrong for torch\.bfloat16"):
        OptimizerKernel().attach(AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1)), FUSED)
    OptimizerKernel().attach(AttachedProgram(model, torch.optim.AdamW(model.parameters())), FUSED)


def test_without_an_optimizer_there_is_nothing_to_choose() -> None:
    with pytest.raises(UsageError, match="optimizer-kernel needs an optimizer"):
        OptimizerKernel().attach(AttachedProgram(nn.Linear(3, 3), None), LOOP)


@pytest.mark.parametrize(
    ("optimizer", "device", "expected"),
    [
        (torch.optim.AdamW, "cuda", [Implementation.FUSED, Implementation.LOOP]),
        (torch.optim.AdamW, "cpu", [Implementation.FUSED]),
        (partial(torch.optim.AdamW, fused=True), "cuda", []),
        (torch.optim.NAdam, "cuda", [Implementation.LOOP]),
        (torch.optim.Adafactor, "cuda", []),
        (partial(torch.optim.Adafactor, foreach=True), "cuda", [Implementation.LOOP]),
    ],
)
def test_options_are_those_that_the_optimizer_has(
    optimizer: type[torch.optim.Optimizer], device: str, expected: list[Implementation]
) -> None:
    profile = profile_of(replace(wide(), optimizer=optimizer), device_type=device)
    assert [setting.implementation for setting in OptimizerKernel().options(profile)] == expected


def _temporaries(workload: Workload) -> tuple[int, list[int]]:
    """Bytes that a second step takes beyond what is held before it, and the parameters' sizes."""
    state = workload.start("cuda")
    assert state.optimizer is not None and workload.loss is not None
    for _ in range(2):
        state.optimizer.zero_grad()
        workload.loss(state.model, workload.batch(**workload.sizes).cuda()).backward()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        state.optimizer.step()
        taken = torch.cuda.max_memory_allocated() - before
    return taken, [rounded(parameter.nbytes) for parameter in state.model.parameters()]


@pytest.mark.parametrize("setting", [FOREACH, LOOP, FUSED], ids=lambda s: s.implementation.value)
def test_temporaries_of_a_step(gpu: VirtualGPU, setting: OptimizerKernelSetting) -> None:
    taken, sizes = _temporaries(OptimizerKernel().apply(transformer(), setting))
    # The loop makes two roots for a parameter while that of the one before is still there.
    loop = max(before + 2 * size for before, size in itertools.pairwise([0, *sizes]))
    assert taken == {FOREACH: sum(sizes), LOOP: loop, FUSED: 0}[setting]
