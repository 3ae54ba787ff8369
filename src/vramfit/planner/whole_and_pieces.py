"""Tries whether pieces of a batch give the gradients of the whole, with every parameter of a real model on the CPU.

NOTE [Two batches]: a few examples show which weights the pieces could have; they are quick, so all ways of weighing are
tried. A loss may change its form with its batch, though: the mean of the 64 worst losses, a term from 32 examples
on, labels of which few are ignored. What holds for the few is therefore held against a large batch, the workload's own
where time and memory allow it. It is cut into pieces of many sizes at once, from half of it down to single examples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.planner.devices.cpu_backend import CPU_FLOPS
from vramfit.planner.trial_attempts import NothingDropped, silence_dropout
from vramfit.planner.uneven_batch import Varied, made_ragged, made_uneven
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.core.technique import Choice
from vramfit.techniques.gradient_caching import (
    GradientCaching,
    GradientCachingSetting,
    encoder_candidates,
)
from vramfit.techniques.micro_batching import (
    Cut,
    MicroBatchingSetting,
    Reduction,
    Splitter,
    batch_norms,
    batch_size_name,
    find_cut,
    find_labels,
)
from vramfit.torch_internals.layers import BatchNorm
from vramfit.workload import Batch, Workload
from vramfit.workload.containers import mapped

EXAMPLES = 4
"""In the batch that is tried: one in the first piece and the rest in the second, so that means and sums differ."""

# Of a parameter's gradient, and of the gradient of all: what 32 bits round differs by less, what couples by far more.
_OWN, _WHOLE = 1e-4, 1e-6
# The same in 64 bits, where parts of a model may still round to 32.
_OWN_64, _WHOLE_64 = 1e-6, 1e-7
_DOUBTFUL = 100
"""Differences below this many times what 32 bits round may be rounding of a deep model: 64 bits decide."""

_SECONDS = 10.0
"""Seconds that the comparison with a large batch may take by its estimate."""

_PASSES = 4
"""Forward and backward passes over the large batch: whole and in pieces, as it is made and made uneven."""

_MOST_PIECES = 16
_PIECES_BYTES = 1 << 31
"""Pieces of the large batch, at most, and bytes of their gradients, which are kept until all weights were tried."""

_BATCH_BYTES = 2 << 30
"""Bytes that the large batch may need on the CPU, activations included, by the profile of the plain step."""

_FEW = 100_000
"""Values of gradients, about, that each way of weighing pieces is held against at first."""

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What a trial came to.

    Attributes:
        setting: with which pieces give the gradients of the whole.
        parameters: whose gradients were compared.
        varied: names of the batch's entries that were made uneven.
        worst: the largest difference, as a part of what rounding may do.
        examples: of the largest batch that was compared with its pieces.
    """

    setting: MicroBatchingSetting
    parameters: int
    varied: tuple[str, ...]
    worst: float
    examples: int = EXAMPLES


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeBatch:
    """How large a batch to compare with its pieces, beyond the few examples; see NOTE [Two batches].

    Attributes:
        examples: of the workload's own batch.
        flops: of a plain step, per example and parameter; a dense layer that is used once takes 6.
        memory: bytes of a plain step per example and parameter; 0 where nobody counted them.
        seconds: that the comparison may take by its estimate.
    """

    examples: int = EXAMPLES
    flops: float = 6.0
    memory: float = 0.0
    seconds: float = _SECONDS

    def affordable(self, parameters: int) -> int:
        """How many examples the comparison can have: the own batch, or a part of it.

        Args:
            parameters: of the model that is tried, in numbers.
        """
        seconds = max(1.0, self.flops * parameters) / CPU_FLOPS
        most = min(float(self.examples), self.seconds / _PASSES / seconds)
        if self.memory:
            most = min(most, _BATCH_BYTES / (self.memory * parameters))
        return int(most)


class NoPiecesError(UsageError):
    """Pieces of a batch do not give the gradients of the whole."""


