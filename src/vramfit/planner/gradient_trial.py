"""A model with a workload's loss, whose gradients for a batch are held against those of its pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.piece_rules import PieceRules
from vramfit.planner.seeding import seed_all
from vramfit.techniques.micro_batching import MicroBatchingSetting, Reduction, Splitter
from vramfit.techniques.support.batch_cut import Cut
from vramfit.training_state.forward_state import ForwardState, Written, only_written
from vramfit.workload import Batch, Workload
from vramfit.workload.containers import mapped

# Of a parameter's gradient, and of the gradient of all: what 32 bits round differs by less, what couples by far more.
_OWN, _WHOLE = 1e-4, 1e-6
# The same in 64 bits, where parts of a model may still round to 32.
_OWN_64, _WHOLE_64 = 1e-6, 1e-7

_FEW = 100_000
"""Values of gradients, about, that each way of weighing pieces is held against at first."""


Gradients = dict[str, torch.Tensor]

Weighing = dict[str, Reduction | int | str]


@dataclass(frozen=True, slots=True)
class Off:
    """How far pieces are off in the worst of the parameters."""

    share: float = 0.0
    """The difference as a part of what rounding may do."""
    part: float = 0.0
    """The same as a part of that gradient's norm."""
    name: str = ""


@dataclass(kw_only=True, slots=True)
class Weighed:
    """One way of weighing pieces, and how far it is off in the worst of the batches."""

    setting: Weighing
    off: Off = Off()
    parameters: int = 0

    def take(self, off: Off, parameters: int) -> None:
        """Keep the worst difference so far."""
        self.off = max(self.off, off, key=lambda one: one.share)
        self.parameters = parameters


@dataclass(frozen=True, slots=True)
class PiecesCase:
    """A batch, and the pieces that it is compared with."""

    batch: Batch
    cut: Cut
    spans: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        """One example and the rest, where no spans are given, so that means and sums differ."""
        if not self.spans:
            object.__setattr__(self, "spans", ((0, 1), (1, self.cut.size)))


@dataclass(frozen=True, slots=True)
class TrialPass:
    """The gradients of a pass, and what it wrote beside them."""

    gradients: Gradients
    written: Mapping[str, Written]


