"""Tensors shared and left on the host for inference: what is found, what is saved, and what is brought back."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.samples import inference, output_of, profile_with
from tests.techniques.toys import numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import (
    AttachedProgram,
    Choice,
    Numerics,
    check_together,
    find_technique,
    live_of,
    setting_from_plain,
    setting_to_plain,
)
from vramfit.techniques.half_inference import HalfInference, HalfInferenceSetting
from vramfit.techniques.parameter_sharing import SharingSetting
from vramfit.techniques.tensor_sharing import TensorSharing, TensorSharingSetting, find_shareable
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

TECHNIQUE = TensorSharing()
WIDTH = 64
WEIGHT, MASK = WIDTH * WIDTH * 4, WIDTH * WIDTH * 4


class Layer(nn.Module):
    """A layer with a mask of its own, a counter as large and a norm, which are alike in all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(4096)
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())
        self.register_buffer("seen", torch.zeros(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x) @ self.mask + self.seen[0]


class Net(nn.Module):
    """A network, a copy of it that averages its weights, and parts that evaluation never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.average = copy.deepcopy(self.layers[0].linear)
        self.auxiliary = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        self.attention = nn.MultiheadAttention(WIDTH, 2)  # calls its last layer by a function
        self.functional = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.functional.weight  # tied to what is read
        self.wants_auxiliary = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.attention(x, x, x, need_weights=False)[0] + self.average(x)
        x = F.linear(x, self.functional.weight)
        return self.auxiliary(x) if self.training or self.wants_auxiliary else x


SHARED = {
    "average.weight": "layers.0.linear.weight",
    "layers.1.mask": "layers.0.mask",
    "layers.2.mask": "layers.0.mask",
}
ALL = TensorSharingSetting(
    shared=SHARED, unused=("layers.0.norm", "layers.1.norm", "layers.2.norm", "auxiliary")
)


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def batch(count: int) -> torch.Tensor:
    return numbers(count, 5, WIDTH)


def workload() -> Workload:
    return inference(Net, batch)


def attached(model: nn.Module, setting: TensorSharingSetting = ALL) -> AttachedProgram:
    live = AttachedProgram(model, None)
    live.attach([Choice(technique=TECHNIQUE, setting=setting)])
    return live


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_equal_and_unused_are_found_and_nothing_else() -> None:
    model = made()
    found = find_shareable(model, batch(2))
    assert found.shared == SHARED, "no zeros or ones, which are filled later"
    assert found.unused == ALL.unused


def test_equal_means_every_byte() -> None:
    model = nn.ParameterList([torch.arange(2048.0), torch.arange(2048.0), torch.arange(2048.0)])
    with torch.no_grad():
        model[1][0] = -0.0
        model[2][0] = float("nan")
    model.append(model[2].detach().clone())
    assert find_shareable(_Around(model), batch(1)).shared == {"inner.3": "inner.2"}


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return x + sum(one.sum() for one in self.inner)


@torch.no_grad()
def test_outputs_are_the_same_bit_for_bit_and_the_undo_parts_them_again() -> None:
    model, x = made(), batch(2)
    plain, before = model(x), state(model)
    parameters = dict(model.named_parameters())
    live = attached(model)
    assert model.average.weight is model.layers[0].linear.weight
    assert model.layers[2].mask is model.layers[0].mask
    assert list(model.state_dict()) == list(before)
    assert torch.equal(model(x), plain) and torch.equal(copy.deepcopy(model)(x), plain)
    live.undo()
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert len({tensor.data_ptr() for tensor in after.values()}) == len(after) - 1, "only what was tied is"
    assert all(parameters[name] is one for name, one in model.named_parameters())
    assert torch.equal(model(x), plain)


def test_a_workload_gives_the_same_bits() -> None:
    planned = TECHNIQUE.apply(workload(), ALL)
    assert torch.equal(output_of(planned), output_of(workload()))
    live = live_of(planned.start("cpu"))
    assert live is not None
    unused = 3 * 2 * 4096 * 4 + (WEIGHT + WIDTH * 4) + (WIDTH * 4 + 4) * 4
    assert live.pageable_bytes == unused


@torch.no_grad()
def test_what_is_written_to_is_an_error() -> None:
    model, x = made(), batch(2)
    attached(model)
    model(x)
    model.layers[1].mask[0, 1] = 1.0
    with pytest.raises(UsageError, match=r"layers\.0\.mask was written to"):
        model(x)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (TensorSharingSetting(), "names no tensors"),
        (TensorSharingSetting(shared={"layers.0.mask": "layers.0.seen"}), "are not equal"),
        (TensorSharingSetting(shared={"layers.0.mask": "layers.0.linear.weight"}), "are not equal"),
        (TensorSharingSetting(shared={"layers.9.mask": "layers.0.mask"}), "no parameter or buffer"),
        (TensorSharingSetting(unused=("nothing",)), "no module 'nothing'"),
    ],
)
def test_bad_settings_are_one_line_and_change_nothing(setting: TensorSharingSetting, message: str) -> None:
    model = made()
    before = state(model)
    with pytest.raises(UsageError, match=message):
        attached(model, setting)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in before.items())


def test_training_is_refused() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="tensor-sharing is for inference"):
        AttachedProgram(model, optimizer).attach([Choice(technique=TECHNIQUE, setting=ALL)])
    assert model.average.weight is not model.layers[0].linear.weight
    other = Choice(technique=find_technique("parameter-sharing"), setting=SharingSetting())
    with pytest.raises(UsageError, match="cannot be combined with parameter-sharing"):
        check_together((other, Choice(technique=TECHNIQUE, setting=ALL)))


def test_options_are_for_inference_alone() -> None:
    model = made()
    assert list(TECHNIQUE.options(profile_with(model, batch(2)))) == [ALL]
    assert not list(TECHNIQUE.options(profile_with(model, batch(2), trains=True)))
    assert not list(TECHNIQUE.options(profile_with(nn.Linear(WIDTH, WIDTH), batch(2))))
    assert setting_from_plain(TECHNIQUE, setting_to_plain(ALL)) == ALL
    assert TECHNIQUE.promise(ALL).numerics is Numerics.BITWISE
    assert TECHNIQUE.describe(ALL) == "3 duplicates, 4 modules unused"


def held(workload: Workload) -> int:
    """Bytes that the model and its outputs hold on the card."""
    state = workload.start("cuda")
    workload.run_step(state, workload.sizes)
    before = torch.cuda.memory_allocated()
    live = live_of(state)
    del state
    if live is not None:
        live.model.to("cpu")
    del live
    gc.collect()
    return before - torch.cuda.memory_allocated()


def test_duplicates_and_unused_modules_take_nothing_of_the_card(gpu: VirtualGPU) -> None:
    plain = workload()
    shared, unused = TensorSharingSetting(shared=SHARED), TensorSharingSetting(unused=ALL.unused)
    before = held(plain)
    assert before - held(TECHNIQUE.apply(plain, shared)) == WEIGHT + 2 * MASK
    norms, auxiliary = 3 * 2 * 4096 * 4, WEIGHT + 512 + 1024 + 512
    assert before - held(TECHNIQUE.apply(plain, unused)) == norms + auxiliary
    assert before - held(TECHNIQUE.apply(plain, ALL)) == WEIGHT + 2 * MASK + norms + auxiliary


def test_an_unused_module_that_is_called_comes_back(gpu: VirtualGPU) -> None:
    planned = TECHNIQUE.apply(workload(), TensorSharingSetting(unused=ALL.unused))
    state = planned.start("cuda")
    planned.run_step(state, planned.sizes)
    assert {one.device.type for one in state.model.auxiliary.parameters()} == {"cpu"}
    assert state.model.average.weight.device.type == "cuda"
    state.model.wants_auxiliary = True
    planned.run_step(state, planned.sizes)
    assert {one.device.type for one in state.model.auxiliary.parameters()} == {"cuda"}
    live = live_of(state)
    assert live is not None
    live.undo()
    assert {one.device.type for one in state.model.parameters()} == {"cuda"}


def test_with_half_precision_what_comes_back_is_half_too(gpu: VirtualGPU) -> None:
    planned = TECHNIQUE.apply(workload(), ALL)
    planned = HalfInference().apply(planned, HalfInferenceSetting())
    state = planned.start("cuda")
    state.model.wants_auxiliary = True
    planned.run_step(state, planned.sizes)
    assert state.model.auxiliary[0].weight.dtype is torch.float16
    assert state.model.layers[2].mask is state.model.layers[0].mask
