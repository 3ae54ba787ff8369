"""The compiler as a technique: results, budgets that do not mix, copies and undo."""

from __future__ import annotations

import copy
import importlib
import io
import shutil
import warnings
from typing import Any

import pytest
import torch
from tests.techniques.peaks import kept_bytes
from tests.techniques.test_fused_norms import Rms
from tests.techniques.test_fused_norms import workload as norms
from tests.techniques.toys import all_toys, gradients, numbers
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques import (
    AttachedProgram,
    BlockOp,
    Choice,
    ModelBlock,
    Numerics,
    Profile,
    setting_from_plain,
    setting_to_plain,
    with_choices,
)
from vramfit.techniques.compiled import Compile, CompileMode, CompileSetting
from vramfit.techniques.early_release import EarlyRelease, EarlyReleaseSetting
from vramfit.techniques.fused_norms import FusedNorms, FusedNormSetting
from vramfit.techniques.in_place_activations import InPlaceActivations, InPlaceSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")

builds = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler on the CPU")


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Load it before a test does, without its warnings: parts of torch are deprecated by others of its parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "torch._inductor.compile_fx"):
            importlib.import_module(name)


def attached(model: nn.Module, **setting: Any) -> AttachedProgram:
    live = AttachedProgram(model, None)
    Compile().attach(live, CompileSetting(**setting))
    return live


def close(plain: Workload, **setting: Any) -> None:
    expected, found = gradients(plain), gradients(Compile().apply(plain, CompileSetting(**setting)))
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


@builds
@pytest.mark.slow
def test_generated_code_gives_the_same_gradients() -> None:
    close(all_toys()["mlp"], memory_budget=0.5)


