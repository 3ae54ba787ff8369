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
from vramfit.planner.gradient_trial import (
    ComparedPieces,
    GradientTrial,
    PiecesCase,
    TrialPass,
    Weighed,
    Weighing,
    in_64_bits,
)
from vramfit.planner.piece_rules import PieceRules, StateNames
from vramfit.planner.seeding import generators_kept, seed_all
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.core.technique import Choice
from vramfit.techniques.gradient_caching import (
    GradientCaching,
    GradientCachingSetting,
    encoder_candidates,
)
from vramfit.techniques.micro_batching import (
    MicroBatchingSetting,
    Reduction,
    batch_norms,
    batch_size_name,
    find_cut,
    find_labels,
)
from vramfit.techniques.support.batch_cut import Cut
from vramfit.techniques.support.no_dropout import NothingDropped, silence_dropout
from vramfit.techniques.support.uneven_batch import Varied, classes_of_examples, made_ragged, made_uneven
from vramfit.torch_internals.layers import BatchNorm
from vramfit.workload import Batch, Workload

EXAMPLES = 4
"""In the batch that is tried: one in the first piece and the rest in the second, so that means and sums differ."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What a trial came to.

    Attributes:
        setting: with which pieces give the gradients of the whole.
        parameters: whose gradients were compared.
        varied: names of the batch's entries that were made uneven.
        worst: the largest difference, as a part of what rounding may do.
        examples: of the largest batch that was compared with its pieces.
        assumed: names of labels none of which is ignored in the workload's batch, as pieces need.
    """

    setting: MicroBatchingSetting
    parameters: int
    varied: tuple[str, ...]
    worst: float
    examples: int = EXAMPLES
    assumed: tuple[str, ...] = ()


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
        try:
            return _tried(GradientTrial(workload, made, setting), batch, sizes, large)
        except NoPiecesError:
            if not (kept := classes_of_examples(batch, cut)):
                raise
        # A mean over labels beside another one: it has pieces where no label is ignored, as in the workload's batch.
        found = _tried(GradientTrial(workload, made, setting), batch, sizes, large, classes=False)
        return replace(found, assumed=kept)


def _tried(
    trial: GradientTrial,
    batch: Batch,
    sizes: Mapping[str, int] | None,
    large: LargeBatch | None,
    *,
    classes: bool = True,
) -> Tried:
    """Compare a batch of a few examples with its pieces, then a large one; see NOTE [Two batches].

    Args:
        classes: whether labels of one class for each example are ignored for some of them.

    Raises:
        NoPiecesError: no way of weighing pieces gives the gradients of the whole.
        NotComparableError: random numbers are drawn in training, other than those of dropout.
    """
    workload, setting = trial.workload, trial.setting
    cut = find_cut(batch, setting.uncut)
    ragged, varied = made_ragged(batch, cut, trial.accepts, classes=classes)
    cases = [PiecesCase(one, cut) for one in ([ragged, batch] if varied else [batch])]
    found = _holding(trial, cases, tuple(_candidates(batch, setting, varied)))
    examples = (large or LargeBatch()).affordable(sum(value.numel() for value in trial.model.parameters()))
    names = tuple(dict.fromkeys(entry.name for entry in varied if entry.name))
    if examples > cut.size:
        whole = workload.batch(
            **{**workload.sizes, **(sizes or {}), batch_size_name(workload.sizes): examples}
        )
        cut = find_cut(whole, setting.uncut)
        cases, names = _large_cases(trial, whole, cut, varied)
        found = _holding(trial, cases, tuple(way.setting for way in found))
    setting = replace(setting, **found[0].setting)  # type: ignore[arg-type]
    states = _states(trial, batch, setting.reduction)
    return Tried(
        setting=replace(setting, once=states.once, averaged=states.averaged, summed=states.summed),
        parameters=found[0].parameters,
        varied=names,
        worst=found[0].off.share,
        examples=cut.size,
    )


def _states(trial: GradientTrial, batch: Batch, reduction: Reduction) -> StateNames:
    """What becomes of the state that pieces write.

    Raises:
        NoPiecesError: it has no pieces.
    """
    buffers = frozenset(name for name, _ in trial.model.named_buffers())
    found = trial.rules.names(lambda names: trial.is_scratch(batch, names), buffers)
    if isinstance(found, str):
        raise NoPiecesError(
            f"a forward pass writes {found}, and pieces of a batch do not write what the whole does",
            "Write it in a step of your own, after the optimizer's",
        )
    counted = reduction not in (Reduction.MEAN, Reduction.SUM)
    if counted and (
        parts := (*found.averaged, *found.summed)
    ):  # a piece in which no label counts is left out
        raise NoPiecesError(
            f"a forward pass writes {parts[0]} from all examples, and pieces in which no label counts are left out",
            "",
        )
    return found