@dataclass(slots=True)
class GradientTrial:
    """A model with a workload's loss, and batches for it."""

    workload: Workload
    model: nn.Module
    setting: MicroBatchingSetting
    own: float = _OWN
    whole: float = _WHOLE
    dtype: torch.dtype = torch.float32
    seed: int = 0
    rules: PieceRules = field(default_factory=PieceRules)
    state: ForwardState = field(init=False)

    def __post_init__(self) -> None:
        """Note the state that each pass begins with."""
        self.note_state()

    def note_state(self) -> None:
        """Note the state that each pass begins with, in the model's present dtype."""
        self.state = ForwardState(self.model, self.workload.loss)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss, with the same random numbers each time."""
        assert self.workload.loss is not None
        seed_all(self.seed)
        found = self.workload.loss(self.model, _cast(batch, self.dtype))
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise UsageError("the loss is no scalar", "Take its mean or its sum")
        return found

    def accepts(self, batch: Batch) -> bool:
        """Whether a batch gives a loss at all."""
        with torch.no_grad():
            try:
                return math.isfinite(float(self.loss(batch)))
            except Exception:  # whatever the user's code makes of a label that it does not know
                return False
            finally:
                self.state.restore()

    def gradients(self, batch: Batch, *, whole: bool = False) -> Gradients:
        """The gradients of every parameter that has one."""
        return self.passed(batch, whole=whole).gradients

    def passed(self, batch: Batch, *, whole: bool = False, left: frozenset[str] = frozenset()) -> TrialPass:
        """What a pass gives, from the state that all begin with; that state is put back.

        Only a piece may have a loss of NaN, where all its labels are ignored.

        Args:
            left: names of attributes that stay as the pass wrote them.
        """
        self.model.zero_grad(set_to_none=True)
        try:
            loss = self.loss(batch)
            if whole and not math.isfinite(value := float(loss.detach())):
                raise UsageError(
                    f"the loss of a batch is {value}", "Let batch make values that the model can train on"
                )
            loss.backward()
            written = self.state.written()
        finally:
            self.state.restore(left)
        found = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        dense = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}
        return TrialPass(dense, written)

    def is_scratch(self, batch: Batch, names: frozenset[str]) -> bool:
        """Whether attributes are only written: a pass that begins with what another wrote there gives the same."""

        def passed(left: frozenset[str]) -> tuple[Gradients, Mapping[str, Written]]:
            found = self.passed(batch, left=left)
            return found.gradients, found.written

        return only_written(passed, names)

    def weighed(self, cases: Sequence[PiecesCase], candidates: tuple[Weighing, ...]) -> list[Weighed]:
        """The ways of weighing that hold for all cases; where none does, the one that comes closest."""
        found = [Weighed(setting=one) for one in candidates]
        for case in cases:
            whole = self.passed(case.batch, whole=True)
            pieces = [self.passed(case.cut.piece(case.batch, *span)) for span in case.spans]
            shares = [(stop - start) / case.cut.size for start, stop in case.spans]
            self.rules.take(whole.written, [piece.written for piece in pieces], shares)
            compared = ComparedPieces(whole.gradients, [piece.gradients for piece in pieces])
            del whole, pieces
            weights = {id(one): self._weights(one, case) for one in found}
            known = [one for one in found if weights[id(one)]] or found[:1]
            # Large parameters take their time: only what holds for the small ones is held against all.
            rough = {id(one): compared.judge(weights[id(one)], self, compared.few) for one in known}
            alive = [one for one in known if rough[id(one)].share <= 1]
            found = alive or [min(known, key=lambda one: rough[id(one)].share)]
            done: dict[tuple[float, ...], Off] = {}
            for one in found:
                key = tuple(weights[id(one)])
                if key not in done:
                    done[key] = compared.judge(key, self, compared.names)
                one.take(done[key], len(compared.names))
            found = [one for one in found if one.off.share <= 1] or found[:1]
            if found[0].off.share > 1:
                break
        return found

    def _weights(self, one: Weighed, case: PiecesCase) -> tuple[float, ...]:
        """The weights of the pieces; empty where the batch has no labels to count."""
        setting = replace(self.setting, **one.setting)  # type: ignore[arg-type]
        try:
            return tuple(Splitter(setting, shifts=False).weights(case.batch, case.cut, list(case.spans)))
        except UsageError:
            return ()


class ComparedPieces:
    """Gradients of a batch beside those of its pieces.

    Attributes:
        names: of all parameters that have one.
        few: of the smallest of them.
    """

    def __init__(self, expected: Gradients, pieces: list[Gradients]) -> None:
        self._expected, self._pieces = expected, pieces
        sizes = {name: value.numel() for part in (*pieces, expected) for name, value in part.items()}
        self.names = sorted(sizes, key=lambda name: (sizes[name], name))
        ends = itertools.accumulate(sizes[name] for name in self.names)
        self.few = [name for name, end in zip(self.names, ends, strict=True) if end <= _FEW] or self.names[:1]
        self._norms = {name: float(value.norm()) for name, value in expected.items()}
        self._whole = math.sqrt(sum(norm**2 for norm in self._norms.values()))

    def judge(self, weights: tuple[float, ...], trial: GradientTrial, names: list[str]) -> Off:
        """How far pieces with these weights are off."""
        worst = Off()
        for name in names:
            norm = self._norms.get(name, 0.0)
            parts = [
                weight * piece[name]
                for piece, weight in zip(self._pieces, weights, strict=False)
                if weight and name in piece
            ]
            total = sum(parts) if parts else torch.zeros(())
            off = float((total - self._expected.get(name, torch.zeros(()))).norm())
            share = off / max(trial.own * norm, trial.whole * self._whole, torch.finfo(torch.float32).tiny)
            share = math.inf if math.isnan(share) else share
            if share > worst.share:
                worst = Off(share, off / norm if norm else math.inf, name)
        return worst


def in_64_bits(trial: GradientTrial, found: list[Weighed], cases: list[PiecesCase]) -> list[Weighed]:
    """The same with twice the bits, for one way of weighing; as it was where the model's code wants 32."""
    before = trial.own, trial.whole, trial.dtype
    trial.model.double()
    trial.note_state()
    trial.own, trial.whole, trial.dtype = _OWN_64, _WHOLE_64, torch.float64
    try:
        return trial.weighed(cases, (found[0].setting,))
    except Exception:
        return found
    finally:
        trial.model.float()
        trial.note_state()
        trial.own, trial.whole, trial.dtype = before


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch for a model of that dtype: 16 bits become as many as the model has, and so do 32."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.dtype in (torch.float16, torch.bfloat16, torch.float32) else batch
    return mapped(batch, lambda _name, value: _cast(value, dtype))
