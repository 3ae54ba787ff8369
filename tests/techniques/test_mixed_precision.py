"""Mixed precision: the same as the recipe written by hand, in values and in bytes."""

from __future__ import annotations

import copy
import gc
import io
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.toys import (
    Language,
    all_toys,
    class_loss,
    classes,
    gradients,
    language_loss,
    losses,
    numbers,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Profile, live_of, setting_from_plain, setting_to_plain
from vramfit.techniques.core.surround import surroundings_of
from vramfit.techniques.mixed_precision import HalfType, MixedPrecision, MixedPrecisionSetting
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Batch, State, Workload

BFLOAT16, FLOAT16 = MixedPrecisionSetting(), MixedPrecisionSetting(dtype=HalfType.FLOAT16)

# Under autocast torch gives LSTM layers to oneDNN, which has none in bfloat16 for CPUs without AVX-512.
TOYS = [
    pytest.param(
        toy,
        marks=pytest.mark.skipif(
            toy == "lstm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
            reason="torch itself has no LSTM under autocast to bfloat16 on this CPU",
        ),
    )
    for toy in sorted(all_toys())
]


def by_hand(workload: Workload, dtype: torch.dtype, device: str = "cpu") -> Workload:
    """The recipe of torch's documentation, in a step of its own."""

    def step(state: State, batch: Batch) -> torch.Tensor:
        assert workload.loss is not None and state.optimizer is not None
        if "scaler" not in state.extra and dtype is torch.float16:
            state.extra["scaler"] = torch.amp.GradScaler(device)
        scaler = state.extra.get("scaler")
        with torch.autocast(device, dtype):
            loss = workload.loss(state.model, batch)
        if scaler is None:
            loss.backward()
            state.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(state.optimizer)
            scaler.update()
        state.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return replace(workload, step=step)


@pytest.mark.parametrize("toy", TOYS)
def test_gradients_are_those_of_the_recipe(toy: str) -> None:
    plain = all_toys()[toy]
    expected = gradients(by_hand(plain, torch.bfloat16), steps=2)
    found = gradients(MixedPrecision().apply(plain, BFLOAT16), steps=2)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("toy", ["language-tied", "batch-norm", "mlp"])
def test_float16_takes_the_scaled_steps_of_the_recipe(toy: str) -> None:
    plain = all_toys()[toy]
    found = losses(MixedPrecision().apply(plain, FLOAT16), steps=5)
    assert found == losses(by_hand(plain, torch.float16), steps=5)
    assert found[-1] < found[0]


@pytest.mark.parametrize("toy", TOYS)
def test_gradients_are_near_those_of_float32(toy: str) -> None:
    plain = all_toys()[toy]
    expected, found = gradients(plain), gradients(MixedPrecision().apply(plain, BFLOAT16))
    apart = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
    whole = torch.cat([expected[name].flatten() for name in expected])
    # 2^-8 for each product, a few of them one after the other. Batch norm takes the mean away and the part along the
    # output, so that what is left of a small batch's gradient is a small difference of large numbers.
    bound = 0.1 if toy == "batch-norm" else 0.02
    assert 0 < apart.norm() < bound * whole.norm()


@pytest.mark.parametrize("setting", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("toy", ["language-untied", "batch-norm", "two-losses"])
def test_the_loss_falls_as_in_float32(toy: str, setting: MixedPrecisionSetting) -> None:
    plain = all_toys()[toy]
    expected = losses(plain, steps=50)
    found = losses(MixedPrecision().apply(plain, setting), steps=50)
    fallen = expected[0] - expected[-1]
    assert fallen > 0.1
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 0.01 * fallen


class Scores(nn.Module):
    """Says in which types it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.score = nn.Linear(8, 8), nn.Linear(8, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        body = self.body(x)
        score = self.score(body)
        self.seen[:] = [body.dtype, score.dtype]
        return score


@pytest.mark.parametrize(
    "setting", [MixedPrecisionSetting(islands=("score",)), MixedPrecisionSetting(island_kinds=("Linear",))]
)
def test_islands_compute_in_float32(setting: MixedPrecisionSetting) -> None:
    model = Scores()
    live = AttachedProgram(model, None)
    MixedPrecision().attach(live, setting)
    model(torch.randn(2, 8))
    assert model.seen == [torch.bfloat16 if setting.islands else torch.float32, torch.float32]
    live.undo()
    model(torch.randn(2, 8))
    assert model.seen == [torch.float32, torch.float32]
    assert type(model) is Scores and type(model.score) is nn.Linear


@pytest.mark.parametrize("islands", [("score",), ("again",), ("again", "score")])
def test_an_island_may_have_several_names(islands: tuple[str, ...]) -> None:
    model = Scores()
    model.again = model.score
    MixedPrecision().attach(AttachedProgram(model, None), MixedPrecisionSetting(islands=islands))
    model(torch.randn(2, 8))
    assert model.seen == [torch.bfloat16, torch.float32]
    assert len(surroundings_of(model.score)) == 1


def test_an_island_has_the_value_of_float32_products() -> None:
    model, x = Scores(), torch.randn(2, 8)
    live = AttachedProgram(model, None)
    MixedPrecision().attach(live, MixedPrecisionSetting(islands=("score",)))
    with torch.autocast("cpu", torch.bfloat16):
        body = F.linear(x, model.body.weight, model.body.bias)
    assert torch.equal(model(x), F.linear(body.float(), model.score.weight, model.score.bias))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            MixedPrecisionSetting(islands=("scores",)),
            "the model has no module 'scores'. Did you mean score?",
        ),
        (
            MixedPrecisionSetting(island_kinds=("Softmax",)),
            "the model has no module of class 'Softmax'. Name one that model.named_modules() shows",
        ),
    ],
)
def test_islands_that_are_not_there_are_refused(setting: MixedPrecisionSetting, message: str) -> None:
    model = Scores()
    with pytest.raises(UsageError) as raised:
        MixedPrecision().attach(AttachedProgram(model, None), setting)
    assert str(raised.value) == message
    assert type(model) is Scores


class Output(OrderedDict[str, Any]):
    """A dict of a class of its own."""


class Pair(NamedTuple):
    """A named tuple."""

    first: torch.Tensor
    second: torch.Tensor


class Containers(nn.Module):
    """Gives its output in containers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Output:
        y = self.linear(x)
        return Output(pair=Pair(y, y.argmax(-1)), many=[y, None], other={"x": x, "n": 3}, whole=x.long())


def test_a_loop_of_ones_own_gets_outputs_in_float32() -> None:
    model = Containers()
    MixedPrecision().attach(AttachedProgram(model, None), BFLOAT16)
    x = torch.randn(2, 4)
    output = model(x)
    assert type(output) is Output and type(output["pair"]) is Pair
    assert output["pair"].first.dtype is output["many"][0].dtype is torch.float32
    assert output["pair"].second.dtype is torch.int64 and output["many"][1] is None
    assert output["other"]["x"] is x and output["other"]["n"] == 3
    assert not torch.equal(output["many"][0], model.linear(x))  # it was computed in half precision


def test_outputs_stay_in_half_precision_where_the_loop_wants_them() -> None:
    model = Containers()
    MixedPrecision().attach(AttachedProgram(model, None), MixedPrecisionSetting(float32_outputs=False))
    assert model(torch.randn(2, 4))["pair"].first.dtype is torch.bfloat16
    other = Containers()
    MixedPrecision().attach(AttachedProgram(other, None), BFLOAT16)
    with torch.autocast("cpu", torch.bfloat16):
        assert other(torch.randn(2, 4))["pair"].first.dtype is torch.bfloat16
    with torch.no_grad():
        assert other(torch.randn(2, 4))["pair"].first.dtype is torch.float32


def test_copies_and_files_compute_alike_and_undo_leaves_float32() -> None:
    model, x = all_toys()["mlp"].model().eval(), numbers(3, 16)
    plain, keys = model(x), list(model.state_dict())
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1))
    MixedPrecision().attach(live, replace(FLOAT16, islands=("5",)))
    assert isinstance(live.scaler, torch.amp.GradScaler)
    half, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), half)
    assert not torch.equal(half, plain)
    assert list(model.state_dict()) == keys
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    live.undo()
    assert live.scaler is None and not live.loss_surroundings
    assert torch.equal(model(x), plain)


