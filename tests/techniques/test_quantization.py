"""Formats of weights: beside torchao's own modules, the program beside all choices, and the undo."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics, with_choices
from vramfit.techniques.core.samples import SmallSample
from vramfit.techniques.quantization import (
    WeightQuantization,
    WeightQuantizationSetting,
    _bytes_in,
    _searched,
    _weights_table,
    quantised_layers,
)
from vramfit.techniques.quantization.byte_program import (
    FormatProgram,
    FormatTable,
    LayerBytes,
    LayerCall,
    LayerScores,
)
from vramfit.techniques.quantization.gradient_scores import gradient_scores
from vramfit.techniques.quantization.quality import (
    GivenQuality,
    LogitsDivergence,
    logits_of,
    measured,
    measured_alone,
    with_formats,
)
from vramfit.techniques.quantization.quantised_layers import quantise_layers
from vramfit.techniques.quantization.weight_formats import (
    WeightFormat,
    check_card,
    packed_through,
    packed_weight,
    quantisable,
    rounded_weight,
    shared_weights,
    why_not,
)
from vramfit.workload import Workload

ao = pytest.importorskip("torchao.quantization")

CPU = torch.device("cpu")
NONE, INT8, DYNAMIC, INT4, FP8 = (
    WeightFormat.NONE,
    WeightFormat.INT8,
    WeightFormat.INT8_DYNAMIC,
    WeightFormat.INT4,
    WeightFormat.FP8,
)


def made(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).to(dtype).eval()


def inputs(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(20, 64, generator=torch.Generator().manual_seed(1)).to(dtype)


# -- formats ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "config"),
    [
        (INT8, lambda: ao.Int8WeightOnlyConfig()),
        (DYNAMIC, lambda: ao.Int8DynamicActivationInt8WeightConfig()),
        (WeightFormat.FP8_WEIGHT_ONLY, lambda: ao.Float8WeightOnlyConfig()),
    ],
)
def test_a_model_gives_what_torchaos_own_quantize_gives(
    one: WeightFormat, config: Callable[[], object]
) -> None:
    model, other, x = made(), made(), inputs()
    ao.quantize_(other, config())
    live = AttachedProgram(model, None)
    quantise_layers(live, dict.fromkeys(quantisable(model), one), CPU)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("one", list(WeightFormat))
def test_the_undo_leaves_the_same_parameters_and_bits(one: WeightFormat) -> None:
    model, x = made(), inputs()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        before = model(x)
        live = AttachedProgram(model, None)
        quantise_layers(live, dict.fromkeys(quantisable(model), one), CPU)
        changed = model(x)
        live.undo()
        assert torch.equal(changed, before) == (one is NONE)
        assert torch.equal(model(x), before)
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert type(model[0]) is nn.Linear
    assert "extra_repr" not in vars(model[0])


@pytest.mark.parametrize("one", [INT8, INT4, FP8])
def test_what_is_quantised_already_is_no_plain_layer(one: WeightFormat) -> None:
    """Two undos in the wrong order would leave the rounded weight."""
    model = made()
    live = vramfit.quantized(model, formats={"0": one})
    assert set(quantisable(model)) == {"2"}
    with pytest.raises(UsageError, match="0 is no plain linear layer"):
        vramfit.quantized(model, formats={"0": "int8"})
    live.undo()
    live.undo()
    assert set(quantisable(model)) == {"0", "2"}
    assert all(
        torch.equal(one, other) for one, other in zip(model.parameters(), made().parameters(), strict=True)
    )


def test_the_cpus_int4_has_the_kernels_values() -> None:
    """Each value is ``(q - 8) * scale + zero`` for q from 0 to 15, at most half a step away from the weight."""
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    rounded = rounded_weight(weight, INT4)
    for plain, found in zip(weight.view(-1, 128).float(), rounded.view(-1, 128).float(), strict=True):
        assert len(found.unique()) <= 16
        step = (plain.max() - plain.min()) / 15
        # In bfloat16 scale and zero are off by up to 2^-8 of themselves, eight steps away from the middle.
        assert (found - plain).abs().max() <= step * (0.5 + 16 * 2**-8) + plain.abs().max() * 2**-8


def test_rows_packed_apart_are_those_packed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.techniques.quantization.weight_formats._PART", 64 * 32)
    weight = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for one in (INT8, DYNAMIC, WeightFormat.FP8_WEIGHT_ONLY):
        apart, together = packed_through(weight, one, CPU), packed_weight(weight, one)
        names, attributes = together.__tensor_flatten__()  # type: ignore[attr-defined]
        assert apart.shape == together.shape
        assert apart.__tensor_flatten__()[1].keys() == attributes.keys()  # type: ignore[attr-defined]
        for name in names:
            assert torch.equal(getattr(apart, name).float(), getattr(together, name).float()), name


def test_tied_weights_stay_where_the_others_use_them() -> None:
    model = nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 40, bias=False)).eval()
    model[1].weight = model[0].weight  # type: ignore[assignment]
    live = AttachedProgram(model, None)
    quantise_layers(live, {"1": INT8}, CPU)
    assert type(model[0].weight.data) is torch.Tensor
    assert type(model[1].weight.data) is not torch.Tensor
    live.undo()
    assert model[1].weight is model[0].weight


def test_a_layer_that_is_called_twice_is_no_tied_weight() -> None:
    layer = nn.Linear(64, 64, bias=False)
    twice, head = nn.Sequential(layer, nn.ReLU(), layer), nn.Linear(64, 64, bias=False)
    assert shared_weights(twice) == set()
    head.weight = layer.weight
    assert shared_weights(nn.Sequential(twice, head)) == {id(layer.weight)}
    live = AttachedProgram(twice, None)
    with vramfit.VirtualGPU("RTX 4090"):
        twice.cuda()
        quantise_layers(live, {"0": INT8}, torch.device("cuda:0"))
        assert torch.cuda.memory_allocated() == 64 * 64 + 512 + 512  # the weight of before is on the host


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("failing", ["packed_through", "_moved"])
def test_an_error_on_the_way_leaves_the_model_where_it_was(
    failing: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter((False, True))
    own = getattr(quantised_layers, failing)

    def fails_the_second_time(*args: object) -> object:
        if next(calls):
            raise torch.OutOfMemoryError("no room")
        return own(*args)

    with vramfit.VirtualGPU("RTX 4090"):
        model = made().to(where)
        parameters = dict(model.named_parameters())
        monkeypatch.setattr(quantised_layers, failing, fails_the_second_time)
        with pytest.raises(torch.OutOfMemoryError):
            vramfit.quantized(model, formats={"0": "int8", "2": "int8"}, device="cuda")
        assert {one.device.type for one in model.parameters()} == {where}
        assert all(parameters[name] is one for name, one in model.named_parameters())


def test_an_error_while_the_rest_moves_leaves_the_model_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        model = made()
        own = nn.Module.to

        def fails(self: nn.Module, where: torch.device) -> nn.Module:
            own(self, where)
            if where.type == "cuda":
                raise torch.OutOfMemoryError("no room")
            return self

        monkeypatch.setattr(nn.Module, "to", fails)
        with pytest.raises(torch.OutOfMemoryError):
            vramfit.quantized(model, formats={"0": "int4"}, device="cuda")
        assert {one.device.type for one in model.parameters()} == {"cpu"}
        assert quantisable(model).keys() == {"0", "2"}


def test_bytes_by_definition_are_those_that_are_stored() -> None:
    with vramfit.VirtualGPU("RTX 4090"):
        for dtype, rows, columns in itertools.product(
            (torch.bfloat16, torch.float32), (8, 100, 128), (96, 192, 1024)
        ):
            layer = nn.Linear(columns, rows, bias=False, dtype=dtype)
            for one in set(WeightFormat) - {NONE}:
                if not why_not(layer, one):
                    packed = packed_through(layer.weight, one, torch.device("cuda"))
                    names, _ = packed.__tensor_flatten__()  # type: ignore[attr-defined]
                    assert _bytes_in(layer, one) == sum(getattr(packed, name).nbytes for name in names)


def test_what_cannot_be_quantised_is_said_in_a_line() -> None:
    model = made(torch.float32)
    live = AttachedProgram(model, None)
    for formats, line in (
        ({"0": INT4}, "0 cannot be in int4: int4 is for weights in bfloat16, and these are in float32"),
        ({"1": INT8}, "1 is no plain linear layer"),
        ({"9": INT8}, "the model has no layer '9'"),
    ):
        with pytest.raises(UsageError, match=line):
            quantise_layers(live, formats, CPU)
    with pytest.raises(
        UsageError, match=r"RTX 3090 has no fp8: that needs compute capability 8\.9, and it has 8\.6"
    ):
        check_card([FP8], (8, 6), "RTX 3090")
    assert "multiples of 8" in why_not(nn.Linear(12, 16), DYNAMIC)
    assert "multiple of int4's smallest group" in why_not(nn.Linear(48, 16).bfloat16(), INT4)


# -- quality ------------------------------------------------------------------------------------------------


def test_divergence_is_torchs_own() -> None:
    model, x = made(), inputs()
    measure = LogitsDivergence(model, [x])
    assert measure.cost(model) == 0.0
    cost = measured(model, {"0": INT8}, measure, CPU)
    other = made()
    ao.quantize_(other, ao.Int8WeightOnlyConfig(), filter_fn=lambda _module, name: name == "0")
    with torch.no_grad():
        changed = other(x).double().log_softmax(-1)
        plain = model(x).double().log_softmax(-1)
    expected = float(nn.functional.kl_div(changed, plain, log_target=True, reduction="batchmean"))
    # The measure adds up products of 16 bits in float32, as a card does; this CPU's bfloat16 kernels do too.
    assert cost == pytest.approx(expected, rel=0.05)


def test_products_of_changes_say_what_layers_cost_together() -> None:
    model, x = made(torch.float32), inputs(torch.float32)
    measure = LogitsDivergence(model, [x])
    scores = measured_alone(model, {"0": [INT8], "2": [INT8]}, measure, CPU)
    pairs = np.asarray(scores.pairs)
    assert pairs.diagonal() == pytest.approx(list(scores.alone.values()), rel=0.02)
    together = measured(model, {"0": INT8, "2": INT8}, measure, CPU)
    assert pairs.sum() == pytest.approx(together, rel=0.001)
    assert sum(scores.alone.values()) != pytest.approx(together, rel=0.001)


def test_gradient_scores_are_squared_gradients_times_squared_changes() -> None:
    """By hand for a model whose second layer's gradient has a formula: softmax less what was right."""

    class Told(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = (
                nn.Embedding(16, 64),
                nn.Sequential(*made(torch.float32), nn.Linear(32, 16)),
            )

        def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
            return Outputs(logits=self.body(self.table(input_ids)))

    class Outputs(dict[str, torch.Tensor]):
        @property
        def logits(self) -> torch.Tensor:
            return self["logits"]

    model = Told().eval().requires_grad_(False)
    tokens = torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(2))
    found = gradient_scores(model, {"body.3": [NONE, INT8], "body.0": [INT8]}, [{"input_ids": tokens}], CPU)
    assert found is not None and set(found.alone) == {("body.3", INT8), ("body.0", INT8)}
    inner = model.body[:3](model.table(tokens))
    plain = model.body[3](inner)
    gradient = (
        plain[:, :-1].softmax(-1) - nn.functional.one_hot(tokens[:, 1:], 16)
    ) / 16  # 2 rows of 8 places
    with with_formats(model, {"body.3": INT8}, CPU):
        change = (model.body[3](inner) - plain)[:, :-1]
    expected = float((gradient.square() * change.square()).sum())
    assert found.alone["body.3", INT8] == pytest.approx(expected, rel=1e-4)
    assert all(one.grad is None and not one.requires_grad for one in model.parameters())


