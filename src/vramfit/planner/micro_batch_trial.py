"""Whether a batch may be cut into micro-batches, and how their losses weigh: tried on the CPU before it is promised.

A model that is too large to be tried as it is, is tried at smaller sizes of its batch, and then by a stand-in of the
same code. A trial that takes too long gives way to the next. What could not be tried is looked at by its shapes
(see NOTE [Coupling by shapes]), and is not offered, unless micro-batching was allowed by its name and nothing in its
shapes speaks against it: then nothing is promised of it.

NOTE [Coupling by shapes]: one step runs with a batch of B examples, one with B + 1. A dimension that differs between
the two belongs to the batch. Two of them in a tensor that gradients pass through (B x B) compare examples with each
other. A sum over the batch that is no end of the loss, but goes through something that is not linear (a square, a root,
a product with another such sum, back to the examples), is a statistic of the batch. What has neither may couple
examples all the same: nothing is proved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from vramfit.errors import UsageError
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.search_clock import SearchClock, TimeOver, limited
from vramfit.planner.step_profiler import tensors_of
from vramfit.planner.trial_attempts import TrialAttempt, most_model_bytes, ways_to_try
from vramfit.planner.whole_and_pieces import (
    EXAMPLES,
    LargeBatch,
    NoPiecesError,
    NotComparableError,
    Tried,
    try_encoders,
    try_pieces,
)
from vramfit.planner.workload_check import brief
from vramfit.techniques import Profile
from vramfit.techniques.micro_batching import MicroBatchingSetting, batch_size_name
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.workload import Batch, Workload

_SECONDS = 30.0
"""Seconds that a trial may take by its estimate."""

_LONGEST = 60.0
"""Seconds after which a trial is given up: machines are slower than the estimate, and stand-ins have none."""

_TIME_OVER = "the time was over"

_STEPS = 8
"""Training steps with all its examples that a trial takes: a batch and its micro-batches, twice, and varied ones."""

_STATES = ("parameters", "gradients", "optimizer_state")
"""What a step holds whatever its batch."""

_PART = 0.125
"""Share of the machine's memory that a model may take: a trial holds its values and three gradients."""

_MOST = 1 << 30
"""Bytes of a model in 32 bits, at most: beyond that memory costs more time than arithmetic."""


@dataclass(frozen=True, slots=True)
class MicroBatchVerdict:
    """What is known of a workload's loss.

    Attributes:
        setting: with which micro-batches give the gradients of the whole batch; None if they cannot, or nobody knows.
        note: what a reader of a plan with micro-batches, or of one that has to do without, should know.
        known: whether it was tried; False where no trial was possible.
        encoders: names of the modules that may run in micro-batches where the loss may not; see `try_encoders`.
        over: whether the time was over before all that could be tried was: another search may know more.
    """

    setting: MicroBatchingSetting | None
    note: str
    known: bool = True
    encoders: tuple[str, ...] = ()
    over: bool = False


def try_micro_batching(
    workload: Workload,
    profile: Profile,
    *,
    by_name: bool = False,
    probe: Callable[[], str] = lambda: "",
    clock: SearchClock | None = None,
) -> MicroBatchVerdict:
    """Try a workload's loss on some examples, whole and in micro-batches.

    Args:
        by_name: whether micro-batching was allowed by its name, and is offered without a promise where it could not be
            tried.
        probe: returns why examples are coupled, as far as shapes show; called where nothing could be tried.
    """
    why, over = "the model is too large for it here", False
    trials = _trials(workload, profile)
    trial: TrialAttempt | None = None
    while True:
        try:
            with limited(clock or SearchClock(), _LONGEST):
                trial = next(trials, None)
                if trial is None:
                    break
                return _tried(workload, profile, trial)
        except TimeOver:
            why, over = _TIME_OVER, True
        except NotComparableError as error:
            why = error.message
            break
        except UsageError as error:
            return MicroBatchVerdict(None, f"micro-batching is left out: {error.message}.")
        except Exception as error:  # whatever the workload's code makes of the CPU, or of smaller sizes
            words = "the model itself" if trial is None else trial.words
            why = f"the trial with {words} fails ({brief(error)})"
    if coupled := probe():
        return MicroBatchVerdict(
            None, f"micro-batching is left out: {coupled}. By shapes alone, since {why}.", over=over
        )
    return _untried(why, by_name=by_name, over=over)