class NotComparableError(UsageError):
    """A batch does not give the same gradients twice, so that nothing can be said of its pieces."""


def try_pieces(
    workload: Workload,
    setting: MicroBatchingSetting | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    model: Callable[[], nn.Module] | None = None,
    large: LargeBatch | None = None,
) -> Tried:
    """Compare the gradients of a batch with those of its pieces, on the CPU and in training mode.

    A batch of four examples finds the weights of the pieces, a large one confirms them: see NOTE [Two batches].

    Dropout is off, parameters that are zero get small numbers, since zeros would hide what comes before them, and the
    batch is looked at as it is made and with its masks, labels and lengths made uneven. Batch norm keeps the statistics
    that it has: it is known to couple examples, and micro-batching says so by itself. It takes four times the model's
    memory in 32 bits, and up to 2 GiB more for the pieces of a large batch.

    Args:
        setting: where labels are, which are ignored, what stays uncut, and the reduction; ``auto`` tries all.
        sizes: of the batch, in place of the workload's, except for the number of examples.
        model: makes one that stands in for the workload's.
        large: how large a batch confirms what four examples show; None for those alone.

    Raises:
        NoPiecesError: no way of weighing pieces gives the gradients of the whole.
        NotComparableError: random numbers are drawn in training, other than those of dropout.
        UsageError: the workload has no loss of its own, or a batch that cannot be cut.
    """
    setting = setting or MicroBatchingSetting()
    with _a_model(workload, model, "reduction") as made:
        _prepare(made)
        batch = _few_examples(workload, sizes)
        cut = find_cut(batch, setting.uncut)
        if cut.size < 2:
            raise UsageError(
                "the batch function makes one example where four are asked for", "Let it keep to its sizes"
            )
        trial = _GradientTrial(workload, made, setting)
        ragged, varied = made_ragged(batch, cut, trial.accepts)
        cases = [_Case(one, cut) for one in ([ragged, batch] if varied else [batch])]
        found = _holding(trial, cases, tuple(_candidates(batch, setting, varied)))
        examples = (large or LargeBatch()).affordable(sum(value.numel() for value in made.parameters()))
        names = tuple(dict.fromkeys(entry.name for entry in varied if entry.name))
        if examples > cut.size:
            whole = workload.batch(
                **{**workload.sizes, **(sizes or {}), batch_size_name(workload.sizes): examples}
            )
            cut = find_cut(whole, setting.uncut)
            cases, names = _large_cases(trial, whole, cut, varied)
            found = _holding(trial, cases, tuple(way.setting for way in found))
    return Tried(
        setting=replace(setting, **found[0].setting),  # type: ignore[arg-type]
        parameters=found[0].parameters,
        varied=names,
        worst=found[0].off.share,
        examples=cut.size,
    )