def test_what_cannot_be_differentiated_has_no_gradient_scores() -> None:
    model = nn.Sequential(*made(torch.float32))
    model.register_forward_hook(lambda _module, _args, result: result.detach())
    assert gradient_scores(model, {"0": [INT8]}, [inputs(torch.float32)], CPU) is None


def test_gradients_are_not_asked_for_without_room_for_what_they_need() -> None:
    """Saved are the result of the first layer (20 x 128 float32) that relu keeps, and that of the loss (20 x 32)."""
    model, x = made(torch.float32).requires_grad_(False), inputs(torch.float32)
    assert gradient_scores(model, {"0": [INT8]}, [x], CPU, room=10_239) is None
    assert gradient_scores(model, {"0": [INT8]}, [x], CPU, room=1 << 20) is not None


def test_places_of_padding_do_not_count() -> None:
    logits = torch.arange(12.0).view(1, 4, 3)
    mask = torch.tensor([[1, 1, 0, 1]])
    assert logits_of(logits, {"attention_mask": mask}).tolist() == logits[0, [0, 1, 3]].tolist()


def test_a_measure_of_ones_own_has_to_be_a_number() -> None:
    model = made()
    assert GivenQuality(model, lambda _model: torch.tensor(2.0)).cost(model) == 0.0
    with pytest.raises(UsageError, match="quality returned a str"):
        GivenQuality(model, lambda _model: "good")
    with pytest.raises(UsageError, match="quality gives nan for the plain model"):
        GivenQuality(model, lambda _model: float("nan"))
    with pytest.raises(UsageError, match="the batches have no places"):
        LogitsDivergence(model, [inputs()[:0]])
    with pytest.raises(UsageError, match="without logits"):
        LogitsDivergence(nn.Flatten(0), [torch.rand(3)])


