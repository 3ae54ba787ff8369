"""Half precision for inference: islands that are found, what they cost, and the undo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.techniques.peaks import peak_bytes
from tests.techniques.resnet import ResNet
from tests.techniques.samples import inference, output_of, profile_with
from tests.techniques.toys import Language, Recurrent, Unet, numbers, tokens
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
from vramfit.techniques.batch_norm_folding import BatchNormFolding, find_foldable
from vramfit.techniques.half_inference import (
    HalfInference,
    HalfInferenceSetting,
    half_setting,
    ruled_kinds,
)
from vramfit.techniques.half_inference.island_search import (
    Float32Products,
    IslandSearchError,
    find_float32_islands,
    relative_error,
)
from vramfit.techniques.low_precision_training import LowPrecisionTrainingSetting
from vramfit.techniques.mixed_precision import HalfType
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.torch_versions

TECHNIQUE = HalfInference()
PLAIN = HalfInferenceSetting()
HALVES = (torch.float16, torch.bfloat16)


class Block(nn.Module):
    """A layer whose result may be far above what float16 holds, until a norm brings it back."""

    def __init__(self, loud: bool) -> None:
        super().__init__()
        self.up, self.act, self.norm = nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64)
        self.down = nn.Linear(64, 32)
        if loud:
            self.up.weight.data *= 3e5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.act(self.up(x))))


class Loud(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(16, 32), *(Block(loud=number == 2) for number in range(5)))
        self.register_buffer("scale", torch.full((1,), 3.0))
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) * self.scale


class Coordinates(nn.Module):
    """Reads positions of large values with small differences, as clocks and point clouds have them."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.head = nn.Linear(3, 16, bias=False), nn.Linear(16, 4)
        self.local.weight.data[:, 1] = -self.local.weight.data[:, 0]
        self.local.weight.data[:, 2] = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.head(self.local(points))


def loud() -> nn.Module:
    torch.manual_seed(0)
    return Loud().eval()


def attached(model: nn.Module, setting: HalfInferenceSetting = PLAIN) -> AttachedProgram:
    live = AttachedProgram(model, None)
    live.attach([Choice(technique=TECHNIQUE, setting=setting)])
    return live


@torch.no_grad()
def test_what_overflows_is_found_and_nothing_else_stays_in_float32() -> None:
    model, x = loud(), numbers(4, 16)
    found = find_float32_islands(model, x, torch.float16)
    assert found.plain_error == float("inf")
    assert set(found.islands) == {f"blocks.3.{name}" for name in ("up", "act", "norm")}
    assert found.error <= 0.01
    assert set(found.handing_on) == {"blocks.3.up", "blocks.3.act"}
    plain = model(x)
    live = attached(model, half_setting(model, x))
    with Float32Products():
        assert relative_error(model(x), plain) == pytest.approx(found.error)
    assert model.blocks[3].up.weight.dtype is torch.float32
    assert model.blocks[2].up.weight.dtype is model.scale.dtype is torch.float16
    assert model.inv_freq.dtype is torch.float32
    live.undo()
    assert torch.equal(model(x), plain)


def test_bfloat16_has_the_range_and_needs_no_islands() -> None:
    found = find_float32_islands(loud(), numbers(4, 16), torch.bfloat16, tolerance=0.02)
    assert found.islands == () and 1e-4 < found.error == found.plain_error < 0.02 and found.runs == 1


@torch.no_grad()
def test_an_island_reads_the_callers_inputs_with_all_their_bits() -> None:
    torch.manual_seed(0)
    model = Coordinates()
    points = torch.full((8, 3), 1000.0)
    points[:, 1] -= torch.arange(8) / 8 + 0.05  # differences that bfloat16 does not hold at this size
    plain = model(points)
    found = find_float32_islands(model, points, torch.bfloat16)
    assert found.plain_error > 0.1 and found.islands == ("local",) and found.error < 0.01
    attached(model, HalfInferenceSetting(dtype=HalfType.BFLOAT16, islands=("local",)))
    assert relative_error(model(points), plain) < 0.01


