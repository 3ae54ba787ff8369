"""Compares a plan with its own figures and with the plain program's gradients and losses.

Gradients and losses are computed for real on this machine's CPU, with the same model, batches and random numbers: once
plain, once with the plan. They are compared by what the plan promises:

- BITWISE: every gradient and every loss is equal, bit for bit.
- ROUNDING: each gradient differs by at most `ROUNDING_ERROR` of its scale, by the dtype of the plain program's
  parameter.
- PRECISION: each gradient differs by at most `PRECISION_ERROR` of its scale.
- APPROXIMATE: gradients are shown, not judged.

NOTE [The scale of a gradient]: it is the gradient's own norm. One whose norm is below `TINY` of the largest is rounding
itself (a key bias has a gradient of zero but for rounding), and any two computations differ by all of it. Such a one is
measured by what the largest rounds to: a difference of `TINY` of the largest norm counts as just what is promised, or,
where products are in bfloat16, one of `_BFLOAT16`. A gradient above `TINY` is a real one, whatever the precision.

A loss curve that may differ has to fall like the plain one: at the end at most `LOSS_SHARE` of the plain curve's whole
fall above it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.output_check import OutputCheck
from vramfit.planner.plan_file import PlanFigures
from vramfit.planner.plans import Plan
from vramfit.planner.seeding import generators_kept, seed_all
from vramfit.planner.state_check import StateDifference, differing_states, settled
from vramfit.techniques import Numerics, live_of
from vramfit.techniques.micro_batching import batch_size_name
from vramfit.techniques.support.no_dropout import silence_dropout
from vramfit.techniques.support.promised_errors import allowed_error
from vramfit.torch_internals.dispatch import TorchDispatchMode
from vramfit.torch_internals.pytree import tree_map_only
from vramfit.training_state.forward_state import ForwardState, Written
from vramfit.workload import State, Workload

TINY = 1e-6
"""Part of the largest gradient's norm that is rounding: some units of float32."""

_BFLOAT16 = 2.0**-8
"""What bfloat16 rounds of the largest gradient's norm: one unit of its mantissa."""

LOSS_SHARE = 0.1
"""Part of the plain curve's fall by which a planned curve may end above it."""

STEPS = 50

_LEAST = 2
"""Steps of a curve at least."""

_LAST = 5
"""Steps at the end of a curve that are averaged."""

_SCALES = 32
"""Halvings of a scaler's scale that are tried: from any that float32 holds in practice down to below 1."""