def _large_cases(
    trial: _GradientTrial, batch: Batch, cut: Cut, varied: Sequence[Varied]
) -> tuple[list[_Case], tuple[str, ...]]:
    """A large batch made uneven and as it is, with the names of what was made uneven."""
    if cut.size < 2:
        raise UsageError(
            "the batch function makes one example where more are asked for", "Let it keep to its sizes"
        )
    gradient_bytes = 4 * sum(parameter.numel() for parameter in trial.model.parameters())
    pieces = max(2, min(_MOST_PIECES, _PIECES_BYTES // max(1, gradient_bytes)))
    uneven, names = made_uneven(batch, cut, varied, trial.accepts)
    batches = [uneven, batch] if names else [batch]
    return [_Case(one, cut, spans_of_many_sizes(cut.size, pieces)) for one in batches], names


def spans_of_many_sizes(size: int, pieces: int) -> list[tuple[int, int]]:
    """Spans that fill a batch, the first of about half of it, the last of one example, none as large as another.

    Args:
        pieces: spans at most; at least 2.
    """
    ratio = max(2.0, (size / 2) ** (1 / max(1, pieces - 2)))
    lengths = [1]
    while len(lengths) < pieces - 1 and sum(lengths) + 1 < size:
        longer = max(lengths[-1] + 1, round(lengths[-1] * ratio))
        if sum(lengths) + 2 * longer > size:
            break
        lengths.append(longer)
    if rest := size - sum(lengths):
        lengths.append(rest)
    ends = list(itertools.accumulate(reversed(lengths), initial=0))
    return list(itertools.pairwise(ends))


def _holding(trial: _GradientTrial, cases: list[_Case], candidates: tuple[_Weighing, ...]) -> list[_Weighed]:
    """The ways of weighing that hold for all cases, the plainest first.

    Raises:
        NoPiecesError: none does.
        NotComparableError: random numbers are drawn in training.
    """
    found = trial.weighed(cases, candidates)
    if 1 < found[0].off.share < _DOUBTFUL:
        found = _in_64_bits(trial, found, cases)
    if not found[0].off.share <= 1:
        raise _differs(trial, found[0], cases[-1])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoders:
    """What a trial of encoders in pieces came to.

    Attributes:
        modules: their names; an empty one is the model itself.
        parameters: whose gradients were compared.
    """

    modules: tuple[str, ...]
    parameters: int


def try_encoders(
    workload: Workload,
    *,
    sizes: Mapping[str, int] | None = None,
    model: Callable[[], nn.Module] | None = None,
) -> Encoders:
    """Find the parts of a model that may run in pieces while its loss is that of the whole batch.

    Gradients of a batch of four examples are compared, on the CPU and without dropout, as `try_pieces` does.

    Args:
        sizes: of the batch, in place of the workload's; the number of examples is always four.
        model: makes one that stands in for the workload's.

    Raises:
        NoPiecesError: no part of it does.
        UsageError: the workload has no loss of its own, or a batch that cannot be cut.
    """
    with _a_model(workload, model, "encoders") as made:
        if batch_norms(made):
            raise NoPiecesError("batch norm couples the examples of a batch", "Freeze or replace it")
        candidates = tuple(encoder_candidates(made))  # as they are, with dropout
        _prepare(made)
        batch = _few_examples(workload, sizes)
        trial = _GradientTrial(workload, made, MicroBatchingSetting())
        expected = trial.gradients(batch, whole=True)
        for paths in candidates:
            found = _in_pieces(trial, batch, paths)
            if found is None:
                continue
            compared = _Compared(expected, [found])
            if compared.judge((1.0,), trial, compared.names).share <= 1:
                return Encoders(modules=paths, parameters=len(compared.names))
    raise NoPiecesError("no part of the model gives the same gradients in pieces of the batch", "")


@contextmanager
def _a_model(workload: Workload, make: Callable[[], nn.Module] | None, sought: str) -> Iterator[nn.Module]:
    """A model in 32 bits, the same each time, and no dropout by functions while it is tried."""
    if workload.loss is None or workload.step is not None:
        raise UsageError(
            f"a workload without a loss, or with a step of its own, has no {sought}", "Give it a loss"
        )
    with torch.random.fork_rng(devices=[]), NothingDropped():
        torch.manual_seed(0)
        yield (workload.make_model if make is None else make)().float()


def _few_examples(workload: Workload, sizes: Mapping[str, int] | None) -> Batch:
    return workload.batch(**{**workload.sizes, **(sizes or {}), batch_size_name(workload.sizes): EXAMPLES})


def _in_pieces(trial: _GradientTrial, batch: Batch, paths: tuple[str, ...]) -> Gradients | None:
    """Gradients with modules in pieces; None where they cannot run so."""
    technique = GradientCaching()
    live = AttachedProgram(trial.model, None)
    try:
        live.attach((Choice(technique=technique, setting=GradientCachingSetting(modules=paths)),))
        return trial.gradients(batch, whole=True)
    except Exception:  # whatever the model's code makes of results in pieces
        return None
    finally:
        live.undo()


def _prepare(model: nn.Module) -> None:
    """Training mode without dropout and without zeros, batch norm with the statistics that it has."""
    norms = batch_norms(model)
    if not model.training:
        for module in model.modules():
            module.training = module.training or not isinstance(module, BatchNorm)
    for norm in norms:
        norm.eval()
    silence_dropout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.numel() and not parameter.any():
                parameter.normal_(std=0.02)


_Weighing = dict[str, Reduction | int | str]


def _candidates(
    batch: Batch, setting: MicroBatchingSetting, varied: tuple[Varied, ...]
) -> Iterator[_Weighing]:
    """Ways of weighing pieces, the plainest first."""
    if setting.reduction is not Reduction.AUTO:
        yield {"reduction": setting.reduction}
        return
    yield {"reduction": Reduction.MEAN}
    yield {"reduction": Reduction.SUM}
    tokens = (Reduction.NEXT_TOKENS, Reduction.TOKENS)
    for reduction in tokens:
        yield {"reduction": reduction}
    for one in varied:
        if one.name and one.mask:
            yield {"reduction": Reduction.WEIGHTS, "labels": one.name}
        labels = find_labels(batch, one.name) if one.name else None
        if labels is not None:
            for reduction in tokens if labels.dim() > 1 else (Reduction.TOKENS,):
                yield {"reduction": reduction, "labels": one.name, "ignore_index": one.value}
    if isinstance(batch, torch.Tensor):
        for one in varied:
            for reduction in tokens:
                yield {"reduction": reduction, "ignore_index": one.value}


@dataclass(frozen=True, slots=True)
class _Off:
    """How far pieces are off in the worst of the parameters."""

    share: float = 0.0
    """The difference as a part of what rounding may do."""
    part: float = 0.0
    """The same as a part of that gradient's norm."""
    name: str = ""


@dataclass(kw_only=True, slots=True)
class _Weighed:
    """One way of weighing pieces, and how far it is off in the worst of the batches."""

    setting: _Weighing
    off: _Off = _Off()
    parameters: int = 0

    def take(self, off: _Off, parameters: int) -> None:
        """Keep the worst difference so far."""
        self.off = max(self.off, off, key=lambda one: one.share)
        self.parameters = parameters


@dataclass(frozen=True, slots=True)
class _Case:
    """A batch, and the pieces that it is compared with."""

    batch: Batch
    cut: Cut
    spans: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        """One example and the rest, where no spans are given, so that means and sums differ."""
        if not self.spans:
            object.__setattr__(self, "spans", ((0, 1), (1, self.cut.size)))


@dataclass(slots=True)
class _GradientTrial:
    """A model with a workload's loss, and batches for it."""

    workload: Workload
    model: nn.Module
    setting: MicroBatchingSetting
    own: float = _OWN
    whole: float = _WHOLE
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss, with the same random numbers each time."""
        assert self.workload.loss is not None
        torch.manual_seed(self.seed)
        found = self.workload.loss(self.model, _cast(batch, self.dtype))
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise UsageError("the loss is no scalar", "Take its mean or its sum")
        return found

    def accepts(self, batch: Batch) -> bool:
        """Whether a batch gives a loss at all."""
        with torch.no_grad(), _buffers_kept(self.model):
            try:
                return math.isfinite(float(self.loss(batch)))
            except Exception:  # whatever the user's code makes of a label that it does not know
                return False

    def gradients(self, batch: Batch, *, whole: bool = False) -> Gradients:
        """The gradients of every parameter that has one.

        Only a piece may have a loss that is no number, where no label counts.
        """
        self.model.zero_grad(set_to_none=True)
        with _buffers_kept(self.model):
            loss = self.loss(batch)
            if whole and not math.isfinite(value := float(loss.detach())):
                raise UsageError(
                    f"the loss of a batch is {value}", "Let batch make values that the model can train on"
                )
            loss.backward()
        found = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        return {name: grad.to_dense() if grad.is_sparse else grad for name, grad in found.items()}

    def weighed(self, cases: Sequence[_Case], candidates: tuple[_Weighing, ...]) -> list[_Weighed]:
        """The ways of weighing that hold for all cases; where none does, the one that comes closest."""
        found = [_Weighed(setting=one) for one in candidates]
        for case in cases:
            compared = _Compared(
                self.gradients(case.batch, whole=True),
                [self.gradients(case.cut.piece(case.batch, *span)) for span in case.spans],
            )
            weights = {id(one): self._weights(one, case) for one in found}
            known = [one for one in found if weights[id(one)]] or found[:1]
            # Large parameters take their time: only what holds for the small ones is held against all.
            rough = {id(one): compared.judge(weights[id(one)], self, compared.few) for one in known}
            alive = [one for one in known if rough[id(one)].share <= 1]
            found = alive or [min(known, key=lambda one: rough[id(one)].share)]
            done: dict[tuple[float, ...], _Off] = {}
            for one in found:
                key = tuple(weights[id(one)])
                if key not in done:
                    done[key] = compared.judge(key, self, compared.names)
                one.take(done[key], len(compared.names))
            found = [one for one in found if one.off.share <= 1] or found[:1]
            if found[0].off.share > 1:
                break
        return found

    def _weights(self, one: _Weighed, case: _Case) -> tuple[float, ...]:
        """The weights of the pieces; empty where the batch has no labels to count."""
        setting = replace(self.setting, **one.setting)  # type: ignore[arg-type]
        try:
            return tuple(Splitter(setting, shifts=False).weights(case.batch, case.cut, list(case.spans)))
        except UsageError:
            return ()


class _Compared:
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

    def judge(self, weights: tuple[float, ...], trial: _GradientTrial, names: list[str]) -> _Off:
        """How far pieces with these weights are off."""
        worst = _Off()
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
                worst = _Off(share, off / norm if norm else math.inf, name)
        return worst


def _in_64_bits(trial: _GradientTrial, found: list[_Weighed], cases: list[_Case]) -> list[_Weighed]:
    """The same with twice the bits, for one way of weighing; as it was where the model's code wants 32."""
    before = trial.own, trial.whole, trial.dtype
    trial.model.double()
    trial.own, trial.whole, trial.dtype = _OWN_64, _WHOLE_64, torch.float64
    try:
        return trial.weighed(cases, (found[0].setting,))
    except Exception:
        return found
    finally:
        trial.model.float()
        trial.own, trial.whole, trial.dtype = before


def _differs(trial: _GradientTrial, found: _Weighed, case: _Case) -> UsageError:
    """Why pieces cannot stand for the whole."""
    values = []
    for trial.seed in (0, 1):
        with torch.no_grad(), _buffers_kept(trial.model):
            values.append(float(trial.loss(case.batch)))
    if values[0] != values[1]:
        return NotComparableError(
            "pieces of a batch cannot be compared with it: the model or the loss draws random numbers in training",
            "Allow micro-batching by its name if each example draws its own",
        )
    off = f"{found.off.part:.2g} of its norm" if math.isfinite(found.off.part) else "more than it is"
    return NoPiecesError(
        f"pieces of a batch of {case.cut.size:,} do not give its gradients: that of {found.off.name} differs by {off}, "
        f"with the reduction {_in_words(found.setting)} at best",
        "A loss that compares examples with each other cannot be cut; say where labels or weights are if it has some",
    )


def _in_words(setting: _Weighing) -> str:
    reduction = setting["reduction"]
    assert isinstance(reduction, Reduction)
    return reduction.value + (f" of {setting['labels']}" if "labels" in setting else "")


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """What a forward pass writes to buffers (running statistics, counters) is taken back."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch for a model of that dtype: 16 bits become as many as the model has, and so do 32."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.dtype in (torch.float16, torch.bfloat16, torch.float32) else batch
    return mapped(batch, lambda _name, value: _cast(value, dtype))
