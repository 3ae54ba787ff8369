"""Training code as people write it: each feature of torch that a training script leans on, with exact figures."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from vramfit.trace import Category, EventKind
from vramfit.virtual.gpu import VirtualGPU

FP32 = 4


def mlp(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10)).cuda()


def allocated(device: int = 0) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device)


def bytes_of(gpu: VirtualGPU, category: Category) -> int:
    """Requested bytes of a category that are alive now."""
    trace = gpu.trace
    live: dict[int, int] = {}
    for row in range(len(trace)):
        if trace.kind[row] == EventKind.ALLOC:
            live[int(trace.address[row])] = row
        elif trace.kind[row] == EventKind.FREE_REQUESTED:
            live.pop(int(trace.address[row]), None)
    return sum(int(trace.size[row]) for row in live.values() if trace.category[row] == category)


# -- optimizers ----------------------------------------------------------------------------------------------------

# State tensors of the parameter's own size that each optimizer keeps, by its documentation.
OPTIMIZERS: dict[str, tuple[dict[str, Any], int]] = {
    "SGD": ({}, 0),
    "SGD momentum": ({"momentum": 0.9}, 1),
    "Adam": ({}, 2),
    "Adam amsgrad": ({"amsgrad": True}, 3),
    "AdamW": ({}, 2),
    "Adagrad": ({}, 1),
    "Adadelta": ({}, 2),
    "Adamax": ({}, 2),
    "ASGD": ({}, 1),
    "NAdam": ({}, 2),
    "RAdam": ({}, 2),
    "RMSprop": ({}, 1),
    "RMSprop centered": ({"centered": True, "momentum": 0.9}, 3),
    "Rprop": ({}, 2),
    "Adafactor": ({}, 0),
    "Muon": ({}, 1),
}
VARIANTS: tuple[dict[str, bool], ...] = (
    {},
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"capturable": True},
    {"maximize": True},
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_and_keeps_its_state_on_the_card(gpu: VirtualGPU, name: str) -> None:
    options, copies = OPTIMIZERS[name]
    ran = 0
    for variant in VARIANTS:
        layer = nn.Linear(128, 64, bias=False).cuda()
        before = layer.weight
        try:
            optimizer = getattr(torch.optim, name.split()[0])(
                layer.parameters(), lr=0.01, **options, **variant
            )
        except (TypeError, RuntimeError):  # this optimizer knows no such variant
            assert variant, "plain construction must work"
            continue
        try:
            for _ in range(2):
                optimizer.zero_grad()
                layer(torch.randn(4, 128, device="cuda")).pow(2).mean().backward()
                optimizer.step()
        except RuntimeError as error:  # until 2.11 Adagrad says so at its first step
            if "fused=True` requires" not in str(error):
                raise
            continue
        states = [v for v in optimizer.state[layer.weight].values() if isinstance(v, Tensor) and v.dim()]
        same = [v for v in states if v.shape == layer.weight.shape]
        assert len(same) == copies, variant
        assert all(v.device == torch.device("cuda", 0) for v in states)
        assert layer.weight is before and optimizer.param_groups[0]["params"][0] is before
        steps = optimizer.state[layer.weight].get("step")
        if steps is not None:
            assert float(steps) == 2.0, variant
        ran += 1
        del optimizer, layer, states, same, before
    assert ran >= 1
    assert gpu.run.oom is None


def test_adam_holds_exactly_two_copies_and_counts_steps_on_the_host(gpu: VirtualGPU) -> None:
    layer = nn.Linear(1024, 1024, bias=False).cuda()
    weights = 1024 * 1024 * FP32
    assert allocated() == weights
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 1024, device="cuda")).sum().backward()
    held = allocated()
    optimizer.step()
    assert allocated() == held + 2 * weights
    assert bytes_of(gpu, Category.OPTIMIZER_STATE) == 2 * weights
    assert bytes_of(gpu, Category.PARAMETERS) == weights
    assert bytes_of(gpu, Category.GRADIENTS) == weights
    state = optimizer.state[layer.weight]
    assert state["step"].device.type == "cpu" and state["step"].item() == 1.0
    optimizer.zero_grad(set_to_none=True)
    assert allocated() == held + weights
    assert bytes_of(gpu, Category.GRADIENTS) == 0


def test_foreach_takes_more_memory_than_the_loop_and_fused_none(gpu: VirtualGPU) -> None:
    def extra(**variant: bool) -> int:
        layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(4)).cuda()
        optimizer = torch.optim.AdamW(layers.parameters(), **variant)
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        return torch.cuda.max_memory_allocated() - before

    one = 512 * 512 * FP32
    assert extra(fused=True) == 0
    # The denominator, its square root, and the denominator of the parameter before, which the loop still names.
    assert extra(foreach=False) == 3 * one
    assert extra(foreach=True) == 4 * one, "one temporary of every parameter at once"
    assert extra() == 4 * one, "the default on a card is foreach"


def test_lbfgs_calls_its_closure_and_sparse_adam_takes_sparse_gradients(gpu: VirtualGPU) -> None:
    layer = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=4)
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 8, device="cuda")).pow(2).mean()
        loss.backward()
        calls.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(calls) >= 2
    assert calls[-1] < calls[0], "the small model has true values, so the loss really falls"

    table = nn.Embedding(1000, 16, sparse=True).cuda()
    sparse = torch.optim.SparseAdam(list(table.parameters()))
    table(torch.randint(0, 1000, (4, 5), device="cuda")).sum().backward()
    assert table.weight.grad is not None and table.weight.grad.is_sparse
    sparse.step()
    assert sparse.state[table.weight]["exp_avg"].shape == (1000, 16)


def test_a_small_model_really_learns(gpu: VirtualGPU) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 1).cuda()
    data = torch.randn(64, 4)
    target = (data @ torch.tensor([[1.0], [2.0], [3.0], [4.0]])).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(200):
        loss = ((layer(data.cuda()) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-3
    assert layer.weight.tolist()[0] == pytest.approx([1, 2, 3, 4], abs=0.05)
    assert not any(w.code == "guessed-value" for w in gpu.run.warnings)


# -- mixed precision -----------------------------------------------------------------------------------------------


def test_grad_scaler_grows_and_skips_as_on_a_card(gpu: VirtualGPU) -> None:
    layer = nn.Linear(4, 4, bias=False).cuda()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=2)

    def step(factor: float) -> None:
        optimizer.zero_grad()
        loss = (layer(torch.ones(1, 4, device="cuda")) * factor).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    assert scaler.get_scale() == 1024.0
    step(1.0)
    assert scaler.get_scale() == 2048.0, "grown after two good steps"
    before = layer.weight.tolist()
    step(float("inf"))
    assert scaler.get_scale() == 1024.0, "halved by a step that overflowed"
    assert layer.weight.tolist() == before, "and that step was skipped"
    step(1.0)
    assert layer.weight.tolist() != before


def test_grad_scaler_steps_a_large_model(gpu: VirtualGPU) -> None:
    layer = nn.Linear(512, 512).cuda()
    optimizer = torch.optim.Adam(layer.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = layer(torch.randn(8, 512, device="cuda")).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 65536.0
    assert optimizer.state[layer.weight]["step"].item() == 3.0, "no step was taken for an overflow"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_by_the_cuda_lists_and_caches_weights(gpu: VirtualGPU, dtype: torch.dtype) -> None:
    layer = nn.Linear(256, 256, bias=False).cuda()
    inputs = torch.randn(16, 256, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        assert torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is dtype
        first = layer(inputs)
        held = allocated()
        second = layer(first)
        assert allocated() - held == 16 * 256 * 2, "the second call reuses the cast weight"
        assert first.dtype is dtype and second.dtype is dtype
        assert first.softmax(1).dtype is torch.float32
        assert F.mse_loss(first, second).dtype is torch.float32
        assert (inputs + first).dtype is torch.float32
        with torch.autocast("cuda", enabled=False):
            assert layer(inputs).dtype is torch.float32
    assert layer.weight.dtype is torch.float32
    second.float().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32


# -- saved tensors -------------------------------------------------------------------------------------------------


def blocks(count: int = 6, width: int = 256) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(count))).cuda()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_lowers_the_memory_held_for_backward(gpu: VirtualGPU, reentrant: bool) -> None:
    model, rows = blocks(), 1024
    one = rows * 256 * FP32

    def held(run: Callable[[Tensor], Tensor]) -> int:
        inputs = torch.randn(rows, 256, device="cuda", requires_grad=True)
        before = allocated()
        out = run(inputs)
        after = allocated()
        out.sum().backward()
        assert inputs.grad is not None and inputs.grad.shape == inputs.shape
        return after - before

    def checkpointed(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    model(
        torch.randn(rows, 256, device="cuda")
    )  # the BLAS workspace is taken once, before anything is counted
    assert held(model) == 12 * one, "the output of each linear layer and of each activation"
    assert held(checkpointed) == 6 * one, "the input of each block but the first, and the output"
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_replays_the_random_state(gpu: VirtualGPU, reentrant: bool) -> None:
    states: list[Tensor] = []

    def block(x: Tensor) -> Tensor:
        states.append(torch.cuda.get_rng_state())
        return F.dropout(x * 2, 0.5, training=True)

    torch.cuda.manual_seed(11)
    inputs = torch.randn(4096, 64, device="cuda", requires_grad=True)
    out = checkpoint(block, inputs, use_reentrant=reentrant)
    torch.randn(1000, device="cuda")
    after = torch.cuda.get_rng_state()
    out.sum().backward()
    first, again = states
    assert torch.equal(first, again), "the recomputation draws the same numbers"
    assert torch.equal(torch.cuda.get_rng_state(), after), "and leaves the generator where it was"
    assert not torch.equal(first, after)


def test_checkpoint_sequential_and_selective_contexts(gpu: VirtualGPU) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    model = blocks(4)
    inputs = torch.randn(64, 256, device="cuda", requires_grad=True)
    checkpoint_sequential(model, 2, inputs, use_reentrant=False).sum().backward()
    assert inputs.grad is not None
    held: dict[str, int] = {}
    for name in ("aten.addmm.default", "aten.gelu.default", "none"):

        def policy(context: Any, op: Any, *args: Any, keep: str = name, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if str(op) == keep else CheckpointPolicy.PREFER_RECOMPUTE

        before = allocated()
        out = checkpoint(
            model,
            inputs,
            use_reentrant=False,
            context_fn=lambda policy=policy: create_selective_checkpoint_contexts(policy),
        )
        held[name] = allocated() - before
        out.sum().backward()
        del out
    one = 64 * 256 * FP32
    assert held == {"aten.addmm.default": 5 * one, "aten.gelu.default": 4 * one, "none": one}


@pytest.mark.parametrize("pinned", [False, True])
def test_save_on_cpu_empties_the_card_between_forward_and_backward(gpu: VirtualGPU, pinned: bool) -> None:
    model, rows = blocks(4), 1024
    one = rows * 256 * FP32
    model(torch.zeros(rows, 256, device="cuda")).sum().backward()
    inputs = torch.randn(rows, 256, device="cuda")
    before = allocated()
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        out = model(inputs)
    assert allocated() - before == one, "only the output"
    loss = out.sum()
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_saved_tensor_hooks_see_each_saved_tensor(gpu: VirtualGPU) -> None:
    packed: list[torch.Size] = []
    unpacked: list[torch.Size] = []

    def pack(x: Tensor) -> tuple[torch.device, Tensor]:
        packed.append(x.shape)
        return x.device, x.cpu()

    def unpack(pair: tuple[torch.device, Tensor]) -> Tensor:
        device, x = pair
        assert type(x) is Tensor and x.device.type == "cpu", "what is on the host is real"
        unpacked.append(x.shape)
        return x.to(device)

    layer = nn.Linear(32, 16, bias=False).cuda()
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = layer(torch.randn(8, 32, device="cuda", requires_grad=True)).exp()
    assert sorted(packed) == [(8, 16), (8, 32), (32, 16)] or len(packed) == 3
    out.sum().backward()
    assert sorted(unpacked) == sorted(packed)
    assert layer.weight.grad is not None


def test_hooks_of_modules_and_tensors_run(gpu: VirtualGPU) -> None:
    layer = nn.Linear(2, 2, bias=False).cuda()
    calls: list[str] = []
    layer.register_forward_pre_hook(lambda m, i: calls.append("pre"))
    layer.register_forward_hook(lambda m, i, o: calls.append("post") or o * 2)
    layer.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    layer.weight.register_hook(lambda g: calls.append("grad") or g * 10)
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    layer(torch.ones(1, 2, device="cuda", requires_grad=True)).sum().backward()
    assert calls[:2] == ["pre", "post"]
    assert sorted(calls[2:]) == ["accumulated", "backward", "grad"]
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[20.0, 20.0], [20.0, 20.0]]


def test_custom_functions_and_double_backward(gpu: VirtualGPU) -> None:
    class Clamp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clamp(min=0)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * (x > 0)

    x = torch.tensor([-1.0, 2.0], device="cuda", requires_grad=True)
    Clamp.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 1.0]
    y = torch.tensor([2.0, 3.0], device="cuda", requires_grad=True)
    (first,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
    assert first.tolist() == [12.0, 27.0]
    first.sum().backward()
    assert y.grad is not None and y.grad.tolist() == [12.0, 18.0]


# -- gradients -----------------------------------------------------------------------------------------------------


def test_clipping_gives_the_true_norm_of_small_gradients(gpu: VirtualGPU) -> None:
    layer = nn.Linear(2, 2, bias=False).cuda()
    layer.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]], device="cuda")
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert norm.item() == 5.0
    assert torch.allclose(layer.weight.grad.cpu(), torch.tensor([[0.6, 0.0], [0.0, 0.8]]), atol=1e-5)
    nn.utils.clip_grad_value_(layer.parameters(), 0.5)
    assert layer.weight.grad.tolist() == [[0.5, 0.0], [0.0, 0.5]]


def test_gradient_accumulation_keeps_one_gradient(gpu: VirtualGPU) -> None:
    layer = nn.Linear(512, 512, bias=False).cuda()
    layer(torch.randn(4, 512, device="cuda")).sum().backward()
    assert layer.weight.grad is not None
    gradient, address, held = layer.weight.grad, layer.weight.grad.data_ptr(), allocated()
    for _ in range(3):
        layer(torch.randn(4, 512, device="cuda")).sum().backward()
    assert layer.weight.grad is gradient and layer.weight.grad.data_ptr() == address
    assert allocated() == held


def test_a_tensor_used_twice_has_its_gradients_summed_in_place(gpu: VirtualGPU) -> None:
    one = 1 << 20
    leaf = torch.zeros(one // FP32, device="cuda", requires_grad=True)
    product = leaf * 2.0
    out = product.sin() + product.cos()
    loss = out.sum()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss.backward()
    # The gradient of each branch and its factor; a third sum beside the two would show.
    assert torch.cuda.max_memory_allocated() - before <= 3 * one + 512
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


# -- copies and identity -------------------------------------------------------------------------------------------


def test_deepcopy_makes_parameters_of_its_own(gpu: VirtualGPU) -> None:
    model = mlp(256)
    before = allocated()
    twin = copy.deepcopy(model)
    parameters = sum(512 * math.ceil(p.numel() * FP32 / 512) for p in model.parameters())
    assert allocated() - before == parameters
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(other, nn.Parameter) and other is not mine
        assert other.device == mine.device and other.requires_grad and other.shape == mine.shape
        assert other.data_ptr() != mine.data_ptr()
    assert twin[3].bias.tolist() == model[3].bias.tolist()


def test_moving_averages(gpu: VirtualGPU) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = nn.Linear(2, 1, bias=False).cuda()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    average.update_parameters(model)
    assert average.n_averaged.item() == 2
    assert average.module.weight.tolist() == [[2.0, 2.5]]
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for mine, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(theirs + 1, alpha=0.1)
    assert by_hand.weight.tolist()[0] == pytest.approx([3.1, 3.1])


def test_moving_a_module_keeps_its_parameters_and_their_optimizer(gpu: VirtualGPU) -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters())
    names = list(layer.parameters())
    assert layer.weight.device.type == "cpu" and allocated() == 0
    assert layer.cuda() is layer
    assert all(a is b for a, b in zip(names, layer.parameters(), strict=True))
    assert allocated() == 64 * 64 * FP32 + 512
    layer(torch.randn(2, 64, device="cuda")).sum().backward()
    gradient = layer.weight.grad
    optimizer.step()
    assert optimizer.state[layer.weight]["exp_avg"].device.type == "cuda"
    layer.half()
    assert layer.weight is names[0] and layer.weight.dtype is torch.float16
    assert gradient is not None and layer.weight.grad is not None and layer.weight.grad.dtype is torch.float16
    layer.cpu()
    assert layer.weight is names[0] and layer.weight.device.type == "cpu"
    layer.to("cuda", torch.bfloat16)
    assert layer.weight.dtype is torch.bfloat16 and layer.weight.is_cuda


def test_tied_weights_stay_tied_and_count_once(gpu: VirtualGPU) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1024, 64)
            self.head = nn.Linear(64, 1024, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x))

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for move in (model.cuda, model.half, model.float, model.cpu, model.cuda):
        move()
        assert model.head.weight is model.table.weight
    assert allocated() == 1024 * 64 * FP32
    assert optimizer.param_groups[0]["params"] == [model.table.weight]
    model(torch.randint(0, 1024, (2, 5), device="cuda")).sum().backward()
    optimizer.step()
    assert len(list(model.parameters())) == 1
    assert bytes_of(gpu, Category.GRADIENTS) == 1024 * 64 * FP32


def test_meta_and_device_contexts(gpu: VirtualGPU) -> None:
    with torch.device("cuda"):
        layer = nn.Linear(64, 64, bias=False)
        assert torch.ones(3).device == torch.device("cuda", 0)
    assert layer.weight.is_cuda
    assert allocated() == 64 * 64 * FP32
    with torch.device("meta"):
        empty = nn.Linear(64, 64, bias=False)
    assert empty.weight.is_meta and allocated() == 64 * 64 * FP32
    empty.to_empty(device="cuda")
    assert empty.weight.is_cuda and allocated() == 2 * 64 * 64 * FP32
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
    finally:
        torch.set_default_device("cpu")


# -- schedules -----------------------------------------------------------------------------------------------------


def test_schedulers_give_the_rates_of_a_real_run(gpu: VirtualGPU) -> None:
    rates: dict[str, list[float]] = {}
    for device in ("cpu", "cuda"):
        layer = nn.Linear(2, 2).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        found = []
        for _ in range(5):
            optimizer.step()
            cosine.step()
            found.append(optimizer.param_groups[0]["lr"])
        rates[device] = found
    assert rates["cuda"] == rates["cpu"]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    start = optimizer.param_groups[0]["lr"]
    plateau.step(torch.tensor(1.0, device="cuda"))
    plateau.step(torch.tensor(2.0, device="cuda"))
    assert optimizer.param_groups[0]["lr"] == start * 0.5, "the true value of a small tensor was seen"


def test_phases_are_told_apart(gpu: VirtualGPU) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 32, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    phases = gpu.trace.phases
    assert phases == (
        "setup",
        "step 1/forward",
        "step 1/backward",
        "step 1/optimizer",
        "step 2/forward",
        "step 2/backward",
        "step 2/optimizer",
    )


def test_steps_inside_the_backward_pass_are_part_of_its_step(gpu: VirtualGPU) -> None:
    model = mlp()
    optimizers = {p: torch.optim.AdamW([p], foreach=False) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    seen: list[str] = []
    for _ in range(2):
        out = model(torch.randn(4, 32, device="cuda"))
        out.register_hook(lambda _: seen.append(gpu.mode.meter.phases.phase.value))
        out.sum().backward()
        seen.append(gpu.mode.meter.phases.phase.value)
    assert seen == ["backward"] * 4
    assert gpu.trace.phases[:7] == (
        "setup",
        "step 1/forward",
        "step 1/backward",
        "step 1/optimizer",
        "step 2/forward",
        "step 2/backward",
        "step 2/optimizer",
    )
    assert bytes_of(gpu, Category.GRADIENTS) == 0
    assert bytes_of(gpu, Category.OPTIMIZER_STATE) == 2 * sum(p.nbytes for p in optimizers)


def test_what_is_copied_into_pinned_memory_is_known(gpu: VirtualGPU) -> None:
    weight = nn.Parameter(torch.arange(6.0).view(2, 3)).cuda()
    host = torch.empty_like(weight, device="cpu", pin_memory=True)
    host.copy_(weight.detach(), non_blocking=True)
    assert host.tolist() == [[0, 1, 2], [3, 4, 5]]
    weight.detach().copy_(host.mul_(2), non_blocking=True)
    assert weight.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert gpu.run.warnings == ()


def test_modules_name_what_they_allocate(gpu: VirtualGPU) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.ReLU())
            self.head = nn.Linear(256, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    model = Net().cuda()
    out = model(torch.randn(64, 256, device="cuda"))
    trace = gpu.trace
    found = {
        (trace.modules[m] if m >= 0 else "", trace.tensors[t] if t >= 0 else "", Category(int(c)))
        for m, t, c, k in zip(trace.module, trace.tensor, trace.category, trace.kind, strict=True)
        if k == EventKind.ALLOC
    }
    assert ("Net.body.0", "float32[64, 256]", Category.ACTIVATIONS) in found
    assert ("Net.head", "float32[64, 8]", Category.ACTIVATIONS) in found
    assert ("Net.body.0", "float32[256, 256]", Category.PARAMETERS) in found
    assert ("Net.body.1", "float32[64, 256]", Category.TEMPORARIES) in found, "ReLU keeps its result alone"
    assert out.shape == (64, 8)


def test_passes_of_a_closure_belong_to_the_step_that_calls_it(gpu: VirtualGPU) -> None:
    model = mlp()
    optimizers = (
        torch.optim.LBFGS(model.parameters(), max_iter=3),
        torch.optim.AdamW(model.parameters(), foreach=False),
    )
    calls = []

    def closure(fails: bool = False) -> Tensor:
        calls.append(gpu.mode.meter.phases.step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: Tensor = model(torch.randn(4, 32, device="cuda")).square().mean()
        if fails:
            raise ValueError
        loss.backward()
        return loss

    optimizers[0].step(closure)
    assert len(calls) > 1
    optimizers[1].step(closure)
    with pytest.raises(ValueError):
        optimizers[1].step(lambda: closure(fails=True))
    closure()
    optimizers[1].step()
    steps = [f"step {step}/{part}" for step in (1, 2) for part in ("optimizer", "forward", "backward")]
    trace = gpu.trace
    assert [name for name in trace.phases if name != "setup"] == steps
    states = (trace.kind == EventKind.ALLOC) & (trace.category == Category.OPTIMIZER_STATE)
    where = {trace.phases[index] for index in trace.phase[states]}
    assert where == {"step 1/optimizer"}, "an optimizer goes on after its closure"
