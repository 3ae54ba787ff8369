"""Micro-batching: batches of any containers in pieces, weights by the loss's reduction, gradients of the whole."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.techniques.toys import (
    Block,
    all_toys,
    class_loss,
    classes,
    gradients,
    losses,
    numbers,
    sgd,
    tokens,
)
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.whole_and_pieces import try_pieces
from vramfit.techniques import AttachedProgram, Choice, Numerics, Profile, live_of
from vramfit.techniques.micro_batching import (
    BatchNormalisation,
    MicroBatching,
    MicroBatchingSetting,
    Reduction,
    Splitter,
    find_cut,
    spans_of,
)
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload

pytestmark = pytest.mark.torch_versions

# -- cutting -------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Example:
    x: torch.Tensor
    scale: float
    names: list[str]


X, Y = torch.arange(20.0).view(5, 4), torch.arange(5)
SCALAR, TABLE = torch.tensor(3.0), torch.ones(7, 2)


def piece(batch: Any, uncut: tuple[str, ...] = ()) -> Any:
    """The second and third example of five."""
    cut = find_cut(batch, uncut)
    assert cut.size == 5
    return cut.piece(batch, 1, 3)


def test_tensors_tuples_lists_and_dicts() -> None:
    assert torch.equal(piece(X), X[1:3])
    assert piece(X).data_ptr() == X[1].data_ptr(), "a view"
    x, y = piece((X, Y))
    assert torch.equal(x, X[1:3]) and torch.equal(y, Y[1:3])
    found = piece([X, Y, SCALAR, TABLE, None])
    assert type(found) is list and torch.equal(found[1], Y[1:3])
    assert found[2] is SCALAR and found[3] is TABLE and found[4] is None
    named = piece(Pair(X, Y))
    assert type(named) is Pair and torch.equal(named.y, Y[1:3])
    ordered = OrderedDict(x=X, inside={"y": Y, "names": list("abcde")}, rate=0.5)
    got = piece(ordered)
    assert type(got) is OrderedDict and got["rate"] == 0.5
    assert torch.equal(got["inside"]["y"], Y[1:3]) and got["inside"]["names"] == ["b", "c"]
    assert len(ordered["inside"]["names"]) == 5, "the batch itself is as it was"


def test_dataclasses_and_batches_of_transformers() -> None:
    example = piece(Example(X, 2.0, list("abcde")))
    assert type(example) is Example and example.scale == 2.0 and example.names == ["b", "c"]
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": X, "position_ids": torch.arange(4)[None]})
    found = piece(encoding)
    assert type(found) is transformers.BatchEncoding
    assert torch.equal(found["input_ids"], X[1:3]) and torch.equal(found.input_ids, X[1:3])
    assert found["position_ids"].shape == (1, 4)
    assert encoding["input_ids"] is X


def test_a_list_with_one_entry_for_each_example() -> None:
    images = [torch.ones(3, 8 + i, 8) for i in range(5)]
    targets = [{"boxes": torch.ones(i + 1, 4), "labels": torch.ones(i + 1)} for i in range(5)]
    few, some = piece((images, targets))
    assert [image.shape[1] for image in few] == [9, 10] and [len(t["labels"]) for t in some] == [2, 3]


def test_sizes_that_are_met_once_each() -> None:
    assert find_cut({"first": X, "second": TABLE}).size == 5, "the first counts"
    assert find_cut({"first": TABLE, "second": X}, uncut=("first",)).size == 5
    assert find_cut({"x": torch.ones(1, 4), "y": torch.ones(1)}).size == 1
    whole = piece({"x": X, "y": Y}, uncut=("y",))
    assert whole["y"] is Y and len(whole["x"]) == 2


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch of type dict has no tensor with a batch dimension"):
        find_cut({"rate": 0.5, "scale": SCALAR})
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    with pytest.raises(UsageError, match="a packed sequence cannot be cut"):
        find_cut(packed)


@pytest.mark.parametrize(
    ("size", "count", "lengths"),
    [
        (8, 2, [4, 4]),
        (7, 2, [4, 3]),
        (10, 4, [3, 3, 2, 2]),
        (9, 4, [3, 3, 3]),
        (3, 8, [1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_no_piece_is_larger_than_needed(size: int, count: int, lengths: list[int]) -> None:
    spans = spans_of(size, count)
    assert [stop - start for start, stop in spans] == lengths
    assert spans[0][0] == 0 and spans[-1][1] == size


# -- weights -------------------------------------------------------------------------------------------------------


def labels_of(*counts: int, length: int = 6) -> torch.Tensor:
    """Labels of which the last so many count."""
    labels = torch.full((len(counts), length), -100)
    for row, count in enumerate(counts):
        labels[row, length - count :] = row
    return labels


def weights(batch: Any, *, shifts: bool = False, **setting: Any) -> list[float]:
    pieces = Splitter(MicroBatchingSetting(**setting), shifts=shifts)(batch)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return [float(piece.weight) for piece in pieces]


def test_weights_of_each_reduction() -> None:
    batch = {"input_ids": torch.ones(3, 6), "labels": labels_of(6, 3, 1)}
    assert weights(batch, reduction=Reduction.MEAN) == [2 / 3, 1 / 3]
    assert weights(batch, reduction=Reduction.SUM) == [1, 1]
    assert weights(batch, reduction=Reduction.TOKENS) == [9 / 10, 1 / 10]
    assert weights(batch, reduction=Reduction.NEXT_TOKENS) == [8 / 9, 1 / 9], (
        "the first of the first is no target"
    )
    assert weights(batch) == [9 / 10, 1 / 10]
    assert weights(batch, shifts=True) == [8 / 9, 1 / 9]
    assert weights({**batch, "shift_labels": labels_of(6, 3, 1)}, shifts=True) == [9 / 10, 1 / 10]
    assert weights({**batch, "num_items_in_batch": torch.tensor(10)}) == [1, 1]
    assert weights((torch.ones(3, 6), torch.ones(3))) == [2 / 3, 1 / 3]
    assert weights((torch.ones(3, 6), labels_of(6, 3, 1)), labels="1") == [9 / 10, 1 / 10]
    assert weights(
        {"y": torch.zeros(2, 6).long()}, reduction=Reduction.TOKENS, labels="y", ignore_index=0
    ) == [
        0.5,
        0.5,
    ], "nothing counts: the mean of nothing is no number either way"


def test_a_piece_in_which_nothing_counts_is_left_out() -> None:
    batch = {"labels": labels_of(0, 0, 4, 2)}
    assert weights(batch, count=4) == [4 / 6, 2 / 6]
    assert weights(batch, count=2) == [1.0]


def test_labels_that_are_missing_are_refused() -> None:
    with pytest.raises(UsageError, match="the batch has no labels 'targets' to count"):
        weights({"x": X}, reduction=Reduction.TOKENS, labels="targets")


# -- gradients -----------------------------------------------------------------------------------------------------


def calm(workload: Workload, batch_size: int = 7) -> Workload:
    """Without dropout, at a size that no count divides."""

    def model() -> nn.Module:
        made = workload.model()
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, Block | nn.LSTM):
                module.dropout = 0.0
        return made

    return dataclasses.replace(workload, model=model, sizes={"batch_size": batch_size})


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("toy", [name for name in all_toys() if name != "batch-norm"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_gradients_are_those_of_the_whole_batch(toy: str, count: int) -> None:
    plain = calm(all_toys()[toy])
    split = MicroBatching().apply(plain, MicroBatchingSetting(count=count))
    assert_same(gradients(split), gradients(plain))
    assert losses(split, steps=2) == pytest.approx(losses(plain, steps=2), rel=1e-5)


class Words(nn.Module):
    """A language model whose loss is of one of many kinds."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(97, 16), nn.Linear(16, 97)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embed(input_ids)).cumsum(1))
        if self.kind == "next-tokens":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if self.kind == "sum":
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if self.kind == "mean":
            return (each.sum(1) / (labels != -100).sum(1)).mean()
        return each.sum() / (labels != -100).sum()