_STATES = 5
"""Copies of the parameters that training takes: values, gradients, two states of an optimizer, and one for the plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """A plan's figures, run anew.

    Attributes:
        planned: what the plan says of `after`.
        limit_bytes: the budget less the margin.
    """

    before: PlanFigures
    after: PlanFigures
    planned: PlanFigures
    limit_bytes: int

    @property
    def passes(self) -> bool:
        """Whether it stays within the budget."""
        return self.after.total_bytes <= self.limit_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientCheck:
    """Gradients of one step with the plan, beside the plain program's.

    Attributes:
        parameters: how many were compared.
        equal: how many are equal, bit for bit.
        worst: the difference that comes closest to what is allowed, or goes furthest beyond it, as a part of the
            gradient's scale; see NOTE [The scale of a gradient].
        allowed: what the promise allows there, by the dtype of that parameter; None where it allows anything.
        passes: whether all keep the promise.
        difference: norm of that difference.
        norm: of that parameter's gradient in the plain program.
        largest_norm: of the gradients of all parameters in the plain program.
        tiny: whether the scale there is that of the largest, since the gradient is rounding itself.
        states: how many buffers and other values, beside gradients, the plain step writes.
        state: name of the one that the plan's step writes otherwise than promised; empty where none is.
        state_error: the difference as a part of that value's norm; infinite where there is nothing to subtract.
    """

    parameters: int
    equal: int
    worst: float
    worst_name: str
    allowed: float | None
    passes: bool
    difference: float = 0.0
    norm: float = 0.0
    largest_norm: float = 0.0
    tiny: bool = False
    states: int = 0
    state: str = ""
    state_error: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCheck:
    """Losses with the plan, beside the plain program's.

    Attributes:
        plain: of each step.
        planned: of each step.
        worst: the largest difference of a step, as a part of the plain loss.
        passes: whether they keep the promise.
    """

    plain: tuple[float, ...]
    planned: tuple[float, ...]
    worst: float
    passes: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuesCheck:
    """What a comparison of gradients and losses, or of the outputs of inference, came to.

    Attributes:
        gradients, losses, outputs: what was compared; None for nothing.
        skipped: why nothing was compared; empty where something was.
    """

    sizes: Mapping[str, int]
    gradients: GradientCheck | None = None
    losses: LossCheck | None = None
    outputs: OutputCheck | None = None
    skipped: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """How a plan's promises were kept.

    Attributes:
        simulated: its memory; None where that was not asked for.
        measured: its memory and time on this machine's card; None where there is none.
        gradients: None where they were not compared; `skipped` says why.
        losses: None where they were not compared; `skipped` says why.
        outputs: of inference; None for a workload that trains, or where they were not compared.
        sizes: of the batches that values were computed for.
        numerics: what the plan promises.
        skipped: why values were not compared; empty where they were.
        notes: what was changed for the comparison, a sentence each.
    """

    simulated: Simulated | None
    gradients: GradientCheck | None
    losses: LossCheck | None
    sizes: Mapping[str, int]
    numerics: Numerics
    skipped: str = ""
    notes: tuple[str, ...] = ()
    measured: Measured | None = None
    outputs: OutputCheck | None = None

    def __repr__(self) -> str:
        names = ("simulated", "measured", "gradients", "losses", "outputs")
        parts = {name: getattr(self, name) for name in names}
        results = ", ".join(
            f"{name} {'pass' if part.passes else 'fail'}" for name, part in parts.items() if part is not None
        )
        return f"<Verification: {results or 'nothing was looked at'}>"

    @property
    def passes(self) -> bool:
        """Whether everything that was looked at keeps its promise."""
        parts = (self.simulated, self.measured, self.gradients, self.losses, self.outputs)
        return all(part.passes for part in parts if part is not None)


def simulate(device: DeviceBackend, workload: Workload, plan: Plan) -> Simulated:
    """Run the plain workload without a limit, and the planned one within the plan's budget."""
    sizes = dict(plan.aim.sizes)
    limit = plan.aim.budget_bytes - plan.aim.margin_bytes
    after = device.step_cost(plan.apply(workload), sizes, limit)
    if not after.fits:
        after = device.step_cost(plan.apply(workload), sizes, None)
    return Simulated(
        before=device.step_cost(workload, sizes, None).figures,
        after=after.figures,
        planned=plan.after,
        limit_bytes=limit,
    )


def too_large(workload: Workload, free_bytes: int) -> str:
    """Why a workload cannot be trained on this machine's CPU; empty where it can."""
    try:
        with torch.device("meta"):
            model = workload.model()
    except (RuntimeError, NotImplementedError, ValueError):
        return ""  # it reads its own values while it is made, which large models do not
    need = _STATES * sum(p.numel() * p.element_size() for p in model.parameters())
    if need <= free_bytes:
        return ""
    return f"training the model here would take {need / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB are free"


