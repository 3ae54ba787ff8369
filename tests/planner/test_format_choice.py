"""Formats of weights chosen within budgets of bytes: what is predicted, what is reserved, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import vramfit
from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.live_choice import LiveModel
from vramfit.planner.quantization.format_choice import FormatChoice, FormatSearch, without_raising
from vramfit.planner.quantization.format_trial import (
    ModelUse,
    format_table,
    run_formats,
    try_formats,
)
from vramfit.techniques.quantization.byte_program import FormatProgram, FormatTable, LayerScores
from vramfit.techniques.quantization.gradient_scores import gradient_scores
from vramfit.techniques.quantization.weight_formats import WeightFormat
from vramfit.units import MIB

pytest.importorskip("torchao.quantization")

CARD = find_gpu("RTX 4090")
INT8, DYNAMIC, INT4 = WeightFormat.INT8, WeightFormat.INT8_DYNAMIC, WeightFormat.INT4
WIDE = 2048


class Deep(nn.Module):
    """Four layers of 8 MiB each, and a head that is small."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False, dtype=dtype) for _ in range(4))
            self.head = nn.Linear(WIDE, 64, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        logits: torch.Tensor = self.head(x)
        return logits


def rows(count: int = 20) -> torch.Tensor:
    return torch.randn(count, WIDE, generator=torch.Generator().manual_seed(0)).bfloat16()


class Here:
    """Bytes of a virtual card in this process."""

    def __init__(self, question: ModelUse) -> None:
        self.device, self.question = VirtualBackend(CARD), question

    def table(self, formats: Sequence[WeightFormat]) -> FormatTable:
        return format_table(self.device, lambda: Deep().eval(), self.question, formats)

    def reserved(
        self, choices: Sequence[Mapping[str, WeightFormat]], limit: int, enough: int
    ) -> Sequence[int]:
        return try_formats(self.device, lambda: Deep().eval(), self.question, choices, limit, enough).reserved


@pytest.fixture(scope="module")
def search() -> Iterator[FormatSearch]:
    question = ModelUse(batches=(rows(),))
    yield FormatSearch(
        Deep().eval(),
        question,
        Here(question),
        card=CARD,
        formats=(INT8, INT4),
    )


@pytest.fixture(scope="module")
def chosen(search: FormatSearch) -> FormatChoice:
    """The choice for a budget between the least that any choice takes and what the plain model does."""
    return search.choice((2 * search._least[1] + search.whole_table.uniform["none"]) // 3)


def test_weights_have_the_bytes_that_torchao_documents(search: FormatSearch) -> None:
    layer = search.whole_table.layers[0]
    assert layer.weight == {
        "none": 2 * WIDE**2,
        # int8_tensor.py: a byte each, a float32 and an int8 zero point for each row
        "int8": WIDE**2 + 4 * WIDE + WIDE,
        # int4_tile_packed_to_4d_tensor.py: half a byte, two bfloat16 numbers for a group of 128
        "int4": WIDE**2 // 2 + WIDE**2 // 128 * 4,
    }


def test_the_predicted_peak_is_that_of_the_run(search: FormatSearch) -> None:
    """But for the parts of blocks that are too small to be split (below 1 MiB). The head stays as it is: with it goes
    the workspace of cuBLAS, which the program counts for any choice."""
    here: Here = search._bytes  # type: ignore[assignment]
    draws = random.Random(0)
    names = [layer.name for layer in search.whole_table.layers]
    for _ in range(4):
        chosen = {name: draws.choice([INT8, INT4, WeightFormat.NONE]) for name in names if name != "head"}
        cost = run_formats(here.device, lambda: Deep().eval(), here.question, chosen)
        predicted = search.whole_table.peak(chosen)
        assert cost.peak_allocated_bytes <= predicted <= cost.peak_allocated_bytes + MIB


def test_a_budget_is_kept(search: FormatSearch, chosen: FormatChoice) -> None:
    here: Here = search._bytes  # type: ignore[assignment]
    assert search._least[1] < chosen.budget < search.whole_table.uniform["none"]
    again = run_formats(
        here.device,
        lambda: Deep().eval(),
        here.question,
        chosen.formats,
        budget=chosen.budget + CARD.typical_context_bytes,
    )
    assert again.fits
    assert again.peak_reserved_bytes == chosen.reserved_bytes <= chosen.budget
    assert chosen.cost == min(chosen.finalists) == search.cost(chosen.formats)


def test_more_bytes_never_cost_more_quality(search: FormatSearch, chosen: FormatChoice) -> None:
    plain, least = search.whole_table.uniform["none"], search._least[1]
    assert search.choice(least).cost >= chosen.cost >= search.choice(plain).cost == 0.0


def test_the_choice_by_gradients_is_among_those_that_are_measured(
    search: FormatSearch, chosen: FormatChoice
) -> None:
    program = FormatProgram(search.table, gradient_scores_of(search))
    within = chosen.budget
    while True:
        graded = program.additive(within)
        assert graded is not None
        [reserved] = search._bytes.reserved([graded], chosen.budget, 1)
        if reserved <= chosen.budget:
            break
        within -= max(512, min(reserved - chosen.budget, within // 8))
    assert search.cost(graded) in chosen.finalists
    assert chosen.cost <= search.cost(graded)


def gradient_scores_of(search: FormatSearch) -> LayerScores:
    options = {layer.name: [WeightFormat(one) for one in layer.weight] for layer in search.table.layers}
    found = gradient_scores(search._model, options, search._question.batches, torch.device("cpu"))
    assert found is not None
    return found


def test_a_budget_below_the_smallest_choice_is_refused(search: FormatSearch) -> None:
    with pytest.raises(UsageError, match=r"the smallest choice of formats reserves .* \(the plain model: "):
        search.choice(MIB)


def test_formats_that_raise_the_peak_are_refused_with_figures() -> None:
    """A single layer that is widened for its product holds both forms of its weight at once."""
    device = VirtualBackend(CARD)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDE, WIDE, bias=False, dtype=torch.bfloat16)).eval()

    table = format_table(device, make, ModelUse(batches=(rows(),)), [INT8, INT4])
    left, refused = without_raising(table, [INT8, INT4])
    assert set(left.layers[0].weight) == {"none", "int4"}
    [line] = refused
    assert line.startswith("int8 in all layers raises the peak from ")
    table = format_table(
        device,
        lambda: nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).eval(),
        ModelUse(batches=(rows()[:, :64].contiguous(),)),
        [INT4],
    )
    assert without_raising(table, [INT4])[0].layers[0].weight.keys() == {"none"}  # rows are padded to 1,024


@pytest.mark.parametrize(
    ("model", "formats", "line"),
    [
        (nn.Conv2d(3, 8, 3), (INT8,), "the model has no linear layers whose weights could be quantised"),
        (nn.Linear(64, 64), (INT4,), "no layer can have any of the formats: int4 is for weights in bfloat16"),
        (nn.Linear(64, 64), (WeightFormat.FP8,), "RTX 3090 has no fp8: that needs compute capability 8.9"),
    ],
)
def test_bad_input_is_one_line(model: nn.Module, formats: Sequence[WeightFormat], line: str) -> None:
    question = ModelUse(batches=(torch.rand(1, 64),))
    card = find_gpu("RTX 3090") if formats[0] is WeightFormat.FP8 else CARD
    with pytest.raises(UsageError, match=line):
        FormatSearch(model, question, Here(question), card=card, formats=formats)


def test_quantized_end_to_end_and_its_undo() -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(WIDE, WIDE, dtype=torch.bfloat16), nn.ReLU()] * 3
    model = nn.Sequential(
        *parts[:2], nn.Linear(WIDE, WIDE).bfloat16(), nn.Linear(WIDE, 64).bfloat16()
    ).train()
    x = rows()
    with torch.no_grad():
        before = model(x)
    live = vramfit.quantized(model, x, budget="40MiB", gpu="RTX 4090", formats=["int8-dynamic", "int4"])
    assert live.choice is not None
    assert live.choice.reserved_bytes <= 40 * MIB < live.choice.plain_bytes
    assert live.formats == {name: one.value for name, one in live.choice.formats.items()}
    with torch.no_grad():
        assert not torch.equal(live(x), before)
        live.undo()
        assert torch.equal(model(x), before)
    assert model.training