def no_time_to_try(*, by_name: bool) -> MicroBatchVerdict:
    """The verdict where a search ended before anything was tried."""
    return _untried(_TIME_OVER, by_name=by_name, over=True)


def _untried(why: str, *, by_name: bool, over: bool) -> MicroBatchVerdict:
    """The verdict where nothing could be tried, and shapes show nothing."""
    tried = (
        f"micro-batching: that pieces of a batch give the gradients of the whole was not tried, since {why}"
    )
    if by_name:
        return MicroBatchVerdict(
            MicroBatchingSetting(compared=False),
            f"{tried}; nothing is promised of it, and it is used under --numerics approximate alone. A loss that "
            "compares examples with each other has no pieces.",
            known=False,
            over=over,
        )
    return MicroBatchVerdict(
        None,
        f"{tried}; it is left out unless it is allowed by its name, with --numerics approximate.",
        known=False,
        over=over,
    )


def _tried(workload: Workload, profile: Profile, trial: TrialAttempt) -> MicroBatchVerdict:
    """The verdict of one trial.

    Raises:
        TimeOver: it takes too long.
        NotComparableError: nothing follows from it.
        UsageError: the batch cannot be cut.
    """
    try:
        found = try_pieces(workload, sizes=trial.sizes, model=trial.model, large=_large_batch(profile, trial))
    except NoPiecesError as error:
        return _by_encoders(workload, trial, f"micro-batching is left out: {error.message}.")
    return MicroBatchVerdict(found.setting, _words(found, trial))


def _by_encoders(workload: Workload, trial: TrialAttempt, note: str) -> MicroBatchVerdict:
    """The verdict where the loss cannot be cut: its encoders may run in micro-batches."""
    try:
        found = try_encoders(workload, sizes=trial.sizes, model=trial.model)
    except TimeOver:
        return MicroBatchVerdict(
            None, f"{note} Whether encoders may run in pieces was not tried, since {_TIME_OVER}.", over=True
        )
    except Exception:  # there are none, or they cannot be tried: nothing is offered
        return MicroBatchVerdict(None, note)
    names = " and ".join(found.modules) if any(found.modules) else "the model"
    return MicroBatchVerdict(
        None,
        f"{note} {names} may run in pieces (gradient-caching): tried with {trial.words}, the gradients of all "
        f"{found.parameters} parameters are those of the whole.",
        encoders=found.modules,
    )


def _words(found: Tried, trial: TrialAttempt) -> str:
    uneven = f", with {' and '.join(found.varied)} made uneven" if found.varied else ""
    assumed = f", as long as no label of {' or '.join(found.assumed)} is ignored" if found.assumed else ""
    return (
        f"micro-batching was tried with {trial.words}: pieces of {found.examples:,} examples give the gradients of the "
        f"whole in all {found.parameters} parameters{uneven}{assumed}."
    )


def _large_batch(profile: Profile, trial: TrialAttempt) -> LargeBatch:
    """The workload's own batch, with what an example costs; a stand-in is taken to cost as much for each parameter."""
    batch = batch_size_name(profile.sizes)
    own = max(1, profile.sizes[batch])
    parameters = max(1, sum(parameter.numel() for parameter in profile.model.parameters()))
    part = math.prod(
        trial.sizes[name] / size for name, size in profile.sizes.items() if name != batch and size
    )
    states = sum(profile.categories.get(name, 0) for name in _STATES)
    each = part / own / parameters
    return LargeBatch(
        examples=own,
        flops=profile.step_flops * each or 6.0,
        memory=max(0, profile.peak_allocated_bytes - states) * each,
    )


