"""Fused norms: what is recognised, what they give, and what they keep."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from tests.techniques.peaks import kept_bytes
from tests.techniques.toys import gradients, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Numerics, Profile
from vramfit.techniques.core.surround import plain_class, surroundings_of
from vramfit.techniques.fused_norms import FusedNorms, FusedNormSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload


class Rms(nn.Module):
    """As in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class FromOne(nn.Module):
    """As in Gemma."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.linspace(-0.5, 0.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Layer(nn.Module):
    """A layer norm written out, which knows its width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.width, self.tiny = width, 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, self.width).view(x.shape) - x.mean(-1, keepdim=True)
        return x / (x.pow(2).mean(-1, keepdim=True) + self.tiny).sqrt() * self.gamma + self.beta


class Outside(Rms):
    """Adds what others add under the root outside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))


class Scaled(Rms):
    """Normalises the product with the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.weight)


NORMS: list[Callable[[int], nn.Module]] = [Rms, FromOne, Layer]


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.start = nn.Linear(width, width)
        self.norms = nn.ModuleList(norm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return x


def workload(norm: Callable[[int], nn.Module], width: int = 16, rows: int = 8) -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Net(norm, width)

    return Workload(
        model=model,
        batch=lambda batch_size: numbers(batch_size, rows, width),
        sizes={"batch_size": 4},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=torch.optim.SGD,
    )


def attached(model: nn.Module, *modules: str) -> AttachedProgram:
    live = AttachedProgram(model, None)
    FusedNorms().attach(live, FusedNormSetting(modules=modules))
    return live


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_the_same_but_for_rounding(norm: Callable[[int], nn.Module]) -> None:
    plain = workload(norm)
    expected = gradients(plain, steps=2)
    found = gradients(FusedNorms().apply(plain, FusedNormSetting()), steps=2)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_what_it_was(dtype: torch.dtype) -> None:
    model, x = Rms(64).to(dtype), numbers(4, 64).to(dtype)
    expected = model(x)
    attached(model)
    found = model(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected)


def test_autocast_gives_the_dtypes_that_it_gave() -> None:
    model, x = Rms(64), numbers(4, 64)
    live = attached(model)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(x.to(dtype))
            expected = plain_class(model).forward(model, x.to(dtype))
        assert found.dtype is expected.dtype
        torch.testing.assert_close(found, expected)
    live.undo()
    model = Rms(64).bfloat16()
    attached(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("kind", [Outside, Scaled, nn.RMSNorm, nn.LayerNorm])
def test_what_computes_something_else_or_is_fused_already_is_left(kind: Callable[[int], nn.Module]) -> None:
    with pytest.raises(UsageError, match="has no hand-written norms"):
        attached(Net(kind))


def test_named_modules_alone() -> None:
    model = Net(Rms)
    attached(model, "norms.1")
    assert [len(surroundings_of(norm)) for norm in model.norms] == [0, 1, 0]
    with pytest.raises(UsageError, match=r"'layers\.0' is not a hand-written norm"):
        attached(Net(Rms), "layers.0")


def test_names_copies_pickles_and_undo() -> None:
    model, x = Net(Rms), numbers(2, 5, 16)
    keys, plain = list(model.state_dict()), model(x)
    live = attached(model)
    assert list(model.state_dict()) == keys
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other.norms[0].weight.mul_(2)
        assert not torch.equal(other(x), model(x)), "each its own weight"
    live.undo()
    assert torch.equal(model(x), plain) and type(model.norms[0]) is Rms


def test_the_normalised_input_is_not_kept_on_the_card(gpu: VirtualGPU) -> None:
    plain = workload(Rms, width=512, rows=1024)
    fused = FusedNorms().apply(plain, FusedNormSetting())
    # Three norms: each kept its input and the normalised one, 4 x 1024 x 512 floats each. Both keep one float a row.
    assert kept_bytes(plain) - kept_bytes(fused) == 3 * 4 * 1024 * 512 * 4


def test_in_bfloat16_the_input_is_kept_in_place_of_its_copy_in_float32_and_the_normalised_one(
    gpu: VirtualGPU,
) -> None:
    plain = workload(Rms, width=512, rows=1024)
    half = Workload(
        model=lambda: plain.model().bfloat16(),
        batch=lambda batch_size: plain.batch(batch_size=batch_size).bfloat16(),
        sizes=plain.sizes,
        loss=plain.loss,
        optimizer=plain.optimizer,
    )
    fused = FusedNorms().apply(half, FusedNormSetting())
    assert kept_bytes(half) - kept_bytes(fused) == 3 * 4 * 1024 * 512 * (4 + 2 - 2)


def test_the_norms_of_transformers_are_recognised(gpu: VirtualGPU) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    model = transformers.LlamaForCausalLM(config).cuda()
    profile = Profile(model=model, optimizer=None, sizes={}, trains=True)
    assert list(FusedNorms().options(profile)) == [FusedNormSetting()]
    attached(model)
    assert sum(bool(surroundings_of(module)) for module in model.modules()) == 5


def test_options_are_for_training_on_a_card() -> None:
    technique = FusedNorms()

    def count(model: nn.Module, *, trains: bool = True, device: str = "cuda") -> int:
        profile = Profile(model=model, optimizer=None, sizes={}, trains=trains, device_type=device)
        return len(list(technique.options(profile)))

    assert count(Net(Rms)) == 1
    assert count(Net(Rms), trains=False) == count(Net(Rms), device="cpu") == count(Net(nn.LayerNorm)) == 0
    assert technique.promise(FusedNormSetting()).numerics is Numerics.ROUNDING
