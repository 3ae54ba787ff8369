"""Finds out how a workload's loss makes one number of a batch, and whether pieces can stand for the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.batch_cutting import find_cut, mapped
from vramfit.techniques.micro_batching import (
    MicroBatchingSetting,
    Reduction,
    Splitter,
    batch_size_name,
    find_labels,
)
from vramfit.workload import Batch, Workload

EXAMPLES = 4
"""In the batch that a loss is tried on."""

# Losses of pieces differ by far more than this, and their rounding in 32 bits by far less.
_TOLERANCE = 1e-4
_CANDIDATES = (Reduction.MEAN, Reduction.SUM, Reduction.NEXT_TOKENS, Reduction.TOKENS)


def detect_reduction(workload: Workload, setting: MicroBatchingSetting | None = None) -> Reduction:
    """How a workload's loss makes one number of a batch, by trying it.

    The loss of four examples is compared with those of the first one and of the other three, each weighted as each
    reduction would have it. Some integer labels of two dimensions are ignored for that, so that a mean over tokens
    differs from one over examples. The model is built on the CPU, in 32 bits, and runs forward three times, in
    ``eval()`` mode; what a loss adds in training alone is not seen. Random numbers are the same each time. It takes
    the host's memory for the model in 32 bits, and real values: not inside a virtual GPU.

    Args:
        workload: with a loss; only the number of examples is changed.
        setting: where labels are, which are ignored, and what stays uncut.

    Raises:
        UsageError: the workload has no loss of its own, or the whole is neither the mean nor the sum of its pieces:
            examples are compared with each other, or each piece draws random numbers of its own.
    """
    setting = setting or MicroBatchingSetting()
    with _probe(workload) as (model, batch):
        return _matching(_Losses(workload, model, batch, setting), setting)


class _Losses:
    """Losses of batches of one workload, with the same random numbers each time.

    Attributes:
        batch: the whole batch, with some labels ignored where the loss can do with that.
        whole: its loss.
    """

    def __init__(
        self, workload: Workload, model: nn.Module, batch: Batch, setting: MicroBatchingSetting
    ) -> None:
        self.workload, self.model = workload, model
        self.batch = _with_ignored_labels(batch, setting)
        with torch.no_grad():
            try:
                self.whole = float(self.of(self.batch))
            except (IndexError, RuntimeError, ValueError):
                if self.batch is batch:  # its own fault, not that of the changed labels
                    raise
                self.batch = batch
                self.whole = float(self.of(batch))

    def of(self, batch: Batch) -> torch.Tensor:
        assert self.workload.loss is not None
        torch.manual_seed(0)
        loss = self.workload.loss(self.model, batch)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UsageError("the loss is no scalar", "Take its mean or its sum")
        return loss


@contextmanager
def _probe(workload: Workload) -> Iterator[tuple[nn.Module, Batch]]:
    """The model and a small batch of a workload; random numbers of the program are left as they were."""
    if workload.loss is None or workload.step is not None:
        raise UsageError(
            "a workload without a loss, or with a step of its own, has no reduction", "Give it a loss"
        )
    name = batch_size_name(workload.sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = workload.model().float().eval()
        yield model, workload.batch(**{**workload.sizes, name: EXAMPLES})


def _with_ignored_labels(batch: Batch, setting: MicroBatchingSetting) -> Batch:
    """The batch with half the labels of its first example ignored, or itself where it has no such labels."""
    labels = None if isinstance(batch, torch.Tensor) else find_labels(batch, setting.labels)
    if labels is None or labels.dtype != torch.int64 or labels.dim() < 2 or labels.shape[1] < 4:
        return batch
    changed = labels.clone()
    changed[0, labels.shape[1] // 2 :] = setting.ignore_index
    return mapped(batch, lambda name, value: changed if name == setting.labels else value)


def _matching(losses: _Losses, setting: MicroBatchingSetting) -> Reduction:
    """The reduction that makes the loss of the whole from those of two pieces."""
    batch = losses.batch
    cut = find_cut(batch, setting.uncut)
    if cut.size < 2:
        raise UsageError(
            "the batch function makes one example where four are asked for", "Let it keep to its sizes"
        )
    spans = [(0, 1), (1, cut.size)]
    with torch.no_grad():
        parts = [float(losses.of(cut.piece(batch, *span))) for span in spans]
    misses = {}
    for reduction in _CANDIDATES:
        splitter = Splitter(dataclasses.replace(setting, reduction=reduction), shifts=False)
        try:
            weights = splitter.weights(batch, cut, spans)
        except UsageError:  # no labels to count
            continue
        total = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        misses[reduction] = abs(total - losses.whole)
    best = min(misses, key=lambda reduction: misses[reduction])
    if not misses[best] <= _TOLERANCE * abs(losses.whole):
        raise UsageError(
            f"the loss of a batch, {losses.whole:.6g}, is neither the mean nor the sum of its pieces' losses, "
            f"{parts[0]:.6g} and {parts[1]:.6g}",
            "A loss that compares examples or draws random numbers cannot be cut; "
            "say where labels are if it is a mean over labels",
        )
    return best
