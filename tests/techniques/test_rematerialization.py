"""Results that are computed again one at a time: the same bits, less memory, and what cannot be is said."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.test_activation_checkpointing import assert_equal, attached, backward
from tests.techniques.toys import all_toys, numbers
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.errors import UsageError
from vramfit.techniques.activation_checkpointing import ActivationCheckpointing, Checkpointing, Mode
from vramfit.techniques.step_in_backward import StepInBackward, StepInBackwardSetting
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.torch_versions

WIDTH = 256


def lazy(*modules: str, **save: tuple[str, ...]) -> Checkpointing:
    """The whole model, or some modules, with what is kept of all of it as ``all``."""
    kept = {"*" if path == "all" else path: specs for path, specs in save.items()}
    return Checkpointing(mode=Mode.LAZY, modules=modules or ("",), save=kept)


class Calls(nn.Module):
    """Anything that can be written as a function of the input, and has one matrix."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight)


def in_place(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).relu_()
    z = (y @ weight).add_(y.sin()).tanh_()
    return z @ weight


def read_before_it_changes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x @ weight
    z = y + 1
    y.add_(3)
    return (y * z.sin()) @ weight


def filled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    y[:, :8] = (x @ weight)[:, :8].sin()
    y[:, 8:] = (x @ weight)[:, 8:].exp()
    return (y.cos() @ weight).square()