def words(kind: str) -> Workload:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Words(kind)

    def batch(batch_size: int) -> dict[str, torch.Tensor]:
        ids = tokens(batch_size)
        labels = ids.clone()
        for row in range(batch_size):
            labels[row, row + 2 :] = -100
        return {"input_ids": ids, "labels": labels}

    return Workload(
        model=model,
        batch=batch,
        sizes={"batch_size": 7},
        loss=lambda model, batch: model(**batch),
        optimizer=sgd,
    )


KINDS = ("mean", "sum", "tokens", "next-tokens")


@pytest.mark.parametrize("kind", KINDS)
def test_each_reduction_is_found_and_gives_the_same_gradients(kind: str) -> None:
    plain = words(kind)
    reduction = try_pieces(plain).setting.reduction
    assert reduction is Reduction(kind)
    setting = MicroBatchingSetting(count=3, reduction=reduction)
    assert_same(gradients(MicroBatching().apply(plain, setting)), gradients(plain))


@pytest.mark.parametrize("kind", KINDS)
def test_another_reduction_is_told_by_its_gradients(kind: str) -> None:
    for other in KINDS:
        if other != kind:
            with pytest.raises(UsageError, match="pieces of a batch of 4 do not give its gradients: that of"):
                try_pieces(words(kind), MicroBatchingSetting(reduction=Reduction(other)))