def _trials(workload: Workload, profile: Profile) -> Iterator[TrialAttempt]:
    """Ways to try a workload, the truest first, that are not too expensive."""
    sizes = dict(profile.sizes)
    examples = EXAMPLES / max(1, sizes[batch_size_name(sizes)])
    return ways_to_try(
        workload,
        sizes,
        flops=profile.step_flops * _STEPS * examples,
        seconds=_SECONDS,
        model_bytes=sum(parameter.numel() * 4 for parameter in profile.model.parameters()),
        most_bytes=most_model_bytes(_PART, _MOST),
    )


_EXAMPLES = 5
"""The B of the note: more than one, so that nothing is broadcast, and not the size of much else."""

# Names of operations read better several in a line:
# fmt: off
_LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze",
    "expand", "clone", "detach", "alias", "_to_copy", "to", "select", "slice", "stack", "cat", "t",
    "transpose", "permute", "copy_", "add_", "sub_", "index", "index_select", "gather", "split", "unbind",
    "diagonal", "where", "as_strided", "split_with_sizes", "lift_fresh", "zeros_like", "ones_like",
    "empty_like", "new_zeros", "_reshape_alias",
})
"""Operations that add what they are given, or put it elsewhere."""

_PRODUCTS = frozenset({"mul", "mul_", "div", "div_", "mm", "bmm", "addmm", "dot", "mv", "baddbmm", "linear"})
"""Linear in each operand: examples are coupled where two of them depend on the batch. Not so a divisor."""

_STATISTICS = frozenset({
    "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "prod", "median",
    "aminmax", "max", "amax", "min", "amin",
})
# fmt: on
"""Reductions that are no sums of what each example gives."""

_SOFTMAX = frozenset({"_softmax", "_log_softmax"})


@dataclass(frozen=True, slots=True)
class _Operand:
    number: int
    shape: tuple[int, ...]
    trained: bool


@dataclass(frozen=True, slots=True)
class _CoupledOp:
    name: str
    inputs: tuple[_Operand, ...]
    outputs: tuple[_Operand, ...]
    dim: int | None


@dataclass(slots=True)
class _ForwardPass:
    """What one forward pass did.

    Attributes:
        parameters: numbers of the model's parameters.
    """

    ops: list[_CoupledOp] = field(default_factory=list)
    parameters: set[int] = field(default_factory=set)


def coupling_by_shapes(device: DeviceBackend, workload: Workload, sizes: Mapping[str, int]) -> str:
    """Why the examples of a batch are coupled, as far as shapes show; empty where they show nothing.

    Args:
        device: where two steps are run: a virtual one computes nothing.
        sizes: of the batch; that of examples is small here.
    """
    if workload.loss is None or workload.step is not None:
        return ""
    name = batch_size_name(sizes)
    found = []
    for examples in (_EXAMPLES, _EXAMPLES + 1):
        watched = _Watched(workload)
        try:
            device.step_cost(replace(workload, loss=watched), {**sizes, name: examples})
        except Exception:  # values that a virtual device does not have, or a batch of another size
            return ""
        found.append(watched.seen)
    return _judged(*found)