def views(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    a, b = (x @ weight).exp().chunk(2, -1)
    c, d = torch.split((a * b).t(), 4)
    return torch.cat([c.sin(), d.cos(), a.t()]).unsqueeze(0).expand(2, -1, -1).square()


def several_results(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values, _ = (x @ weight).exp().sort(-1)
    normed = F.layer_norm(values, (16,), weight[0], weight[1])
    return normed.relu_() @ weight


def conjugated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    z = torch.fft.rfft((x @ weight).sin())
    return torch.view_as_real(z.conj() * z * z).square()


def as_bits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = (x @ weight).exp()
    return y * y.view(torch.int32).bitwise_and(1)


def random_numbers(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.dropout((x @ weight).sin(), 0.5)
    z = y + torch.rand_like(y)
    return F.dropout((z @ weight).sin().mul_(torch.rand_like(z)), 0.3).square()


def own_generator(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    y = (x @ weight).exp() * torch.rand(x.shape, generator=generator)
    z = torch.empty_like(y).bernoulli_(0.5, generator=generator)
    return (y.sin() * z) @ weight


def recurrent(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(400):
        x = (x @ weight).tanh().mul(1.01)
    return x.square()


def changed_input(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    y = (x + 1).exp()
    x.mul_(2)
    z = (x + 1).sin() * y
    x.zero_()
    return (z + x) @ weight


FUNCTIONS = (
    *(
        changed_input,
        in_place,
        read_before_it_changes,
        filled,
        views,
        several_results,
        conjugated,
        own_generator,
        as_bits,
        random_numbers,
    ),
    recurrent,
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("kept", [(), ("mm",), ("sin", "exp", "empty_like")])
def test_gradients_are_the_plain_programs(function: Callable[..., Any], kept: tuple[str, ...]) -> None:
    model, x = Calls(function), numbers(8, 16)
    expected = backward(model, x)
    state = torch.get_rng_state()
    attached(model, lazy(all=kept))
    assert_equal(backward(model, x), expected)
    assert torch.equal(torch.get_rng_state(), state)


class Names(TorchDispatchMode):
    """The ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not there")
@pytest.mark.parametrize("without", [False, True])
def test_recurrent_layers_of_onednn_keep_what_gradients_need_the_second_time_too(without: bool) -> None:
    """Their kernel asks whether gradients are enabled, and makes no workspace where they are not."""
    torch.manual_seed(0)
    recurrent = nn.LSTM(16, 16, num_layers=2, batch_first=True)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if without:
            with torch.no_grad():
                x = recurrent(x)[0]
            return (x.sin() @ weight).sin()
        return recurrent((x @ weight).sin())[0].sin()

    model, x = Calls(run), numbers(4, 6, 16)
    model.recurrent = recurrent
    with Names() as names:
        expected = backward(model, x)
    assert "aten::mkldnn_rnn_layer" in names.seen
    attached(model, lazy())
    assert_equal(backward(model, x), expected)


def test_second_derivatives_are_the_plain_programs() -> None:
    model, x = Calls(several_results), numbers(8, 16)

    def second() -> list[torch.Tensor]:
        (first,) = torch.autograd.grad(model(x).square().sum(), [model.weight], create_graph=True)
        return list(torch.autograd.grad(first.square().sum(), [model.weight]))

    expected = second()
    attached(model, lazy())
    assert_equal(second(), expected)


def test_a_backward_pass_under_autocast_computes_again_as_the_forward_pass_did() -> None:
    model, x = Calls(views), numbers(8, 16)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        out = model(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            out.backward()
        assert model.weight.grad is not None
        return [model.weight.grad.clone()]

    expected = run()
    attached(model, lazy())
    assert_equal(run(), expected)


# -- memory --------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """Products with four pointwise operations after each, all of which autograd keeps."""

    def __init__(self, products: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(products))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sin().cos().exp().tanh()
        return x.square()


def highest(model: nn.Module, x: torch.Tensor) -> int:
    """The most bytes that a step holds beyond what there was before, by torch's profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        model(x).sum().backward()
    held = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_results_are_there_one_at_a_time() -> None:
    model, x = Chain(8), numbers(WIDTH, WIDTH)
    one = x.nbytes  # of a result, and of a weight's gradient
    model(x).sum().backward()
    plain = highest(model, x)
    attached(model, lazy(all=("mm",)))
    lazily = highest(model, x)
    # The four results of each layer that are kept; its product alone, and for one layer all, with gradients.
    assert plain >= 8 * 4 * one
    assert lazily <= (8 + 4 + 3) * one
    assert model.layers[0].weight.grad is not None


def test_all_is_let_go_of_without_the_garbage_collector() -> None:
    model, x = Calls(in_place), numbers(8, 16)
    attached(model, lazy())
    gc.collect()
    gc.disable()
    try:
        tensors = sum(isinstance(known, torch.Tensor) for known in gc.get_objects())
        model(x).sum().backward()
        model.zero_grad()
        model(x)
        assert sum(isinstance(known, torch.Tensor) for known in gc.get_objects()) == tensors
    finally:
        gc.enable()


# -- what is kept, and what is refused -----------------------------------------------------------------------------


@torch.library.custom_op("vramfit_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """An op of somebody else's, which counts its calls."""
    CALLS.append("doubled")
    return x * 2


doubled.register_autograd(lambda context, gradient: gradient * 2)
CALLS: list[str] = []


def test_ops_of_others_run_once() -> None:
    model, x = Calls(lambda x, weight: doubled((x @ weight).sin()).exp() @ weight), numbers(8, 16)
    expected = backward(model, x)
    attached(model, lazy())
    CALLS.clear()
    assert_equal(backward(model, x), expected)
    assert CALLS == ["doubled"]


class Draws(TorchDispatchMode):
    """Counts calls of ``torch.rand``."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.rand.default
        return func(*args, **(kwargs or {}))


def test_draws_whose_generator_nothing_tells_before_they_run_are_kept() -> None:
    for device, times in (("cpu", 2), ("cuda", 1)):
        model = Calls(lambda x, weight: (x @ weight).exp() * torch.rand(8, 16, device=x.device))
        with VirtualGPU("RTX 4090"), Draws() as counting:
            attached(model.to(device), lazy())
            model(torch.ones(8, 16, device=device)).sum().backward()
        assert counting.count == times, device


def test_parameters_may_step_as_soon_as_they_have_their_gradients() -> None:
    def trained(*, lazily: bool) -> list[torch.Tensor]:
        toy = all_toys()["language-tied"]
        workload = StepInBackward().apply(toy, StepInBackwardSetting())
        if lazily:
            workload = ActivationCheckpointing().apply(workload, lazy(all=("mm",)))
        torch.manual_seed(0)
        state = workload.start("cpu")
        for _ in range(2):
            workload.run_step(state, workload.sizes)
        return [parameter.detach().clone() for parameter in state.model.parameters()]

    assert_equal(trained(lazily=True), trained(lazily=False))


def test_nothing_is_done_without_gradients_or_training() -> None:
    model, x = Calls(random_numbers), numbers(8, 16)
    attached(model, lazy())
    with torch.no_grad():
        assert not model(x).requires_grad
    model.eval()
    assert model(x).grad_fn is not None


def test_a_tensor_that_changes_after_the_forward_pass_is_noticed_in_the_backward_pass() -> None:
    model, x = Calls(lambda x, weight: (x + 1).exp() @ weight), numbers(8, 16)
    attached(model, lazy())
    loss = model(x).sum()
    x.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"a tensor that aten\.add\.Tensor of .* read was changed in place"
    ):
        loss.backward()


def test_a_kept_tensor_that_changes_is_noticed_as_autograd_notices_it() -> None:
    model, x = Calls(lambda x, weight: (x @ weight).tanh()), numbers(8, 16)
    attached(model, lazy(all=("tanh",)))
    out = model(x)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- parts that are counted apart ----------------------------------------------------------------------------------


class Varying(nn.Module):
    """Computes more than usual before its parts where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor, more: bool = False) -> torch.Tensor:
        if more:
            x = F.linear(x, torch.eye(16), torch.zeros(16))
        for part in self.parts:
            x = part(x)
        return x.square()


class Products(TorchDispatchMode):
    """Counts products with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def products(model: nn.Module, x: torch.Tensor, **kwargs: Any) -> int:
    """How many products with a bias a step computes."""
    with Products() as counting:
        backward(model, x, **kwargs)
    return counting.count


def test_the_ops_of_parts_are_found_whatever_runs_before_them() -> None:
    model, x = Varying(), numbers(8, 16)
    expected = backward(model, x, more=True)
    save = {"parts.0": ("addmm#0",), "parts.1": (), "parts.2": ("addmm#0",)}
    attached(model, Checkpointing(mode=Mode.LAZY, modules=("",), save=save))
    assert products(model, x) == 3 + 1
    assert products(model, x, more=True) == 4 + 2  # what runs before the parts is kept nowhere
    assert_equal(backward(model, x, more=True), expected)


def test_only_lazy_blocks_have_parts_that_are_counted_apart() -> None:
    save = {"parts.0": ("addmm#0",)}
    with pytest.raises(UsageError, match=r"parts\.0 is to keep results but is not recomputed"):
        attached(Varying(), Checkpointing(mode=Mode.SELECTIVE, modules=("parts.1",), save=save))
    with pytest.raises(UsageError, match=r"the model has no module 'parts\.7'"):
        attached(Varying(), Checkpointing(mode=Mode.LAZY, modules=("",), save={"parts.7": ()}))