# -- the program ------------------------------------------------------------------------------------------------


def drawn(seed: int, layers: int) -> tuple[FormatTable, LayerScores]:
    """A table and scores with random figures, some of whose formats take more than the plain weight."""
    draws = random.Random(seed)
    names = ["none", "int8", "int8-dynamic", "int4"]
    made_layers = []
    alone = {}
    for number in range(layers):
        own = [name for name in names if name == "none" or draws.random() < 0.8]
        size = draws.randrange(1, 40) * 512
        weight = {name: size if name == "none" else int(size * draws.uniform(0.2, 1.2)) for name in own}
        calls = tuple(
            LayerCall(level=draws.randrange(30_000), takes={name: draws.randrange(20_000) for name in own})
            for _ in range(draws.randrange(3))
        )
        made_layers.append(LayerBytes(name=f"layer{number}", weight=weight, calls=calls))
        alone |= {(f"layer{number}", WeightFormat(name)): draws.random() for name in own if name != "none"}
    table = FormatTable(layers=tuple(made_layers), outside=draws.randrange(30_000))
    changes = np.random.default_rng(seed).normal(size=(len(alone), 3))
    return table, LayerScores(alone=alone, pairs=changes @ changes.T)


def everything(table: FormatTable) -> list[dict[str, WeightFormat]]:
    found = itertools.product(*([WeightFormat(name) for name in layer.weight] for layer in table.layers))
    return [
        {layer.name: one for layer, one in zip(table.layers, picked, strict=True) if one is not NONE}
        for picked in found
    ]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_the_program_is_as_good_as_all_choices(seed: int, part: float) -> None:
    table, scores = drawn(seed, 5)
    choices = everything(table)
    peaks = [table.peak(chosen) for chosen in choices]
    limit = round(min(peaks) - 1000 + part * (max(peaks) - min(peaks) + 2000))
    program = FormatProgram(table, scores)
    fits = [chosen for chosen, peak in zip(choices, peaks, strict=True) if peak <= limit]
    chosen = program.additive(limit)
    if not fits:
        assert chosen is None
        assert program.near_optimal(limit, 3) == []
        return
    assert chosen is not None
    assert table.peak(chosen) <= limit
    sums = [sum(scores.alone[item] for item in one.items()) for one in fits]
    assert program.cost(chosen) == pytest.approx(min(sums), abs=1e-9)
    several = program.near_optimal(limit, 3)
    assert all(table.peak(one) <= limit for one in several)
    assert len({tuple(sorted(one)) + tuple(x.value for x in one.values()) for one in several}) == len(several)