@pytest.mark.parametrize("toy", sorted(set(all_toys()) - {"two-losses"}))
def test_the_reduction_of_toys_is_the_mean_but_for_classes_that_may_be_ignored(toy: str) -> None:
    workload = all_toys()[toy]
    batch = workload.batch(**workload.sizes)
    classes = isinstance(batch, tuple) and batch[1].dtype == torch.int64 and batch[1].dim() == 1
    expected = Reduction.TOKENS if classes else Reduction.MEAN
    assert try_pieces(workload).setting.reduction is expected


def test_a_loss_that_compares_examples_is_refused() -> None:
    def contrastive(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        seen = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(seen @ seen.roll(1, 0).T * 5, torch.arange(len(seen)))

    workload = dataclasses.replace(all_toys()["mlp"], loss=contrastive)
    with pytest.raises(UsageError, match="pieces of a batch of 4 do not give its gradients"):
        try_pieces(workload, MicroBatchingSetting(reduction=Reduction.MEAN))


def test_probing_leaves_random_numbers_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    try_pieces(words("tokens"))
    assert torch.equal(torch.rand(2), expected)


def test_a_workload_with_a_step_of_its_own_has_no_reduction() -> None:
    workload = dataclasses.replace(words("sum"), step=lambda state, batch: None)
    with pytest.raises(UsageError, match="or with a step of its own, has no reduction"):
        try_pieces(workload)


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_models_of_transformers_with_labels(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}

    def model() -> nn.Module:
        torch.manual_seed(0)
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=1, **sizes)
            return transformers.GPT2LMHeadModel(config).eval()
        if kind == "bert":
            config = transformers.BertConfig(
                hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, **sizes
            )
            return transformers.BertForMaskedLM(config).eval()
        config = transformers.T5Config(
            d_model=16, d_kv=8, num_heads=2, num_layers=1, d_ff=32, decoder_start_token_id=0, **sizes
        )
        return transformers.T5ForConditionalGeneration(config).eval()

    plain = dataclasses.replace(words("tokens"), model=model, loss=lambda model, batch: model(**batch).loss)
    assert try_pieces(plain).setting.reduction is (
        Reduction.NEXT_TOKENS if kind == "gpt2" else Reduction.TOKENS
    )
    # Without being told: what the batch and the model look like.
    split = MicroBatching().apply(plain, MicroBatchingSetting(count=3))
    assert_same(gradients(split), gradients(plain))


# -- batch norm ----------------------------------------------------------------------------------------------------


def test_batch_norm_has_to_be_allowed() -> None:
    plain = all_toys()["batch-norm"]
    with pytest.raises(UsageError, match="the model has batch norm"):
        MicroBatching().apply(plain, MicroBatchingSetting()).start("cpu")
    frozen = plain.model()
    for module in frozen.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    AttachedProgram(frozen, None).attach((Choice(technique=MicroBatching(), setting=MicroBatchingSetting()),))


def test_running_statistics_move_as_far_as_with_the_whole_batch() -> None:
    norm = nn.BatchNorm1d(3)
    live = AttachedProgram(norm, None)
    setting = MicroBatchingSetting(count=4, batch_norm=BatchNormalisation.PER_PIECE)
    live.attach((Choice(technique=MicroBatching(), setting=setting),))
    x = 5 + torch.randn(2, 3).repeat(4, 1)  # each piece has the same mean
    for micro in live.split(x):
        live.backward(norm(micro).sum())
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))
    live.undo()
    assert norm.momentum == 0.1


