"""The optimizer on the host: values (small tensors of the virtual GPU have true ones), memory, checkpoints and undo."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from dataclasses import replace

import pytest
import torch
from tests.techniques.optimizers import held, profile_of, rounded, transformer, values, wide
from tests.techniques.toys import classes, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Piece, live_of
from vramfit.techniques.low_precision_training import LowPrecisionTraining, LowPrecisionTrainingSetting
from vramfit.techniques.optimizer_offload import HostOptimizer, OptimizerOffload, OptimizerOffloadSetting
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.trace import Category
from vramfit.virtual.gpu import VirtualGPU

# The middle matrix is offloaded, the rest small enough to stay; in the second case all but a bias goes.
SOME = OptimizerOffloadSetting(minimal_size=500)
MOST = OptimizerOffloadSetting(minimal_size=10, offload_gradients=True)
EACH = pytest.mark.parametrize("setting", [SOME, MOST], ids=["some", "most"])


def _model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)).to(
        device
    )


def _live(
    device: str, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **values: object
) -> AttachedProgram:
    model = _model(device)
    return AttachedProgram(model, kind(model.parameters(), **{"lr": 0.01, **values}))  # type: ignore[call-arg]


def _train(live: AttachedProgram, *, steps: int, clip_norm: float | None = None, seed: int = 0) -> None:
    for step in range(seed, seed + steps):
        x = (numbers(4, 16) + step).to(live.device)
        loss = nn.functional.cross_entropy(live.model(x), classes(3, 4).to(live.device))
        live.backward(loss)
        live.step(clip_norm=clip_norm)


def _assert_same(ours: AttachedProgram, plain: AttachedProgram) -> None:
    for one, other in zip(values(ours.model), values(plain.model), strict=True):
        torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-5, atol=1e-6)


@EACH
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop"])
def test_updates_are_the_plain_ones(gpu: VirtualGPU, setting: OptimizerOffloadSetting, name: str) -> None:
    kind = getattr(torch.optim, name)
    extra = {"weight_decay": 0.1} | ({"momentum": 0.9} if name == "SGD" else {})
    plain, ours = _live("cpu", kind, **extra), _live("cuda", kind, **extra)
    OptimizerOffload().attach(ours, setting)
    for live in (plain, ours):
        _train(live, steps=4)
    _assert_same(ours, plain)
    assert gpu.run.warnings == ()


@EACH
def test_gradients_are_clipped_together(gpu: VirtualGPU, setting: OptimizerOffloadSetting) -> None:
    plain, ours = _live("cpu", torch.optim.SGD), _live("cuda", torch.optim.SGD)
    OptimizerOffload().attach(ours, setting)
    for live in (plain, ours):
        _train(live, steps=3, clip_norm=0.01)
    _assert_same(ours, plain)


def test_below_a_programs_own_loop_gradients_are_those_that_the_loop_leaves(gpu: VirtualGPU) -> None:
    plain, ours = _live("cpu", torch.optim.SGD), _live("cuda", torch.optim.SGD)
    ours.own_loop = True
    OptimizerOffload().attach(ours, SOME)
    for live in (plain, ours):
        for step in range(4):
            x = (numbers(4, 16) + step).to(live.device)
            nn.functional.cross_entropy(live.model(x), classes(3, 4).to(live.device)).backward()
            nn.utils.clip_grad_norm_(live.model.parameters(), 0.01)
            assert live.optimizer is not None
            if step == 1:  # a step that is left out leaves nothing behind
                live.model[2].weight.grad = None
            if step != 2:
                live.optimizer.step()
            live.optimizer.zero_grad()
    _assert_same(ours, plain)


@EACH
def test_groups_and_schedules_act(gpu: VirtualGPU, setting: OptimizerOffloadSetting) -> None:
    def made(device: str) -> AttachedProgram:
        model = _model(device)
        groups = [{"params": model[0].parameters(), "weight_decay": 0.5}, {"params": model[2].parameters()}]
        return AttachedProgram(model, torch.optim.AdamW(groups, lr=0.05))

    plain, ours = made("cpu"), made("cuda")
    OptimizerOffload().attach(ours, setting)
    assert ours.optimizer is not None and plain.optimizer is not None
    assert isinstance(ours.optimizer, torch.optim.Optimizer)
    assert [len(group["params"]) for group in ours.optimizer.param_groups] == [2, 2]
    schedules = [torch.optim.lr_scheduler.StepLR(live.optimizer, 1, 0.5) for live in (plain, ours)]  # type: ignore[arg-type]
    for step in range(3):
        for live, schedule in zip((plain, ours), schedules, strict=True):
            _train(live, steps=1, seed=step)
            schedule.step()
    _assert_same(ours, plain)


@EACH
def test_states_move_over_and_come_back(gpu: VirtualGPU, setting: OptimizerOffloadSetting) -> None:
    plain, ours = _live("cpu"), _live("cuda")
    for live in (plain, ours):
        _train(live, steps=2)
    old = ours.optimizer
    assert old is not None
    OptimizerOffload().attach(ours, setting)
    weight = ours.model[2].weight  # type: ignore[index]
    assert isinstance(ours.optimizer, HostOptimizer) and not old.state
    assert ours.optimizer.state[weight]["exp_avg"].device.type == "cpu"
    for live in (plain, ours):
        _train(live, steps=2, seed=2)
    ours.undo()
    assert ours.optimizer is old
    assert old.state[weight]["exp_avg"].is_cuda and float(old.state[weight]["step"]) == 4
    for live in (plain, ours):
        _train(live, steps=2, seed=4)
    _assert_same(ours, plain)


@EACH
def test_checkpoints_fit_the_optimizer_before(gpu: VirtualGPU, setting: OptimizerOffloadSetting) -> None:
    plain, ours = _live("cpu"), _live("cuda")
    OptimizerOffload().attach(ours, setting)
    _train(plain, steps=3)
    assert plain.optimizer is not None and ours.optimizer is not None
    file = io.BytesIO()
    torch.save(plain.optimizer.state_dict(), file)
    file.seek(0)
    ours.optimizer.load_state_dict(torch.load(file))
    ours.model.load_state_dict(plain.model.state_dict())
    for live in (plain, ours):
        _train(live, steps=2, seed=3)
    _assert_same(ours, plain)
    back = copy.deepcopy(ours.optimizer.state_dict())
    assert back.keys() == plain.optimizer.state_dict().keys()
    for index, states in plain.optimizer.state_dict()["state"].items():
        for name, value in states.items():
            torch.testing.assert_close(back["state"][index][name].cpu(), value, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="other parameter groups"):
        ours.optimizer.load_state_dict(torch.optim.SGD(nn.Linear(3, 3).parameters()).state_dict())


def test_what_is_loaded_into_the_model_is_not_overwritten(gpu: VirtualGPU) -> None:
    ours = _live("cuda", torch.optim.SGD)
    OptimizerOffload().attach(ours, SOME)
    _train(ours, steps=2)
    ours.model.load_state_dict(_model("cpu").state_dict())
    plain = _live("cpu", torch.optim.SGD)
    for live in (plain, ours):
        _train(live, steps=2)
    _assert_same(ours, plain)


def test_after_the_undo_no_hook_is_left(gpu: VirtualGPU) -> None:
    ours = _live("cuda")
    OptimizerOffload().attach(ours, MOST)
    _train(ours, steps=1)
    ours.undo()
    assert ours.clip is None and ours.before_step == []
    ours.backward(ours.model(torch.ones(1, 16, device="cuda")).sum())
    assert all(parameter.grad is not None for parameter in ours.model.parameters())


def test_nothing_holds_a_program_that_is_over(gpu: VirtualGPU) -> None:
    ours = _live("cuda")
    OptimizerOffload().attach(ours, MOST)
    _train(ours, steps=1)
    gone = weakref.ref(ours.model[2].weight)  # type: ignore[index]
    del ours
    gc.collect()
    assert gone() is None


def test_what_would_go_wrong_is_refused(gpu: VirtualGPU) -> None:
    torn = _live("cuda")
    torn.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="on one CUDA device, and parameters are on cpu and cuda"):
        OptimizerOffload().attach(torn, SOME)
    model = _model("cuda")
    with pytest.raises(UsageError, match="LBFGS cannot be offloaded"):
        OptimizerOffload().attach(AttachedProgram(model, torch.optim.LBFGS(model.parameters())), SOME)
    ours = _live("cuda")
    OptimizerOffload().attach(ours, MOST)
    ours.backward(ours.model(torch.ones(1, 16, device="cuda")).sum())
    ours.splitter = lambda batch: (Piece(batch=batch, weight=1.0, last=True),)
    with pytest.raises(UsageError, match="cannot accumulate over micro-batches"):
        ours.step()
    ours.splitter, ours.scaler = None, torch.amp.GradScaler("cuda")
    ours.backward(ours.model(torch.ones(1, 16, device="cuda")).sum())
    with pytest.raises(UsageError, match="cannot go with loss scaling"):
        ours.step()
    ours.scaler = None
    with pytest.raises(UsageError, match="HostOptimizer is not known to treat each parameter on its own"):
        StepInBackward().attach(ours, StepInBackwardSetting())
    assert isinstance(ours.optimizer, HostOptimizer)
    with pytest.raises(ValueError, match="cannot be added to an offloaded optimizer"):
        ours.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_on_the_cpu_it_is_the_kernel_that_steps_there() -> None:
    plain, ours = _live("cpu"), _live("cpu")
    OptimizerOffload().attach(ours, MOST)
    assert ours.optimizer is not None and ours.optimizer.param_groups[0]["fused"]
    for live in (plain, ours):
        _train(live, steps=4)
    _assert_same(ours, plain)
    ours.undo()
    assert not ours.optimizer.param_groups[0]["fused"]


def test_options_need_states_a_card_and_host_memory() -> None:
    profile = profile_of(wide())
    both = [OptimizerOffloadSetting(), OptimizerOffloadSetting(offload_gradients=True)]
    assert list(OptimizerOffload().options(profile)) == both
    assert list(OptimizerOffload().options(replace(profile, own_step=True))) == both[:1]
    assert list(OptimizerOffload().options(replace(profile, device_type="cpu"))) == []
    needed = 4 * 4 * 128 * 128
    assert list(OptimizerOffload().options(replace(profile, host_bytes=needed))) == both
    assert list(OptimizerOffload().options(replace(profile, host_bytes=needed - 1))) == []
    odd = nn.Linear(100, 100, bias=False)  # 40,000 bytes, pinned as 65,536
    profile_of_odd = replace(
        profile, model=odd, optimizer=torch.optim.AdamW(odd.parameters()), host_bytes=2 * (40_000 + 65_536)
    )
    assert list(OptimizerOffload().options(profile_of_odd)) == both
    assert list(OptimizerOffload().options(replace(profile_of_odd, host_bytes=211_071))) == []
    stateless = torch.optim.SGD(profile.model.parameters())
    assert list(OptimizerOffload().options(replace(profile, optimizer=stateless))) == []


@pytest.mark.parametrize("gradients", [False, True])
def test_bytes_on_the_card_and_on_the_host(gpu: VirtualGPU, gradients: bool) -> None:
    setting = OptimizerOffloadSetting(offload_gradients=gradients)
    workload = OptimizerOffload().apply(transformer(), setting)
    state = workload.start("cuda")
    parameters = list(state.model.parameters())
    large = [parameter for parameter in parameters if parameter.numel() >= 4096]
    small = [parameter for parameter in parameters if parameter.numel() < 4096]
    for _ in range(2):
        workload.run_step(state, workload.sizes)
    # AdamW keeps two averages; its fused kernel keeps the counters of small parameters on the card.
    assert held(gpu, Category.OPTIMIZER_STATE)[0] == sum(2 * p.nbytes + 4 for p in small)
    pinned = torch.cuda.host_memory_stats()["active_bytes.current"]
    assert pinned == sum(2 * (1 << (p.nbytes - 1).bit_length()) for p in large)
    assert isinstance(state.optimizer, HostOptimizer)
    live = live_of(state)
    assert live is not None
    assert live.pageable_bytes == sum(2 * p.nbytes + 4 for p in large)
    live.undo()
    assert live.pageable_bytes == 0
    now, most = held(gpu, Category.GRADIENTS)
    assert now == 0
    if not gradients:
        assert most == sum(parameter.nbytes for parameter in parameters)
    else:
        assert most < sum(rounded(p.nbytes) for p in small) + 3 * max(p.nbytes for p in large)


def test_the_step_takes_the_time_of_the_host(gpu: VirtualGPU) -> None:
    taken = []
    for workload in (transformer(), OptimizerOffload().apply(transformer(), OptimizerOffloadSetting())):
        state = workload.start("cuda")
        workload.run_step(state, workload.sizes)
        torch.cuda.synchronize()
        before = gpu.run.seconds_simulated
        workload.run_step(state, workload.sizes)
        torch.cuda.synchronize()
        taken.append(gpu.run.seconds_simulated - before)
    size = sum(parameter.nbytes for parameter in state.model.parameters())
    # The CPU reads parameter, gradient and two averages, and writes three of them.
    assert taken[1] - taken[0] > 5 * size / 51.2e9


def _half(live: AttachedProgram, *more: Choice) -> AttachedProgram:
    half = Choice(technique=LowPrecisionTraining(), setting=LowPrecisionTrainingSetting())
    live.attach((half, *more))
    return live


def _offloaded(setting: OptimizerOffloadSetting) -> Choice:
    return Choice(technique=OptimizerOffload(), setting=setting)


@EACH
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_masters_on_the_host_step_as_those_on_the_card(
    gpu: VirtualGPU, setting: OptimizerOffloadSetting, name: str
) -> None:
    kind = getattr(torch.optim, name)
    extra: dict[str, object] = {"lr": 1e-4, "momentum": 0.9} if name == "SGD" else {"lr": 1e-4}
    on_card = _half(_live("cuda", kind, **extra))
    on_host = _half(_live("cuda", kind, **extra), _offloaded(setting))
    plain = values(_model("cuda"))
    first = values(on_host.model)
    for live in (on_card, on_host):
        _train(live, steps=1)
        assert all(p.dtype is torch.bfloat16 for p in live.model.parameters())
        live.undo()
    for ours, theirs, half, full in zip(
        values(on_host.model), values(on_card.model), first, plain, strict=True
    ):
        assert ours.dtype is torch.float32
        # The first step's gradients are the same, so the updates are, and most are below what bfloat16 resolves.
        torch.testing.assert_close(ours - full, theirs - full, rtol=1e-3, atol=1e-8)
        assert (ours != half).float().mean() > 0.9


@EACH
def test_masters_survive_a_checkpoint(gpu: VirtualGPU, setting: OptimizerOffloadSetting) -> None:
    whole, resumed = (_half(_live("cuda", lr=1e-4), _offloaded(setting)) for _ in range(2))
    _train(whole, steps=3)
    assert whole.optimizer is not None
    assert resumed.optimizer is not None
    saved = copy.deepcopy((whole.model.state_dict(), whole.optimizer.state_dict()))
    resumed.model.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    for live in (whole, resumed):
        _train(live, steps=2, seed=3)
        live.undo()
    for ours, theirs in zip(values(resumed.model), values(whole.model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_masters_cost_nothing_of_the_card(gpu: VirtualGPU) -> None:
    live = _half(_live("cuda"), _offloaded(MOST))
    _train(live, steps=1)
    optimizer = live.optimizer
    assert isinstance(optimizer, HostOptimizer)
    elements = sum(p.numel() for p in live.model.parameters() if p.numel() >= MOST.minimal_size)
    # A master and two states in float32, and a counter of 4 bytes for each parameter; the rest is pinned.
    offloaded = sum(p.numel() >= MOST.minimal_size for p in live.model.parameters())
    assert live.pageable_bytes == elements * (4 + 8) + 4 * offloaded


def test_states_of_16_bits_on_the_host_are_refused(gpu: VirtualGPU) -> None:
    live = _live("cuda")
    half = Choice(technique=LowPrecisionTraining(), setting=LowPrecisionTrainingSetting(bfloat16_states=True))
    with pytest.raises(UsageError, match="on the host keeps weights and states in float32"):
        live.attach((half, _offloaded(SOME)))
    assert all(p.dtype is torch.float32 for p in live.model.parameters())