def compare(
    workload: Workload,
    plan: Plan,
    sizes: Mapping[str, int],
    *,
    steps: int = STEPS,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda _text: None,
) -> tuple[GradientCheck, LossCheck, tuple[str, ...]]:
    """Train on the CPU, plain and with the plan, and compare gradients and losses.

    Args:
        seconds: after which no further step is begun; at least two are taken.
    """
    same_draws = not any(choice.technique.redraws for choice in plan.choices)
    as_card = all(choice.name != "compile" for choice in plan.choices)
    notes: list[str] = []
    began = time.perf_counter()
    with generators_kept(), closing(Training(workload, sizes, random=same_draws)) as first:
        if not same_draws and first.silenced:
            notes.append(
                "dropout was off for the comparison: pieces of a batch draw other random numbers than the whole"
            )
        progress("gradients")
        dtypes = {name: parameter.dtype for name, parameter in first.state.model.named_parameters()}
        expected = first.gradients()
        taken = 1
        while taken < steps and (taken < _LEAST or time.perf_counter() - began <= seconds / 2):
            progress(f"step {taken + 1} of {steps}")
            first.step(taken)
            taken += 1
    if taken < steps:
        notes.append(f"the loss curve ends after {taken} steps: more would take too long here")
    # Each in turn, so that neither finds what the other wrote outside its model.
    second = Training(plan.apply(workload), sizes, random=same_draws, as_card=as_card)
    with generators_kept(), closing(second):
        progress("gradients with the plan")
        gradients = judge_gradients(expected, second.gradients(), plan.numerics, dtypes)
        for number in range(1, taken):
            progress(f"step {number + 1} of {taken} with the plan")
            second.step(number)
    off = settled(workload, sizes, differing_states(first.written, second.written, plan.numerics))
    gradients = with_states(gradients, len(first.written), off)
    return gradients, judge_losses(first.losses, second.losses, plan.numerics), tuple(notes)


def with_states(check: GradientCheck, count: int, off: Sequence[StateDifference]) -> GradientCheck:
    """A comparison with that of what the step writes beside gradients.

    Args:
        count: of the values that it writes.
        off: those that differ beyond the promise, the worst first.
    """
    check = replace(check, states=count)
    return replace(check, passes=False, state=off[0].name, state_error=off[0].error) if off else check


class Training:
    """A workload in training on the CPU; each step has a seed of its own.

    Args:
        workload: the plain one, or with a plan.
        random: whether dropout draws; else it is off.
        as_card: whether half precision is added up as on a card; not where a plan compiles, for under a dispatch mode
            dynamo compiles nothing.
    """

    def __init__(
        self, workload: Workload, sizes: Mapping[str, int], *, random: bool, as_card: bool = True
    ) -> None:
        self.workload = workload
        self.as_card = as_card
        self.sizes = dict(sizes)
        self.losses: list[float] = []
        seed_all(0)
        self.state: State = workload.start("cpu")
        self.written: Mapping[str, Written] = {}
        """What the first step wrote beside gradients."""
        self.silenced = False
        if not random:
            self.silenced = silence_dropout(self.state.model)
        reached = workload.step or workload.loss
        self._start = ForwardState(self.state.model, reached)
        self._outside = ForwardState(nn.Module(), reached)

    def step(self, number: int) -> None:
        """One step, with half precision added up as on a card: see NOTE [Norms in half precision on the CPU]."""
        seed_all(number)
        with CardSums() if self.as_card else nullcontext():
            loss = self.workload.run_step(self.state, self.sizes)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.losses.append(float(loss))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of the first step, summed over its micro-batches and without the scale of a scaler.

        A step whose scaled gradients overflow is left out, and taken again with the lower scale, as in any training.
        """
        for _ in range(_SCALES):
            taken = len(self.losses)
            scale, found = self._first_step()
            if scale == 1.0 or all(bool(value.isfinite().all()) for value in found.values()):
                break
            del self.losses[taken:]
            self._start.restore()
        self.written = self._start.written()
        return {name: value / scale for name, value in found.items()} if scale != 1.0 else found

    def close(self) -> None:
        """Undo what was changed beyond the model: TF32 is the process's, and a loss may have a state of its own."""
        self._outside.restore()
        if (live := live_of(self.state)) is not None:
            live.undo()

    def _first_step(self) -> tuple[float, dict[str, torch.Tensor]]:
        found: dict[str, torch.Tensor] = {}
        handles = []
        live = live_of(self.state)
        for name, parameter in self.state.model.named_parameters():
            if not parameter.requires_grad:
                continue

            def add(gradient: torch.Tensor, name: str = name) -> None:
                known = found.get(name)
                value = gradient.detach().double()
                found[name] = value if known is None else known + value

            handles.append(parameter.register_hook(add))
        scale = 1.0
        scaler = None if live is None else live.scaler
        if scaler is not None and hasattr(scaler, "get_scale"):
            scale = float(scaler.get_scale())
        self.step(0)
        for handle in handles:
            handle.remove()
        return scale, found