class Dropping(nn.Module):
    """Gives what dropout let through beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = nn.functional.dropout(torch.tanh(self.a(x)), 0.5, self.training)
        return self.b(hidden), hidden


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("budget", [1.0, 0.0])
@pytest.mark.parametrize("toy", ["mlp", "frozen-trunk"])
def test_gradients_are_the_same_but_for_rounding(toy: str, budget: float) -> None:
    close(all_toys()[toy], memory_budget=budget)


def check_masks(**setting: Any) -> None:
    """Compare gradients with those that follow from what dropout let through."""
    live = attached(Dropping(), **setting)
    model, x = live.model, numbers(64, 16)
    output, hidden = model(x)
    output.sum().backward()
    assert model.b.weight.grad is not None and model.a.bias.grad is not None
    torch.testing.assert_close(model.b.weight.grad, hidden.detach().sum(0).expand(8, 32))
    slope = 1 - torch.tanh(model.a(x)).square()
    expected = (model.b.weight.sum(0) * 2 * (hidden != 0) * slope).sum(0)
    torch.testing.assert_close(model.a.bias.grad, expected.detach())


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_the_backward_pass_has_the_mask_of_the_forward_pass(budget: float) -> None:
    check_masks(memory_budget=budget)


@builds
@pytest.mark.slow
def test_so_it_has_where_inductor_draws_itself() -> None:
    check_masks(memory_budget=0.0, redraws=True)


@pytest.mark.usefixtures("interpreted")
def test_what_other_techniques_surround_is_compiled_with_it() -> None:
    for technique, setting, plain in (
        (InPlaceActivations(), InPlaceSetting(), all_toys()["mlp"]),
        (EarlyRelease(), EarlyReleaseSetting(outputs=("logits",)), all_toys()["mlp"]),
        (FusedNorms(), FusedNormSetting(), norms(Rms)),
    ):
        surrounded = with_choices(plain, (Choice(technique=technique, setting=setting),))
        both = Compile().apply(surrounded, CompileSetting())
        expected, found = gradients(surrounded), gradients(both)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


@pytest.mark.usefixtures("interpreted")
def test_settings_of_the_process_stay_what_they_were() -> None:
    import torch._functorch.config as functorch

    live = attached(mlp(), memory_budget=0.5)
    live.model(numbers(2, 8)).sum().backward()
    assert functorch.activation_memory_budget == 1.0


@pytest.mark.usefixtures("interpreted")
def test_copies_and_pickles_are_plain_and_the_undo_too() -> None:
    model, x = mlp(), numbers(2, 8)
    keys, expected = list(model.state_dict()), model(x)
    live = attached(model)
    assert list(model.state_dict()) == keys and model._compiled_call_impl is not None
    torch.testing.assert_close(model(x), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other._compiled_call_impl is None
        assert torch.equal(other(x), expected)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), expected)
    live.undo()
    assert model._compiled_call_impl is None
    assert torch.equal(model(x), expected)


def test_named_modules_are_compiled_each_by_itself() -> None:
    model = mlp()
    live = attached(model, modules=("0", "2"))
    assert [module._compiled_call_impl is not None for module in model] == [True, False, True]
    assert model._compiled_call_impl is None
    live.undo()
    assert all(module._compiled_call_impl is None for module in model)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"memory_budget": 1.5}, r"memory_budget of compile is 1\.5"),
        ({"modules": ("7",)}, "the model has no module '7'"),
    ],
)
def test_what_cannot_be_is_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attached(mlp(), **setting)


def test_a_compiled_model_is_refused() -> None:
    model = mlp()
    attached(model)
    for compiled in (model, torch.compile(mlp())):
        with pytest.raises(UsageError, match="is compiled already"):
            attached(compiled)


def test_budgets_in_one_process_do_not_mix_on_the_card(gpu: VirtualGPU) -> None:
    rows, width = 1024, 256

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(x)))

    plain = Workload(
        model=lambda: nn.Sequential(Unit(), Unit()),
        batch=lambda batch_size: torch.zeros(batch_size, width),
        sizes={"batch_size": rows},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.SGD,
    )

    def kept(budget: float) -> int:
        return kept_bytes(Compile().apply(plain, CompileSetting(memory_budget=budget)))

    row = rows * width * 4
    # Eager and compiled: what GELU takes and gives, four rows wide each, and what the second unit is given.
    assert kept_bytes(plain) == kept(1.0) == (2 * (4 + 4) + 1) * row
    # All but the inputs of the graph, which the batch and the parameters are, is computed again; in one graph, though
    # the model is surrounded.
    plain = EarlyRelease().apply(plain, EarlyReleaseSetting(outputs=("none",)))
    assert kept(0.0) == 0


@pytest.mark.parametrize(
    ("redraws", "marks", "kept"),
    [(False, True, 4096 * 32 * (4 + 1)), (True, True, 512), (True, False, 4096 * 32 * (4 + 4 + 1))],
)
def test_what_was_drawn_is_kept_on_the_card(
    gpu: VirtualGPU, monkeypatch: pytest.MonkeyPatch, redraws: bool, marks: bool, kept: int
) -> None:
    monkeypatch.setattr("vramfit.techniques.compiled.marks_hold", lambda: marks)
    plain = Workload(
        model=Dropping,
        batch=lambda batch_size: torch.zeros(batch_size, 16),
        sizes={"batch_size": 4096},
        loss=lambda model, batch: model(batch)[0].sum(),
        optimizer=torch.optim.SGD,
    )
    setting = CompileSetting(memory_budget=0.0, redraws=redraws)
    # Dropout's result and mask, or seeds; or all that is kept without a budget.
    assert kept_bytes(Compile().apply(plain, setting)) == kept


def test_options_are_budgets_on_a_card() -> None:
    technique = Compile()

    def options(model: nn.Module, **facts: Any) -> list[CompileSetting]:
        profile = Profile(model=model, optimizer=None, sizes={}, **({"trains": True} | facts))
        return list(technique.options(profile))

    budgets = [1.0, 0.5, 0.25, 0.0]
    assert [setting.memory_budget for setting in options(mlp())] == budgets
    assert [setting.redraws for setting in options(nn.Dropout(0.1))] == [False] * 4 + [True] * 4
    op = BlockOp(name="native_dropout", bytes=8, seconds=0.0, flops=0, kept=True, random=True)
    block = ModelBlock(
        path="",
        kind="ModelBlock",
        index=0,
        like=0,
        ops=(op,),
        input_bytes=0,
        kept_bytes=0,
        forward_seconds=0.0,
        backward_seconds=0.0,
    )
    assert len(options(mlp(), blocks=(block,))) == 8
    assert options(mlp(), trains=False) == [CompileSetting()]
    assert options(mlp(), device_type="cpu") == []
    assert technique.promise(CompileSetting()).numerics is Numerics.ROUNDING
    assert technique.promise(CompileSetting(redraws=True)).numerics is Numerics.APPROXIMATE
    setting = CompileSetting(memory_budget=0.5, mode=CompileMode.REDUCE_OVERHEAD)
    plain = setting_to_plain(setting)
    assert plain == {"memory_budget": 0.5, "mode": "reduce-overhead"}
    assert setting_from_plain(technique, plain) == setting