def test_the_last_scale_is_used_and_steps_that_overflow_are_left_out() -> None:
    model = nn.Linear(4, 2)
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1))
    MixedPrecision().attach(live, replace(FLOAT16, initial_scale=2.0**40))
    before = model.weight.detach().clone()
    live.backward(1e4 * model(torch.ones(2, 4)).sum())
    live.step()
    assert torch.equal(model.weight, before)
    assert isinstance(live.scaler, torch.amp.GradScaler) and live.scaler.get_scale() == 2.0**39
    for _ in range(40):
        live.backward(model(torch.ones(2, 4)).sum())
        live.step(clip_norm=1.0)
    assert not torch.equal(model.weight, before)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self, inner: Language, again: bool) -> None:
        super().__init__()
        self.inner, self.again = inner, again

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(tokens)
        for layer in self.inner.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return self.inner.head(self.inner.norm(x))


def test_recomputed_blocks_compute_in_half_precision_and_islands_do_not() -> None:
    def workload(again: bool) -> Workload:
        def model() -> nn.Module:
            torch.manual_seed(0)
            return Checkpointed(Language(), again)

        return replace(all_toys()["language-tied"], model=model)

    setting = MixedPrecisionSetting(islands=("inner.layers.1.down",))
    expected = gradients(MixedPrecision().apply(workload(False), setting))
    found = gradients(MixedPrecision().apply(workload(True), setting))
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_float16_needs_a_step_that_scales() -> None:
    own = replace(all_toys()["mlp"], step=lambda state, batch: None)
    with pytest.raises(UsageError, match="float16 needs scaled losses"):
        MixedPrecision().apply(own, FLOAT16)
    model = nn.Linear(2, 2)
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1))
    live.steps_in_backward = True
    with pytest.raises(UsageError, match="float16 scales gradients before the step"):
        MixedPrecision().attach(live, FLOAT16)
    with pytest.raises(UsageError, match="no such parameter"):
        MixedPrecision().attach(AttachedProgram(nn.Linear(2, 2, dtype=torch.bfloat16), None), BFLOAT16)