class _Watched:
    """A workload's loss that is watched; `seen` is of the last batch."""

    def __init__(self, workload: Workload) -> None:
        assert workload.loss is not None
        self._loss = workload.loss
        self.seen = _ForwardPass()

    def __call__(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The loss, with its operations noted."""
        mode = _Shapes()
        for parameter in model.parameters():
            mode.seen.parameters.add(mode.number(parameter))
        with mode:
            found = self._loss(model, batch)
        mode.end(found)
        self.seen = mode.seen
        return found


class _Shapes(TorchDispatchMode):
    """Notes the shapes of all operations, and numbers their tensors in the order in which they come."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.seen = _ForwardPass()
        self._numbers: Any = WeakTensorKeyDictionary()
        self._count = 0

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor; a new one the first time."""
        if tensor not in self._numbers:
            self._numbers[tensor] = self._count
            self._count += 1
        found: int = self._numbers[tensor]
        return found

    def end(self, loss: torch.Tensor) -> None:
        """Note the loss, as the last that something was done with."""
        self.seen.ops.append(_CoupledOp("end", (self._operand(loss),), (), None))

    def __torch_dispatch__(
        self,
        func: Any,  # torch's signature
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """One operation."""
        inputs = tuple(self._operand(tensor) for tensor in tensors_of((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        outputs = tuple(self._operand(tensor) for tensor in tensors_of(result))
        name = func.overloadpacket.__name__
        dim = args[1] if name in _SOFTMAX and isinstance(args[1], int) else None
        self.seen.ops.append(_CoupledOp(name, inputs, outputs, dim))
        return result

    def _operand(self, tensor: torch.Tensor) -> _Operand:
        return _Operand(self.number(tensor), tuple(tensor.shape), tensor.requires_grad)


def _judged(first: _ForwardPass, second: _ForwardPass) -> str:
    """Why examples are coupled, from two forward passes: of B and of B + 1 examples."""
    if [op.name for op in first.ops] != [op.name for op in second.ops]:
        return ""
    rows: dict[int, tuple[int, ...]] = {}
    for one, other in zip(first.ops, second.ops, strict=True):
        for a, b in zip((*one.inputs, *one.outputs), (*other.inputs, *other.outputs), strict=False):
            rows[a.number] = _batch_dims(a.shape, b.shape)
    trained = {operand.number for op in first.ops for operand in op.inputs if operand.trained}
    return _Flow(rows, trained, set(first.parameters)).judged(first.ops)


def _batch_dims(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The dimensions that grow with the batch."""
    if len(one) != len(other):
        return ()
    return tuple(place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)


@dataclass(slots=True)
class _Flow:
    """Follows what depends on the model through a forward pass.

    Attributes:
        rows: dimensions of each tensor that belong to the batch.
        trained: tensors that gradients pass through.
        of_model: tensors that depend on its parameters.
        pooled: of these, the ones in which examples were put together.
    """

    rows: Mapping[int, tuple[int, ...]]
    trained: set[int]
    of_model: set[int]
    pooled: set[int] = field(default_factory=set)

    def judged(self, ops: Sequence[_CoupledOp]) -> str:
        """Why examples are coupled; empty where that is not seen."""
        for op in ops:
            if not any(operand.number in self.of_model for operand in op.inputs):
                continue
            self.of_model.update(operand.number for operand in op.outputs)
            if any(operand.number in self.trained for operand in op.outputs) and (why := self._coupled(op)):
                return why
            self._pool(op)
        return ""

    def _coupled(self, op: _CoupledOp) -> str:
        for operand in op.outputs:
            if len(self.rows[operand.number]) > 1:
                sizes = " x ".join(map(str, operand.shape))
                return f"{op.name} gives a tensor of {sizes} at {_EXAMPLES} examples, with two dimensions of the batch"
        batched = [one for one in op.inputs if one.number in self.of_model and self.rows[one.number]]
        if op.dim is not None and any(op.dim % len(one.shape) in self.rows[one.number] for one in batched):
            return f"{op.name} compares the examples of the batch"
        if op.name in _STATISTICS and batched and not any(self.rows[one.number] for one in op.outputs):
            return f"{op.name} is a statistic of the batch"
        pooled = [one for one in op.inputs if one.number in self.pooled]
        if not pooled or op.name in _LINEAR:
            return ""
        if op.name in _PRODUCTS:
            divisor = op.name.startswith("div") and op.inputs[-1].number in self.pooled and len(op.inputs) > 1
            if not divisor and len(pooled) + sum(one not in pooled for one in batched) < 2:
                return ""
        return f"{op.name} is given a sum over the batch, and is not linear in it"

    def _pool(self, op: _CoupledOp) -> None:
        """Note where examples are put together."""
        batched = any(one.number in self.of_model and self.rows[one.number] for one in op.inputs)
        known = any(one.number in self.pooled for one in op.inputs)
        for operand in op.outputs:
            if known or (batched and not self.rows[operand.number]):
                self.pooled.add(operand.number)