@torch.no_grad()
def test_the_error_is_that_of_a_brute_comparison() -> None:
    """Beside torch's own cast of the whole model, in bfloat16, where nothing stays in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    x = numbers(32, 16)
    plain, half = model(x), copy.deepcopy(model).bfloat16()(x.bfloat16()).float()
    found = find_float32_islands(model, x, torch.bfloat16, tolerance=0.1)
    assert found.error == pytest.approx(float((half - plain).norm() / plain.norm()), rel=1e-6)
    attached(model, HalfInferenceSetting(dtype=HalfType.BFLOAT16))
    assert torch.equal(model(x), half)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: Language(), tokens(2)),
        (lambda: Recurrent(), numbers(2, 6, 12)),
        (lambda: Unet(), numbers(2, 1, 8, 8, 8)),
        (lambda: ResNet((1, 1, 1, 1), 8, 10), numbers(2, 3, 32, 32)),
    ],
    ids=["language", "lstm", "unet-3d", "resnet"],
)
@torch.no_grad()
def test_outputs_stay_close_and_the_undo_is_exact(
    make: type[nn.Module], batch: torch.Tensor, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model(batch)
    setting = half_setting(model, batch, dtype=dtype, tolerance=0.02)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    live = attached(model, setting)
    for one in (model, copy.deepcopy(model)):
        result = one(batch)
        assert result.dtype is torch.float32 and relative_error(result, plain) <= 0.02
    live.undo()
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert torch.equal(model(batch), plain)


def test_without_float32_values_on_the_host_the_undo_widens() -> None:
    model = loud()
    before = model.blocks[0].weight.clone()
    live = attached(model, HalfInferenceSetting(restores=False))
    assert live.pageable_bytes == 0
    live.undo()
    assert torch.equal(model.blocks[0].weight, before.half().float())
    live = attached(model)
    weights = [*model.parameters(), model.scale]
    assert live.pageable_bytes == sum(4 * one.numel() for one in weights)


def test_training_mode_and_the_model_are_left_as_they_were() -> None:
    model = loud().train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    find_float32_islands(model, numbers(4, 16), torch.float16)
    assert modes == [module.training for module in model.modules()]
    assert type(model.blocks[3]) is Block


@torch.no_grad()
def test_batch_norms_are_folded_before_weights_are_rounded() -> None:
    torch.manual_seed(0)
    model = ResNet((1, 1, 1, 1), 8, 10).eval()
    x = numbers(2, 3, 32, 32)
    plain = model(x)
    fold = Choice(technique=BatchNormFolding(), setting=find_foldable(model, x))
    half = Choice(technique=TECHNIQUE, setting=HalfInferenceSetting(dtype=HalfType.BFLOAT16))
    weights = []
    for order in ((half, fold), (fold, half)):
        live = AttachedProgram(model, None)
        live.attach(order)
        weights.append(model.stem[0].weight.clone())
        assert weights[-1].dtype is torch.bfloat16
        assert relative_error(model(x), plain) < 0.02
        live.undo()
        assert torch.equal(model(x), plain)
    assert torch.equal(*weights)


@torch.no_grad()
def test_a_folded_pair_of_islands_still_works() -> None:
    torch.manual_seed(0)
    model = ResNet((1, 1, 1, 1), 8, 10).eval()
    x = numbers(2, 3, 32, 32)
    plain = model(x)
    fold = Choice(technique=BatchNormFolding(), setting=find_foldable(model, x))
    setting = HalfInferenceSetting(dtype=HalfType.BFLOAT16, islands=("stem.0", "stages.0.0.conv1"))
    live = AttachedProgram(model, None)
    live.attach([fold, Choice(technique=TECHNIQUE, setting=setting)])
    assert relative_error(model(x), plain) < 0.02


class Nan(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 0


class Count(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.argmax(1)


def test_a_search_that_comes_to_no_end_says_why() -> None:
    x = numbers(4, 16)
    with pytest.raises(IslandSearchError, match="outputs in float32 are not finite"):
        find_float32_islands(Nan(), x, torch.float16)
    with pytest.raises(IslandSearchError, match="returns no floating tensors"):
        find_float32_islands(Count(), x, torch.float16)
    with pytest.raises(IslandSearchError, match="time for comparing"):
        find_float32_islands(loud(), x, torch.float16, seconds=0.0)
    with pytest.raises(IslandSearchError, match="only with all weights in float32") as raised:
        find_float32_islands(nn.Sequential(nn.Linear(16, 4)), x, torch.float16, tolerance=1e-9)
    assert raised.value.refuted


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dtype": torch.float32}, "torch.float32 is no half precision"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"seconds": "long"}, "seconds='long'"),
    ],
)
def test_wrong_arguments_are_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        half_setting(nn.Linear(4, 4), torch.ones(2, 4), **wrong)


def test_what_cannot_be_cast_is_refused() -> None:
    with pytest.raises(UsageError, match="no float32 parameter"):
        attached(nn.Linear(2, 2).double())
    with pytest.raises(UsageError, match=r"no module 'blocks\.9'"):
        attached(loud(), HalfInferenceSetting(islands=("blocks.9",)))
    model = Language()
    with pytest.raises(UsageError, match="shared with an island of float32"):
        attached(model, HalfInferenceSetting(islands=("head",)))
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="half-inference is for inference"):
        AttachedProgram(model, optimizer).attach([Choice(technique=TECHNIQUE, setting=PLAIN)])
    other = Choice(technique=find_technique("low-precision-training"), setting=LowPrecisionTrainingSetting())
    with pytest.raises(UsageError, match="half-inference cannot be combined"):
        check_together((other, Choice(technique=TECHNIQUE, setting=PLAIN)))


def test_options_follow_the_card_and_what_was_measured() -> None:
    model, x = loud(), numbers(4, 16)
    (best,) = TECHNIQUE.options(profile_with(model, x))
    assert best.dtype is HalfType.BFLOAT16 and best.islands == () and best.error is not None
    (older,) = TECHNIQUE.options(profile_with(model, x, capability=(7, 5)))
    assert older.dtype is HalfType.FLOAT16 and len(older.islands) == 3
    assert not list(TECHNIQUE.options(profile_with(model, x, capability=(5, 0))))
    assert not list(TECHNIQUE.options(profile_with(model, x, trains=True)))
    assert not list(TECHNIQUE.options(profile_with(model.half(), x)))
    (small,) = TECHNIQUE.options(profile_with(loud(), x, host_bytes=100))
    assert not small.restores


def test_without_a_sample_there_are_rules_and_the_promise_says_so() -> None:
    (ruled,) = TECHNIQUE.options(profile_with(loud(), None, samples=None))
    assert ruled.dtype is HalfType.BFLOAT16 and ruled.island_kinds == ("LayerNorm",)
    assert "was not measured" in TECHNIQUE.promise(ruled).note
    measured = HalfInferenceSetting(islands=("a.b",), error=0.00123)
    assert "but for a.b; outputs of a sample differed by 0.0012" in TECHNIQUE.promise(measured).note
    assert TECHNIQUE.promise(measured).numerics is Numerics.PRECISION
    assert setting_from_plain(TECHNIQUE, setting_to_plain(measured)) == measured
    assert ruled_kinds(nn.Sequential(nn.Softmax(-1), nn.CrossEntropyLoss(), nn.Linear(2, 2))) == (
        "CrossEntropyLoss",
        "Softmax",
    )


def test_a_workload_stays_close() -> None:
    plain = inference(Loud, lambda count: numbers(count, 16))
    planned = TECHNIQUE.apply(plain, HalfInferenceSetting(dtype=HalfType.BFLOAT16))
    assert relative_error(output_of(planned), output_of(plain)) < 0.02
    live = live_of(planned.start("cpu"))
    assert live is not None
    live.undo()


def test_half_of_the_bytes_on_the_card(gpu: VirtualGPU) -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))

    plain = inference(model, lambda count: numbers(count, 1024), 512)
    before = peak_bytes(plain)
    half = peak_bytes(TECHNIQUE.apply(plain, PLAIN))
    kept = peak_bytes(TECHNIQUE.apply(plain, HalfInferenceSetting(islands=("1",))))
    weight, rows = 4 * 1024 * 1024, 512 * 1024 * 4
    workspace = before - 4 * weight - 3 * rows
    assert half - workspace <= 2 * weight + 3 * rows
    assert kept - half == pytest.approx(weight // 2, abs=rows * 1.5)