def test_promises() -> None:
    technique = MicroBatching()
    assert technique.promise(MicroBatchingSetting()).numerics is Numerics.ROUNDING
    promise = technique.promise(MicroBatchingSetting(batch_norm=BatchNormalisation.PER_PIECE))
    assert (promise.numerics, promise.note) == (Numerics.APPROXIMATE, "batch norm sees micro-batches")


# -- the loop ------------------------------------------------------------------------------------------------------


class Exchanging(nn.Module):
    """What DistributedDataParallel looks like: gradients are exchanged unless `no_sync` says otherwise."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.exchanges, self.sync = module, [], True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        yield
        self.sync = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.exchanges.append(self.sync)
        return self.module(x)


def test_a_loop_of_ones_own_and_one_exchange_of_gradients() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        return model, sgd(model.parameters())

    x, y = numbers(7, 6), classes(3, 7)
    plain, optimizer = make()
    F.cross_entropy(plain(x), y).backward()
    optimizer.step()
    inner, optimizer = make()
    model = Exchanging(inner)
    live = AttachedProgram(model, optimizer)
    live.attach((Choice(technique=MicroBatching(), setting=MicroBatchingSetting(count=3)),))
    for micro in live.split((x, y)):
        live.backward(class_loss(model, micro))
    live.step()
    assert model.exchanges == [False, False, True]
    for ours, theirs in zip(inner.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    live.undo()
    assert len(list(live.split((x, y)))) == 1


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(UsageError, match="count of micro-batching is 0"):
        MicroBatching().apply(words("sum"), MicroBatchingSetting(count=0)).start("cpu")


# -- options -------------------------------------------------------------------------------------------------------


def counts(batch_size: int, toy: str = "mlp", **profile: Any) -> list[int]:
    made = Profile(
        model=all_toys()[toy].model(),
        optimizer=None,
        sizes={"sequence_length": 9, "batch_size": batch_size},
        **{"trains": True, **profile},
    )
    return [setting.count for setting in MicroBatching().options(made)]


def test_options_halve_the_largest_piece() -> None:
    assert counts(8) == [2, 4, 8]
    assert counts(6) == [2, 3, 6]
    assert counts(10) == [2, 4, 5, 10]
    assert counts(1) == []
    assert counts(8, trains=False) == [] and counts(8, own_step=True) == []
    assert counts(8, toy="batch-norm") == [2, 4], "batch norm wants two examples"
    assert math.prod(counts(64)) == 2 ** (1 + 2 + 3 + 4 + 5 + 6)


def test_options_of_batch_norm_say_so() -> None:
    profile = Profile(
        model=all_toys()["batch-norm"].model(), optimizer=None, sizes={"batch_size": 4}, trains=True
    )
    (only,) = MicroBatching().options(profile)
    assert only.batch_norm is BatchNormalisation.PER_PIECE


# -- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "examples"), [(1, 12), (2, 6), (5, 3), (12, 1)])
def test_activations_on_the_virtual_gpu_are_those_of_the_largest_piece(
    gpu: VirtualGPU, count: int, examples: int
) -> None:
    width = 256

    def activations(workload: Workload) -> int:
        state = workload.start("cuda")
        workload.run_step(state, workload.sizes)
        seen: list[int] = []
        state.model[2].register_forward_hook(lambda *_: seen.append(torch.cuda.memory_allocated()))
        before = torch.cuda.memory_allocated()
        workload.run_step(state, workload.sizes)
        live = live_of(state)
        assert live is not None and len(seen) == len(spans_of(12, count))
        # Of earlier pieces there are the gradients, and the sum of the losses in a block of 512 bytes.
        earlier = 512 + sum(p.numel() * 4 for p in state.model.parameters()) if count > 1 else 0
        return max(seen) - before - earlier

    plain = Workload(
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.Sigmoid(), nn.Linear(width, width)),
        batch=lambda batch_size: torch.zeros(batch_size, 512, width),
        sizes={"batch_size": 12},
        loss=lambda model, batch: model(batch).mean(),
        optimizer=sgd,
    )
    split = MicroBatching().apply(plain, MicroBatchingSetting(count=count))
    # The piece itself, the sigmoid and the second layer.
    assert activations(split) == 3 * examples * 512 * width * 4