def _large_cases(
    trial: GradientTrial, batch: Batch, cut: Cut, varied: Sequence[Varied]
) -> tuple[list[PiecesCase], tuple[str, ...]]:
    """A large batch made uneven and as it is, with the names of what was made uneven."""
    if cut.size < 2:
        raise UsageError(
            "the batch function makes one example where more are asked for", "Let it keep to its sizes"
        )
    gradient_bytes = 4 * sum(parameter.numel() for parameter in trial.model.parameters())
    pieces = max(2, min(_MOST_PIECES, _PIECES_BYTES // max(1, gradient_bytes)))
    uneven, names = made_uneven(batch, cut, varied, trial.accepts)
    batches = [uneven, batch] if names else [batch]
    return [PiecesCase(one, cut, spans_of_many_sizes(cut.size, pieces)) for one in batches], names


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


def _holding(
    trial: GradientTrial, cases: list[PiecesCase], candidates: tuple[Weighing, ...]
) -> list[Weighed]:
    """The ways of weighing that hold for all cases, the plainest first.

    Raises:
        NoPiecesError: none does.
        NotComparableError: random numbers are drawn in training.
    """
    found = trial.weighed(cases, candidates)
    if 1 < found[0].off.share < _DOUBTFUL:
        found = in_64_bits(trial, found, cases)
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
        trial = GradientTrial(workload, made, MicroBatchingSetting())
        expected = trial.passed(batch, whole=True)
        for paths in candidates:
            found = _in_pieces(trial, batch, paths)
            if found is None:
                continue
            compared = ComparedPieces(expected.gradients, [found.gradients])
            if compared.judge((1.0,), trial, compared.names).share > 1:
                continue
            trial.rules = PieceRules()
            trial.rules.take(expected.written, [found.written], [1.0])
            buffers = frozenset(name for name, _ in made.named_buffers())
            if isinstance(
                trial.rules.names(lambda names: trial.is_scratch(batch, names), buffers, outside=True), str
            ):
                continue
            return Encoders(modules=paths, parameters=len(compared.names))
    raise NoPiecesError("no part of the model gives the same gradients in pieces of the batch", "")


@contextmanager
def _a_model(workload: Workload, make: Callable[[], nn.Module] | None, sought: str) -> Iterator[nn.Module]:
    """A model in 32 bits, the same each time, and no dropout by functions while it is tried."""
    if workload.loss is None or workload.step is not None:
        raise UsageError(
            f"a workload without a loss, or with a step of its own, has no {sought}", "Give it a loss"
        )
    with generators_kept(), NothingDropped():
        seed_all(0)
        yield (workload.make_model if make is None else make)().float()


def _few_examples(workload: Workload, sizes: Mapping[str, int] | None) -> Batch:
    return workload.batch(**{**workload.sizes, **(sizes or {}), batch_size_name(workload.sizes): EXAMPLES})


def _in_pieces(trial: GradientTrial, batch: Batch, paths: tuple[str, ...]) -> TrialPass | None:
    """A pass with modules in pieces; None where they cannot run so."""
    technique = GradientCaching()
    live = AttachedProgram(trial.model, None)
    try:
        live.attach((Choice(technique=technique, setting=GradientCachingSetting(modules=paths)),))
        return trial.passed(batch, whole=True)
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


def _candidates(
    batch: Batch, setting: MicroBatchingSetting, varied: tuple[Varied, ...]
) -> Iterator[Weighing]:
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


def _differs(trial: GradientTrial, found: Weighed, case: PiecesCase) -> UsageError:
    """Why pieces cannot stand for the whole."""
    values = []
    for trial.seed in (0, 1):
        with torch.no_grad():
            values.append(float(trial.loss(case.batch)))
        trial.state.restore()
    if values[0] != values[1]:
        return NotComparableError(
            "pieces of a batch cannot be compared with it: the model or the loss draws random numbers in training",
            "Allow micro-batching by its name, with --numerics approximate, if each example draws its own",
        )
    off = f"{found.off.part:.2g} of its norm" if math.isfinite(found.off.part) else "more than it is"
    return NoPiecesError(
        f"pieces of a batch of {case.cut.size:,} do not give its gradients: that of {found.off.name} differs by {off}, "
        f"with the reduction {_in_words(found.setting)} at best",
        "A loss that compares examples with each other cannot be cut; say where labels or weights are if it has some",
    )


def _in_words(setting: Weighing) -> str:
    reduction = setting["reduction"]
    assert isinstance(reduction, Reduction)
    return reduction.value + (f" of {setting['labels']}" if "labels" in setting else "")