def test_options_follow_the_card() -> None:
    def options(
        device: str,
        capability: tuple[int, int],
        *,
        own_step: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> list[MixedPrecisionSetting]:
        profile = Profile(
            model=nn.Linear(2, 2, dtype=dtype),
            optimizer=None,
            sizes={"batch_size": 1},
            trains=True,
            own_step=own_step,
            device_type=device,
            capability=capability,
        )
        return list(MixedPrecision().options(profile))

    assert options("cuda", (8, 0)) == [BFLOAT16, FLOAT16]
    assert options("cuda", (7, 5)) == [FLOAT16]
    assert options("cuda", (9, 0), own_step=True) == [BFLOAT16]
    assert options("cuda", (5, 2)) == []
    assert options("cpu", (0, 0)) == [BFLOAT16]
    assert options("cuda", (9, 0), dtype=torch.float16) == []


def test_settings_go_through_plain_values_and_back() -> None:
    setting = MixedPrecisionSetting(dtype=HalfType.FLOAT16, islands=("head",), initial_scale=1024.0)
    plain = setting_to_plain(setting)
    assert plain == {"dtype": "float16", "islands": ["head"], "initial_scale": 1024.0}
    assert setting_from_plain(MixedPrecision(), plain) == setting
    assert "11 bits" in MixedPrecision().promise(setting).note
    assert "8 bits" in MixedPrecision().promise(BFLOAT16).note


# -- bytes on the virtual GPU ------------------------------------------------------------------------------------------


def _perceptron(width: int = 1024) -> Workload:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(256, width),
            nn.ReLU(),
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )

    return Workload(
        model=model,
        batch=lambda batch_size: (numbers(batch_size, 256), classes(10, batch_size)),
        sizes={"batch_size": 8192},
        loss=class_loss,
        optimizer=torch.optim.AdamW,
    )


def _decoder() -> Workload:
    return Workload(
        model=lambda: Language(layers=3, width=256, words=8000),
        batch=lambda batch_size: torch.zeros(batch_size, 256, dtype=torch.long),
        sizes={"batch_size": 8},
        loss=language_loss,
        optimizer=torch.optim.AdamW,
    )


def _peaks(workload: Workload) -> tuple[int, int]:
    """Most bytes allocated and reserved over three steps on a fresh card."""
    gc.collect()
    with VirtualGPU("RTX 4090", alloc_conf="", context_bytes=256 << 20):
        state = workload.start("cuda")
        for _ in range(3):
            workload.run_step(state, workload.sizes)
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("make", [_perceptron, _decoder])
@pytest.mark.parametrize("setting", [BFLOAT16, FLOAT16])
def test_a_workload_holds_the_bytes_of_the_recipe(
    make: Callable[[], Workload], setting: MixedPrecisionSetting
) -> None:
    found = _peaks(MixedPrecision().apply(make(), setting))
    assert found == _peaks(by_hand(make(), setting.dtype.dtype, "cuda"))
    assert found < _peaks(make())


def test_inference_holds_the_bytes_of_the_recipe() -> None:
    plain = replace(_decoder(), loss=None, optimizer=None)

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain.model()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return self.inner(tokens)  # type: ignore[no-any-return]

    applied = MixedPrecision().apply(plain, FLOAT16)
    assert live_of(applied.start("cpu")).scaler is None  # type: ignore[union-attr]
    assert _peaks(MixedPrecision().apply(plain, BFLOAT16)) == _peaks(replace(plain, model=Inside))


class ChoosingRouter(nn.Linear):
    """Stands for the routers of transformers."""


def test_routers_are_islands_of_every_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ChoosingRouter(4, 2))
    profile = Profile(model=model, optimizer=None, sizes={"n": 1}, trains=True)
    for model_of, kinds in ((model, ("ChoosingRouter",)), (model[0], ())):
        offered = list(MixedPrecision().options(replace(profile, model=model_of)))
        assert [setting.dtype for setting in offered] == [HalfType.BFLOAT16, HalfType.FLOAT16]
        assert {setting.island_kinds for setting in offered} == {kinds}