def test_the_smallest_choice_has_the_lowest_peak() -> None:
    for seed in range(5):
        table, scores = drawn(seed, 4)
        least = min(table.peak(chosen) for chosen in everything(table))
        assert table.peak(FormatProgram(table, scores).smallest()) <= least + 512


def test_a_format_without_a_score_has_no_neighbours() -> None:
    """One with which outputs are not finite: nothing says what costs less."""
    layers = (LayerBytes(name="a", weight={"none": 2048, "int8": 1024, "int4": 512}, calls=()),)
    program = FormatProgram(FormatTable(layers=layers, outside=0), LayerScores(alone={("a", INT8): 1.0}))
    assert program.neighbours({"a": INT8}, 4) == [{}]
    assert program.neighbours({"a": INT4}, 4) == []


def test_exchanges_find_what_costs_less_together() -> None:
    """Two layers whose changes cancel are better together than one that is cheaper by itself."""
    layers = tuple(
        LayerBytes(name=name, weight={"none": 2048, "int8": 1024}, calls=()) for name in ("a", "b", "c", "d")
    )
    table = FormatTable(layers=layers, outside=0)
    changes = np.array([[1.0, 0], [-1.0, 0], [0, 0.9], [0, 0.9]])
    pairs = changes @ changes.T
    alone = {(layer.name, INT8): float(pairs[n, n]) for n, layer in enumerate(layers)}
    program = FormatProgram(table, LayerScores(alone=alone, pairs=pairs))
    assert set(program.additive(6144) or {}) == {"c", "d"}
    assert set(program.near_optimal(6144, 1)[0]) == {"a", "b"}


