"""Micro-batching: a batch in pieces, with the gradients of the whole.

A batch is cut along its batch dimension, whatever containers it is in; the dimension is found from the batch itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage, Piece
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.piece_state import PieceState
from vramfit.techniques.core.technique import LoopChange, Numerics, Promise, Setting, Technique
from vramfit.techniques.support.batch_cut import Cut, is_plain
from vramfit.torch_internals.layers import BatchNorm
from vramfit.workload import Batch
from vramfit.workload.containers import mapped


class Reduction(Enum):
    """How a loss makes one number of a batch.

    Attributes:
        MEAN: the mean over examples, or over as many values of each.
        SUM: the sum, or a mean over a number that the batch brings along (``num_items_in_batch``).
        TOKENS: the mean over labels that are not to be ignored.
        NEXT_TOKENS: the mean over labels that are shifted by one: the first of each sequence is nobody's next.
        WEIGHTS: the mean weighted by an entry of the batch, such as a mask: the sum of its values.
        AUTO: what the batch and the model look like, see `MicroBatching`.
    """

    MEAN = "mean"
    SUM = "sum"
    TOKENS = "tokens"
    NEXT_TOKENS = "next-tokens"
    WEIGHTS = "weights"
    AUTO = "auto"


class BatchNormalisation(Enum):
    """What becomes of batch norm.

    Attributes:
        NONE: the model has none.
        PER_PIECE: each piece is normalised by its own statistics, which is not what the whole batch would get.
    """

    NONE = "none"
    PER_PIECE = "per-piece"


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchingSetting(Setting):
    """How many pieces, and how they weigh.

    Attributes:
        count: pieces of a batch; the last may be smaller, and there are fewer where that makes none of them larger.
        reduction: how the loss makes one number of a batch.
        ignore_index: the label that does not count.
        labels: where the batch has its labels, or what weighs: a key, an attribute, or a place in a tuple (``"1"``).
        uncut: entries of the batch that go to every piece as they are.
        batch_norm: what becomes of batch norm.
        once: names of buffers, frozen parameters and attributes that each piece writes alike; they are written once.
        averaged: names of those that are means over the batch.
        summed: names of those that are sums over the batch.
        compared: whether pieces were compared with the whole batch; without that nothing is promised of them.
    """

    count: int = 2
    reduction: Reduction = Reduction.AUTO
    ignore_index: int = -100
    labels: str = "labels"
    uncut: tuple[str, ...] = ()
    batch_norm: BatchNormalisation = BatchNormalisation.NONE
    once: tuple[str, ...] = ()
    averaged: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    compared: bool = True


class MicroBatching(Technique[MicroBatchingSetting]):
    """Goes forward and backward with one piece of the batch at a time, and steps once.

    Activations are those of a piece; gradients add up to those of the whole batch, because each piece's loss is
    multiplied with its share: of examples for a mean, of labels that count for a mean over tokens (the mean of the
    pieces' means would give tokens of short sequences too much weight, see huggingface.co/blog/gradient_accumulation),
    1 for a sum. Gradients of distributed data parallel models are exchanged once, with the last piece.

    The reduction ``auto`` takes integer labels of two dimensions as tokens (next tokens where a model of transformers
    shifts them), a batch with ``num_items_in_batch`` as a sum, and anything else as a mean. `try_pieces` finds out by
    comparing gradients: a loss that compares examples with each other (contrastive, or statistics of the batch) has no
    pieces, and is told by nothing else. Labels that are on a card already are counted there, and the host waits for the
    counts once a batch.

    What a forward pass writes beside gradients (counters, centres, running means) is written once a step: each piece
    begins with the state of the step's beginning, see `PieceState`. A state that has no pieces, such as a queue of the
    examples themselves, forbids them.

    It pays when activations are most of the peak, and costs little time while a piece still fills the device: the same
    arithmetic in smaller kernels. It saves nothing of parameters, gradients and optimizer, and the gradients stay
    during all forward passes but the first. Dropout and other random layers draw in each piece, and so other numbers
    than for the whole batch, of the same distribution. Batch norm sees micro-batches: that is another computation, only
    approximately the same, and the momentum of running statistics is lowered so that all pieces together move them as
    far as one batch did.
    """

    name: ClassVar[str] = "micro-batching"
    summary: ClassVar[str] = "runs a batch in pieces, with the gradients of the whole"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.STEP
    setting_type = MicroBatchingSetting
    follows: ClassVar[str | None] = "in-place-activations"
    redraws: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "gradient-caching": "a loss that compares examples has no pieces; one that has needs no cached gradients"
        }
    )

    def options(self, profile: Profile) -> Iterable[MicroBatchingSetting]:
        """Two pieces, four, eight and so on to single examples, without those that make the largest no smaller."""
        if not profile.trains or profile.own_step:
            return
        batch_size = profile.sizes[batch_size_name(profile.sizes)]
        norm = BatchNormalisation.PER_PIECE if batch_norms(profile.model) else BatchNormalisation.NONE
        least = 1 if norm is BatchNormalisation.NONE else 2  # batch norm has no statistics of one value
        known, count = batch_size, 2
        while known > least:
            piece = max(least, -(-batch_size // count))
            if piece < known:
                yield MicroBatchingSetting(count=-(-batch_size // piece), batch_norm=norm)
            known = piece
            count *= 2

    def loop_change(self, setting: MicroBatchingSetting) -> LoopChange:  # noqa: ARG002
        """See `Technique.loop_change`."""
        return LoopChange(
            what="cuts each batch into pieces with backward passes of their own",
            instead="Take a smaller batch with the framework's accumulation of gradients",
        )

    def attach(self, live: AttachedProgram, setting: MicroBatchingSetting) -> None:
        """Cut batches, and let running statistics move as slowly as there are pieces."""
        if setting.count < 1:
            raise UsageError(
                f"count of micro-batching is {setting.count}", "Give the number of pieces, 1 or more"
            )
        norms = batch_norms(live.model)
        if norms and setting.batch_norm is BatchNormalisation.NONE:
            raise UsageError(
                "the model has batch norm, whose statistics are those of a piece under micro-batching",
                'Allow it with batch_norm = "per-piece", which is approximate, or freeze or replace the batch norm',
            )
        for norm in norms:
            if norm.momentum is not None:
                live.set(norm, "momentum", 1 - (1 - norm.momentum) ** (1 / setting.count))
        state = PieceState(live.model, once=setting.once, averaged=setting.averaged, summed=setting.summed)
        live.set(live, "piece_state", state)
        live.set(live, "splitter", Splitter(setting, shifts=_shifts(live.model)))

    def promise(self, setting: MicroBatchingSetting) -> Promise:
        """Sums in another order, unless batch norm sees other batches."""
        if setting.batch_norm is BatchNormalisation.PER_PIECE:
            return Promise(Numerics.APPROXIMATE, "batch norm sees micro-batches")
        if not setting.compared:
            return Promise(Numerics.APPROXIMATE, "pieces were not compared with the whole batch")
        return Promise(
            Numerics.ROUNDING,
            "gradients are summed piece by piece, and random layers draw other numbers of the same distribution",
        )


class Splitter:
    """Cuts batches into weighted pieces."""

    def __init__(self, setting: MicroBatchingSetting, *, shifts: bool) -> None:
        self.setting, self.shifts = setting, shifts

    def __call__(self, batch: Batch) -> list[Piece]:
        """The pieces; one in which no label counts is left out, for its own mean is no number.

        Raises:
            UsageError: the batch cannot be cut, or has no labels to count.
        """
        cut = find_cut(batch, self.setting.uncut)
        spans = spans_of(cut.size, self.setting.count)
        weighted = [
            (span, weight)
            for span, weight in zip(spans, self.weights(batch, cut, spans), strict=True)
            if weight > 0
        ]
        return [
            Piece(
                batch=cut.piece(batch, *span),
                weight=weight,
                last=number == len(weighted) - 1,
                first=number == 0,
                share=(span[1] - span[0]) / cut.size,
            )
            for number, (span, weight) in enumerate(weighted)
        ]

    def weights(self, batch: Batch, cut: Cut, spans: list[tuple[int, int]]) -> list[float]:
        """What each piece's loss is multiplied with."""
        reduction = self.setting.reduction
        if reduction is Reduction.AUTO:
            reduction = self._looks_like(batch)
        if reduction is Reduction.SUM:
            return [1.0] * len(spans)
        if reduction is not Reduction.MEAN:
            labels = find_labels(batch, self.setting.labels)
            if labels is None or labels.shape[:1] != (cut.size,):
                raise UsageError(
                    f"the batch has no labels {self.setting.labels!r} to count",
                    "Say where they are in labels of micro-batching, or choose another reduction",
                )
            counts = self._counts(labels, reduction)
            if total := sum(counts):
                return [sum(counts[start:stop]) / total for start, stop in spans]
        return [(stop - start) / cut.size for start, stop in spans]

    def _counts(self, labels: torch.Tensor, reduction: Reduction) -> list[float]:
        """What each example weighs; on a card the host waits for these once."""
        if reduction is Reduction.WEIGHTS:
            return [float(weight) for weight in labels.double().reshape(labels.shape[0], -1).sum(1).tolist()]
        shifted = reduction is Reduction.NEXT_TOKENS and labels.dim() > 1
        counted = labels[:, 1:] if shifted else labels
        valid = (counted != self.setting.ignore_index).reshape(labels.shape[0], -1)
        return [float(count) for count in valid.sum(1).tolist()]

    def _looks_like(self, batch: Batch) -> Reduction:
        if entry(batch, "num_items_in_batch") is not None:
            return Reduction.SUM
        labels = None if isinstance(batch, torch.Tensor) else find_labels(batch, self.setting.labels)
        if labels is None or labels.dim() < 2 or labels.is_floating_point():
            return Reduction.MEAN
        shifted = self.shifts and entry(batch, "shift_labels") is None
        return Reduction.NEXT_TOKENS if shifted else Reduction.TOKENS


def spans_of(size: int, count: int) -> list[tuple[int, int]]:
    """Where pieces begin and end: no more than `count`, none larger than needed, the last ones smaller by one."""
    largest = max(1, -(-size // count))
    number = -(-size // largest)
    ends = [0]
    for piece in range(number):
        ends.append(ends[-1] + size // number + (piece < size % number))
    return list(itertools.pairwise(ends))


def find_labels(batch: Batch, name: str) -> torch.Tensor | None:
    """The labels of a batch by name or place; a batch that is a tensor is its own labels."""
    found = batch if isinstance(batch, torch.Tensor) else entry(batch, name)
    return found if isinstance(found, torch.Tensor) and found.dim() else None


def batch_size_name(sizes: Mapping[str, int]) -> str:
    """Which of a workload's sizes the batch's is: ``batch_size``, or the first."""
    return "batch_size" if "batch_size" in sizes else next(iter(sizes))


def batch_norms(model: nn.Module) -> list[BatchNorm]:
    """The layers that normalise with a batch's statistics; not those that are frozen in a model that trains."""
    found = (module for module in model.modules() if isinstance(module, BatchNorm))
    return [
        module
        for module in found
        if module.training or not model.training or module.running_mean is None  # it has none but the batch's
    ]


def _shifts(model: nn.Module) -> bool:
    """Whether a model's own loss shifts labels: causal language models of transformers do, encoder-decoders do not."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "loss_function") and hasattr(config, "is_encoder_decoder"):
            # None: no pattern of transformers knows the class, and its loss is then that of causal models.
            causal = (None, "ForCausalLM", "ForConditionalGeneration")
            return not config.is_encoder_decoder and getattr(module, "loss_type", None) in causal
    return False


# -- cutting a batch along its batch dimension ---------------------------------------------------------------------


def find_cut(batch: Batch, uncut: tuple[str, ...] = ()) -> Cut:
    """How a batch can be cut: along the leading size that its tensors share.

    Scalars and tensors of another leading size go to every piece as they are; so do those named in `uncut`. Where
    leading sizes differ and the batch holds lists of one length, as many as examples, the lists are cut.

    Raises:
        UsageError: nothing in the batch has a batch dimension.
    """
    if isinstance(batch, PackedSequence):
        raise UsageError(
            "a packed sequence cannot be cut into micro-batches", "Let the model pack the padded sequences"
        )
    sizes = Counter(tensor.shape[0] for tensor in _tensors(batch, uncut) if tensor.dim())
    shared = [size for size in sizes if size != 1]
    lengths = {len(found) for found in _lists(batch, uncut)}
    if len(shared) > 1 and len(lengths) == 1 and 1 not in lengths:
        return Cut(size=lengths.pop(), examples=True, uncut=uncut)
    if shared:
        # Of equally frequent ones the first that was met.
        return Cut(size=max(shared, key=lambda size: sizes[size]), uncut=uncut)
    if sizes:
        return Cut(size=1, uncut=uncut)
    if len(lengths) == 1:
        return Cut(size=lengths.pop(), examples=True, uncut=uncut)
    raise UsageError(
        f"a batch of type {type(batch).__name__} has no tensor with a batch dimension",
        "Give micro-batching tensors, or tuples, lists, dicts or dataclasses of them",
    )


def entry(batch: Batch, name: str) -> Any:
    """An entry of a batch by its name, or by its number written out; None where there is none."""
    found: list[Any] = []

    def look(known: str, value: Any) -> Any:
        if known == name:
            found.append(value)
        return value

    mapped(batch, look)
    return found[0] if found else None


def _entries(batch: Batch, uncut: tuple[str, ...]) -> Iterator[Any]:
    found: list[Any] = []

    def take(name: str, value: Any) -> Any:
        if name not in uncut:
            found.append(value)
        return value

    mapped(batch, take)
    yield from found


def _tensors(batch: Batch, uncut: tuple[str, ...]) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    else:
        for value in _entries(batch, uncut):
            yield from _tensors(value, uncut)


def _lists(batch: Batch, uncut: tuple[str, ...], *, outermost: bool = True) -> Iterator[list[Any]]:
    """The lists that could hold one entry for each example: not that of a whole batch's parts, as loaders make it."""
    if isinstance(batch, torch.Tensor):
        return
    if isinstance(batch, list) and batch:
        parts = outermost and not all(isinstance(item, Mapping) or is_plain(item) for item in batch)
        if not parts:
            yield batch
            return
    for value in _entries(batch, uncut):
        yield from _lists(value, uncut, outermost=False)