def test_quantized_says_what_is_missing() -> None:
    for arguments, line in (
        ({"batches": None}, "nothing says what the model is called with"),
        ({"batches": rows(), "formats": ["int3"], "gpu": "RTX 4090"}, "'int3' is no format of weights"),
        ({"batches": rows(), "budget": "1GiB"}, "nothing says for which card formats are chosen"),
        ({"batches": rows(), "gpu": "RTX 3090", "formats": ["fp8"]}, "has no fp8"),
        ({"batches": [], "gpu": "RTX 4090"}, "holds no batch"),
        ({"batches": rows(), "gpu": "RTX 4090", "progress": 5}, "progress=5 cannot be called"),
        ({"batches": rows(), "gpu": "RTX 4090", "formats": 8}, "formats=8 is neither a list of formats nor"),
        ({"batches": rows(), "gpu": "RTX 4090", "formats": "int8"}, "formats='int8' is neither"),
        ({"formats": {"head": "int8"}, "device": "gpu"}, "device='gpu' is no device"),
        ({"formats": {"head": "int8"}, "device": 1.5}, "device=1.5 is no device"),
        ({"formats": {"head": "int8"}, "device": "meta"}, "is neither a CUDA device nor the CPU"),
        ({"formats": {"head": "int8"}, "device": "cuda"}, "there is no CUDA device"),
    ):
        with pytest.raises(UsageError, match=line):
            vramfit.quantized(Deep().eval(), **arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the model is on the device meta, and has no values"):
        vramfit.quantized(nn.Linear(64, 64, device="meta"), formats={"": "int8"})
    with (
        vramfit.VirtualGPU("RTX 4090"),
        pytest.raises(UsageError, match=r"there is no device cuda:1\. There are 1"),
    ):
        vramfit.quantized(nn.Linear(64, 64), formats={"": "int8"}, device="cuda:1")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LiveModel]:
    """The model that another process would be asked about; nothing is asked."""
    found: list[LiveModel] = []

    def note(live: LiveModel, *_rest: object) -> None:
        assert not any(module.training for module in live.model.modules())
        found.append(live)
        raise UsageError("nobody is asked here")

    monkeypatch.setattr("vramfit.planner.quantization.format_choice.live_answers", note)
    return found


def test_a_budget_that_is_what_is_free_counts_the_model_there(asked: list[LiveModel]) -> None:
    """The card by its number or without one: what the model takes may be taken again."""
    for where in ("cuda", "cuda:0", None):
        with vramfit.VirtualGPU("RTX 4090"), pytest.raises(UsageError, match="nobody is asked"):
            vramfit.quantized(Deep().cuda(), rows(), device=where, formats=["int8"])
    with vramfit.VirtualGPU("RTX 4090"):
        one, *others = (replace(live, model=Deep().cuda()).memory().budget for live in asked)
    assert others == [one, one]


def test_memory_is_measured_in_evaluation_mode(asked: list[LiveModel]) -> None:
    """As quality is: dropout keeps what it draws."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    model[1].eval()
    with pytest.raises(UsageError, match="nobody is asked"):
        vramfit.quantized(model, torch.randn(2, 64), gpu="RTX 4090")
    assert len(asked) == 1
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