def judge_gradients(
    plain: Mapping[str, torch.Tensor],
    planned: Mapping[str, torch.Tensor],
    numerics: Numerics,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> GradientCheck:
    """Compare gradients by what is promised.

    Args:
        plain: in float64, by parameter.
        dtypes: of the plain program's parameters; float32 for those that are not named.
    """
    equal, passes = 0, set(plain) == set(planned)
    largest = max((float(value.norm()) for value in plain.values()), default=0.0)
    worst, nearest, limit = _Difference(), -1.0, allowed_error(numerics, torch.float32)
    tiny, noise = TINY * largest, (_BFLOAT16 if numerics is Numerics.PRECISION else TINY) * largest
    for name, reference in plain.items():
        other = planned.get(name)
        if other is not None and torch.equal(reference, other):
            equal += 1
            continue
        allowed = allowed_error(numerics, (dtypes or {}).get(name, torch.float32))
        found = _difference(name, reference, other, tiny, noise / (allowed or 1.0))
        if (share := found.error / (allowed or 1.0)) > nearest:
            worst, nearest, limit = found, share, allowed
        if other is None or numerics is Numerics.BITWISE or (allowed is not None and found.error > allowed):
            passes = False
    return GradientCheck(
        parameters=len(plain),
        equal=equal,
        worst=worst.error,
        worst_name=worst.name,
        allowed=limit,
        passes=passes,
        difference=worst.difference,
        norm=worst.norm,
        largest_norm=largest,
        tiny=worst.tiny,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Difference:
    """One parameter's gradient beside the plain one; `error` is a part of its scale."""

    name: str = ""
    difference: float = 0.0
    norm: float = 0.0
    error: float = 0.0
    tiny: bool = False


def _difference(
    name: str, reference: torch.Tensor, other: torch.Tensor | None, tiny: float, of_tiny: float
) -> _Difference:
    """Measure a gradient by its norm; one whose norm is at most `tiny` by the scale `of_tiny`."""
    norm = float(reference.norm())
    if other is None:
        return _Difference(name=name, difference=math.inf, norm=norm, error=math.inf)
    difference = float((other - reference).norm())
    scale = norm if norm > tiny else of_tiny
    error = difference / scale if scale else math.inf
    error = math.inf if math.isnan(error) else error
    return _Difference(name=name, difference=difference, norm=norm, error=error, tiny=norm <= tiny)


def judge_losses(plain: list[float], planned: list[float], numerics: Numerics) -> LossCheck:
    """Compare loss curves by what is promised."""
    pairs = list(zip(plain, planned, strict=False))
    worst = max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)
    finite = all(math.isfinite(b) for a, b in pairs if math.isfinite(a))
    if not pairs:
        passes = True
    elif numerics is Numerics.BITWISE:
        passes = plain == planned
    else:
        passes = finite and _ends_alike(plain, planned)
    return LossCheck(plain=tuple(plain), planned=tuple(planned), worst=worst, passes=passes)


def _ends_alike(plain: list[float], planned: list[float]) -> bool:
    last = min(_LAST, len(plain))
    end, other = sum(plain[-last:]) / last, sum(planned[-last:]) / last
    fall = abs(plain[0] - end)
    return other - end <= max(LOSS_SHARE * fall, 1e-3 * abs(end))


def smaller_sizes(
    workload: Workload, plan: Plan, step_seconds: float, seconds: float, steps: int
) -> dict[str, int]:
    """The plan's sizes, that of the batch halved until two trainings take about the time that there is.

    Args:
        plan: with its sizes, and a number of micro-batches that the batch must not fall below.
        step_seconds: of a plain step at the plan's sizes on the CPU, estimated.
    """
    sizes = dict(plan.aim.sizes) or dict(workload.sizes)
    first = batch_size_name(sizes)
    least = max(
        [2, *(int(getattr(c.setting, "count", 1)) for c in plan.choices if c.name == "micro-batching")]
    )
    while sizes[first] // 2 >= least and step_seconds * 2 * steps > seconds:
        sizes[first] //= 2
        step_seconds /= 2
    return sizes


def plain_values(found: Any) -> dict[str, Any]:
    """A verification for JSON."""
    from dataclasses import asdict

    values = asdict(found)
    values["numerics"] = found.numerics.value
    values["passes"] = found.passes
    if found.simulated is not None:
        values["simulated"]["passes"] = found.simulated.passes
    if found.measured is not None:
        values["measured"] |= {"passes": found.measured.passes, "peak_error": found.measured.peak_error}
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRun:
    """A workload as it ran on a card.

    Attributes:
        figures: measured; as far as it came where it did not fit the card at all.
        fits: whether it stayed within its limit.
        oom: the message of the request that failed, or empty.
    """

    figures: PlanFigures
    fits: bool
    oom: str = ""

    @property
    def ended(self) -> bool:
        """Whether it came to the end of its steps, within its limit or without one."""
        return self.figures.step_seconds > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRuns:
    """Runs on this machine's card.

    Attributes:
        left_bytes: bytes that outlived them.
        skipped: why none was made; empty where they were.
    """

    card: str
    runs: tuple[CardRun, ...] = ()
    left_bytes: int = 0
    skipped: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A plan on a card.

    Attributes:
        card: its name, as torch gives it.
        before: the plain program, which may have the whole card.
        after: with the plan, which may have its budget less the margin.
        planned: what the plan says of `after`.
        limit_bytes: the budget less the margin.
        left_bytes: of tensors that outlived their run; more than 0 is the workload's own doing.
    """

    card: str
    before: CardRun
    after: CardRun
    planned: PlanFigures
    limit_bytes: int
    left_bytes: int = 0

    @property
    def passes(self) -> bool:
        """Whether it stays within the budget."""
        return self.after.fits

    @property
    def peak_error(self) -> float:
        """By how much the peak of reserved bytes is above the plan's, as a part of it."""
        return self.after.figures.peak_reserved_bytes / max(self.planned.peak_reserved_bytes, 1) - 1


def run_on(device: DeviceBackend, workload: Workload, sizes: dict[str, int], limit: int | None) -> CardRun:
    """Run a workload within a limit; beyond it, once more without, so that what it takes is known.

    Args:
        limit: bytes of the card, the context included; None for all of it.
    """
    cost = device.step_cost(workload, sizes, limit)
    if cost.fits or limit is None:
        return CardRun(figures=cost.figures, fits=cost.fits, oom=cost.oom)
    without = device.step_cost(workload, sizes, None)
    return CardRun(figures=without.figures, fits=False, oom=cost.oom)


_HALVES = (torch.bfloat16, torch.float16)

_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


class CardSums(TorchDispatchMode):
    """Computes the backward pass of layer norms in half precision as a card does.

    NOTE [Norms in half precision on the CPU]: torch adds up the gradients of a layer norm's weight and bias over all
    rows. On a card that is done in float32, whatever the dtype (ATen/native/cuda/layer_norm_kernel.cu, ``T_ACC`` of
    ``GammaBetaBackward``). On the CPU partial sums are kept in bfloat16 (ATen/native/cpu/layer_norm_kernel.cpp,
    ``LayerNormBackwardKernelImplInternal``): with 16,384 rows of 32 the gradient of the bias is off by a quarter of its
    norm, and by 0.0003 where its rows are added in float32. Judged by that, a plan in bfloat16 would break a promise
    that it keeps on the card.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        del types
        if func is not _LAYER_NORM_BACKWARD or args[1].dtype not in _HALVES:
            return func(*args, **(kwargs or {}))
        # grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
        found = func(*tree_map_only(torch.Tensor, torch.Tensor.float, tuple(args)), **(kwargs or {}))
        of = (args[1], args[5], args[6])
        return tuple(
            None if value is None else value.to(args[1].dtype if like is None else like.dtype)
            for value, like in zip(found, of, strict=True)
        )