# -- the technique ------------------------------------------------------------------------------------------------


def test_a_workload_gives_what_torchao_gives() -> None:
    workload = Workload(model=made, batch=lambda batch_size: inputs()[:batch_size], sizes={"batch_size": 4})
    setting = WeightQuantizationSetting(formats={"0": INT8, "2": NONE})
    applied = with_choices(workload, (Choice(technique=WeightQuantization(), setting=setting),))
    other = made()
    ao.quantize_(other, ao.Int8WeightOnlyConfig(), filter_fn=lambda _module, name: name == "0")
    with torch.no_grad():
        expected = other(inputs()[:4])
    assert torch.equal(applied.run_forward(applied.start("cpu"), {"batch_size": 4}), expected)


def test_promises_say_what_was_measured() -> None:
    technique = WeightQuantization()
    mild = technique.promise(WeightQuantizationSetting(formats={"a": INT8, "b": DYNAMIC}, divergence=0.001))
    assert (mild.numerics, mild.note) == (
        Numerics.PRECISION,
        "weights have fewer bits (1 in int8, 1 in int8-dynamic); logits of a sample diverged by 0.001 nats",
    )
    assert technique.promise(WeightQuantizationSetting(formats={"a": INT4})).numerics is Numerics.APPROXIMATE


class OneSample:
    """Samples of one small model."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def small(self) -> SmallSample:
        return SmallSample(model=made(), batch=inputs(), words="batch_size 20", seconds=self.seconds)

    def once(self, _key: str, find: Callable[[], object]) -> object:
        return find()


@pytest.mark.parametrize("seconds", [-1.0, 60.0])
def test_no_more_time_is_spent_on_a_sample_than_there_is(seconds: float) -> None:
    table = _weights_table(made(), [INT8])
    found = _searched(OneSample(seconds), table)  # type: ignore[arg-type]
    if seconds < 0:
        assert found is None
        return
    assert found is not None
    assert found[-1].formats == {"0": INT8, "2": INT8}
    assert all(one.divergence is not None and one.divergence > 0 for one in found if one.formats)


def test_a_program_that_trains_is_refused() -> None:
    model = made()
    live = AttachedProgram(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="weight-quantization is for inference"):
        WeightQuantization().attach(live, WeightQuantizationSetting(formats={"0": INT8}))
    with pytest.raises(UsageError, match="names no layers"):
        WeightQuantization().attach(live, WeightQuantizationSetting())


def test_an_undo_without_room_leaves_the_weight_on_the_host() -> None:
    with vramfit.VirtualGPU("RTX 4090"), torch.no_grad():
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16))
        own = model[0].weight
        live = vramfit.quantized(model, formats={"0": "int8"}, device="cuda")
        packed = model[0].weight  # held, so that its memory is not free either
        torch.cuda.empty_cache()
        filling = torch.empty(torch.cuda.mem_get_info()[0] - (4 << 20), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.cuda.OutOfMemoryError):
            live.undo()
        assert model[0].weight is own
        assert own.device.type == "cpu"
        del filling, packed
