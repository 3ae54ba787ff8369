"""Whether pieces of a batch give its gradients, found out on the loop's own loss before they are ever used.

NOTE [Compared, or not done]: a loss that compares examples with each other (contrastive, normalised advantages, dice
over a batch, weights of classes, a sum) has other gradients in pieces, and nothing but the gradients tells. So where
pieces were asked for, batches go forward and backward as a whole and in as many pieces as each rung would take, as they
are and made uneven (masks that end early, labels that are left out or others), from the same state and without dropout,
before the second and the third step. A number of pieces whose gradients are those of the whole but for rounding is
trusted, for batches of no more examples: a loss may change its form with their number. Where no batch fits as a whole,
nothing is proved; then as many examples as fit are compared only where ``numerics="approximate"`` allows it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.runtime.oom_forms import recognised
from vramfit.runtime.survival.leftovers import Recovery
from vramfit.runtime.survival.rank_votes import unsynchronised
from vramfit.runtime.survival.survival_settings import SurvivalSettings
from vramfit.techniques import AttachedProgram, Choice, Piece, find_technique
from vramfit.techniques.micro_batching import (
    BatchNormalisation,
    MicroBatchingSetting,
    batch_norms,
    find_cut,
)
from vramfit.techniques.support.batch_cut import Cut
from vramfit.techniques.support.no_dropout import nothing_dropped
from vramfit.techniques.support.promised_errors import ROUNDING_ERROR
from vramfit.techniques.support.uneven_batch import IGNORED, made_ragged
from vramfit.workload.containers import mapped

COMPARISONS = 2
"""Steps before which batches are compared with their pieces: the second has other data."""

_OF_ALL = 1e-3
"""A parameter's gradient is measured against no less than this part of all gradients' norm times what it may be off."""


@dataclass(frozen=True, kw_only=True)
class PieceWork:
    """A forward and a backward pass that can be repeated.

    Attributes:
        batch: of the step.
        run: goes forward and backward through the pieces that are attached.
        restore: puts back what a run moved.
    """

    batch: Any
    run: Callable[[], Any]
    restore: Callable[[], Any]


class PiecesCheck:
    """See NOTE [Compared, or not done].

    Args:
        live: what the pieces are attached to.
        settings: how the loss makes one number of a batch.

    Attributes:
        trusted: numbers of pieces that were compared, and hold.
        why_not: why others are not, in words; of the first that does not.
        examples: of the largest batch that was compared with its pieces; 0 before one was.
    """

    def __init__(self, live: AttachedProgram, settings: SurvivalSettings, recovery: Recovery) -> None:
        self._live, self._settings, self._recovery = live, settings, recovery
        self._times = 0
        self.trusted: set[int] = set()
        self.why_not = (
            "no batch of as many examples was done as a whole, with which its pieces could be compared; "
            'numerics="approximate" compares as many as fit'
        )
        self.examples = 0

    def due(self) -> bool:
        """Whether another batch is to be compared."""
        return self._times < COMPARISONS and (not self._times or bool(self.trusted))

    def compare(self, work: PieceWork, *, less: bool) -> None:
        """Compare a batch with its pieces.

        Args:
            less: try fewer examples where the whole batch does not fit, down to two.
        """
        size = find_cut(work.batch).size
        examples = size
        trusted: set[int] | None = None
        while trusted is None and examples > 1:
            trusted = self._attempt(work, examples, size)
            if trusted is None:
                self._recovery.release()
                examples = examples // 2 if less else 0
        if trusted is None:
            return
        self.examples = max(self.examples, examples)
        self.trusted = trusted & self.trusted if self._times else trusted
        self._times += 1

    def _attempt(self, work: PieceWork, examples: int, size: int) -> set[int] | None:
        """The numbers of pieces that hold, by so many examples of the batch; None where memory ran out."""
        try:
            return self._compared(work, examples, size)
        except UsageError as error:
            self.why_not = error.message
            return set()
        except BaseException as error:
            if not self._recovery.noted(error):
                raise
            return None

    def _compared(self, work: PieceWork, examples: int, size: int) -> set[int]:
        cut = find_cut(work.batch)
        batch = work.batch if examples == size else cut.piece(work.batch, 0, examples)
        cut = find_cut(batch)
        counts = list(counts_of(cut.size))
        for variant in (batch, *self._uneven(work, batch, cut)):
            whole = self._gradients(work, variant, 1)
            counts = [count for count in counts if self._holds(work, variant, count, whole)]
            if not counts:
                return set()
        if examples == size:
            return set(counts)
        return set(counts_of(size)) if counts == list(counts_of(cut.size)) else set()

    def _holds(self, work: PieceWork, batch: Any, count: int, whole: dict[str, torch.Tensor]) -> bool:
        """Whether so many pieces of a batch give its gradients."""
        try:
            pieces = self._gradients(work, batch, count)
        except (UsageError, RuntimeError, *_OF_LOSSES) as error:
            if recognised(error) is not None:
                raise
            self.why_not = f"the loss of {count} pieces of a batch ends in {type(error).__name__}: {error}"
            return False
        name, off = _farthest(whole, pieces)
        if off <= 1:
            return True
        by = (
            f"by {off:.2g} times what rounding may do"
            if math.isfinite(off)
            else "in values that are no numbers"
        )
        self.why_not = f"{count} pieces of a batch do not give its gradients: that of {name} differs {by}"
        return False

    def _gradients(self, work: PieceWork, batch: Any, count: int) -> dict[str, torch.Tensor]:
        """The gradients of a batch in so many pieces, on the host; nothing else is left of it."""
        live, model = self._live, self._live.model
        if count > 1:
            live.attach([pieces_choice(model, self._settings, count)])
        inner = live.splitter
        # Trainers cut the batch that they have by the splitter: so it is exchanged here for all of them.
        live.splitter = lambda _whole: inner(batch) if inner is not None else _as_one_piece(batch)
        try:
            with unsynchronised(model), _norms_frozen(model), nothing_dropped(model):
                work.run()
            return {
                name: (one.grad.to_dense() if one.grad.is_sparse else one.grad).detach().to("cpu", copy=True)
                for name, one in model.named_parameters()
                if one.grad is not None
            }
        finally:
            live.splitter = inner
            live.undo()
            live.splitter = None
            work.restore()

    def _uneven(self, work: PieceWork, batch: Any, cut: Cut) -> Iterator[Any]:
        """The batch with masks, labels and lengths that differ among examples, where the loss can do with it."""

        def accepts(tried: Any) -> bool:
            try:
                gradients = self._gradients(work, tried, 1)
            except (UsageError, RuntimeError, *_OF_LOSSES) as error:
                if recognised(error) is not None:
                    raise
                return False
            return all(bool(one.isfinite().all()) for one in gradients.values())

        ragged, varied = made_ragged(batch, cut, accepts)
        if varied:
            yield ragged
        for label in (IGNORED[0], None):
            changed = _with_another_label(batch, cut, label)
            if changed is not None and accepts(changed):
                yield changed


_OF_LOSSES = (ValueError, IndexError, KeyError, ZeroDivisionError, AssertionError, TypeError)
"""Errors that losses end in where a batch has too few examples for them, or a label that they do not know."""


def _as_one_piece(batch: Any) -> list[Piece]:
    return [Piece(batch=batch, weight=1.0, last=True)]


def counts_of(size: int) -> Iterator[int]:
    """Numbers of pieces that the ladder may take of a batch: 2, 4, 8, ... and single examples."""
    pieces = 1
    while pieces < size:
        pieces = min(2 * pieces, size)
        yield pieces


def pieces_choice(model: nn.Module, settings: SurvivalSettings, count: int) -> Choice:
    """Micro-batching in so many pieces."""
    norm = BatchNormalisation.PER_PIECE if batch_norms(model) else BatchNormalisation.NONE
    setting = MicroBatchingSetting(
        count=count, reduction=settings.reduction, labels=settings.labels, batch_norm=norm
    )
    return Choice(technique=find_technique("micro-batching"), setting=setting)


@contextlib.contextmanager
def _norms_frozen(model: nn.Module) -> Iterator[None]:
    """Batch norm with the statistics that it has: those of pieces are others, which is allowed by its own name."""
    norms = batch_norms(model)
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()


def _with_another_label(batch: Any, cut: Cut, label: int | None) -> Any:
    """The batch with the first example's label another, in each entry of one whole number an example.

    Args:
        label: what it becomes; None: the next one below or above.
    """
    changed = False

    def change(value: Any) -> Any:
        nonlocal changed
        if isinstance(value, torch.Tensor):
            if value.dim() != 1 or value.shape[0] != cut.size or value.dtype is not torch.int64:
                return value
            changed = True
            value = value.clone()
            first = int(value[0])
            value[0] = label if label is not None else first - 1 if first > 0 else first + 1
            return value
        return mapped(value, lambda _name, inner: change(inner))

    found = change(batch)
    return found if changed else None


def _farthest(whole: dict[str, torch.Tensor], pieces: dict[str, torch.Tensor]) -> tuple[str, float]:
    """The gradient that is farthest off, as a multiple of what rounding may do."""
    norms = {name: float(value.double().norm()) for name, value in whole.items()}
    overall = math.sqrt(sum(norm**2 for norm in norms.values()))
    worst, where = 0.0, ""
    for name in whole.keys() | pieces.keys():
        one, other = whole.get(name), pieces.get(name)
        given = one if one is not None else other
        assert given is not None
        mine = torch.zeros_like(given) if one is None else one
        theirs = torch.zeros_like(given) if other is None else other
        allowed = ROUNDING_ERROR.get(given.dtype, ROUNDING_ERROR[torch.float32])
        room = allowed * max(norms.get(name, 0.0), _OF_ALL * overall, torch.finfo(torch.float32).tiny)
        off = float((mine.double() - theirs.double()).norm()) / room
        if not off <= worst:
            worst, where = (math.inf if math.isnan(off) else off), name
    return where, worst
