"""A plan: the techniques that were chosen, what they save and cost, and their application to a program."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from vramfit.errors import UsageError
from vramfit.techniques import AttachedProgram, Choice, Numerics, with_choices
from vramfit.units import format_bytes
from vramfit.workload import Batch, Workload, check_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

_PLANNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a plan is applied to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFigures:
    """What a step needs.

    Attributes:
        peak_allocated_bytes: most bytes that tensors hold at once.
        peak_reserved_bytes: most bytes that torch's allocator holds.
        total_bytes: what the device has to have: reserved, and the CUDA context.
        host_bytes: most that was pinned on the host, and what else techniques hold there.
        step_seconds: estimated; 0 where it did not come to the end of a step.
        step_flops: of a step; 0 where nobody counted them.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_bytes: int
    host_bytes: int = 0
    step_seconds: float = 0.0
    step_flops: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """One technique of a plan.

    Attributes:
        choice: the technique with its setting.
        saves_bytes: of the device's total, beyond what the entries before it save; negative where it costs some.
        costs_seconds: per step, beyond the entries before it; negative where it makes the step quicker.
    """

    choice: Choice
    saves_bytes: int = 0
    costs_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTarget:
    """What a plan was made for.

    Attributes:
        device: name of the card, or ``CPU``.
        budget_bytes: what the program may take of the device, the CUDA context included.
        margin_bytes: of the budget, left free on purpose.
        host_budget_bytes: memory of the host that may be spent; 0 where none was given.
        numerics: how far results may differ.
        objective: ``throughput``, ``memory``, or a size that was made as large as possible.
        sizes: of the batch.
        target: the workload, as ``FILE.py:NAME``; empty where it came from Python.
        torch: its version.
    """

    device: str
    budget_bytes: int
    margin_bytes: int = 0
    host_budget_bytes: int = 0
    numerics: Numerics = Numerics.ROUNDING
    objective: str = "throughput"
    sizes: Mapping[str, int] = field(default_factory=dict)
    target: str = ""
    torch: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverStats:
    """How the plan was found.

    Attributes:
        status: of the solver, in words.
        gap: how far its cost may be above the best possible, as a part of it; None where no solver was needed.
        seconds: that the solver took.
        runs: how many runs on the device the search took.
        remembered: how many more were there from an earlier search.
        search_seconds: all in all.
        first_plan_seconds: after which there was a plan that fits; None without one.
        stopped: why the search did not come to its end: ``time`` or ``interrupted``; None where it did.
    """

    status: str = ""
    gap: float | None = None
    seconds: float = 0.0
    runs: int = 0
    remembered: int = 0
    search_seconds: float = 0.0
    first_plan_seconds: float | None = None
    stopped: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Techniques for one workload on one device.

    In your own loop, after the model and its optimizer are made:

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> plan = vramfit.Plan.load("plan.toml")
    >>> model, optimizer = plan.apply(model, optimizer)
    >>> for batch in torch.randn(2, 64, 1024):
    ...     for micro in plan.split(batch):
    ...         plan.backward(model(micro).square().mean())
    ...     plan.step()

    Attributes:
        entries: the techniques, in the order in which they count.
        aim: what it was made for.
        before: the plain program; on a device that it does not fit, as if the device were large enough.
        after: with the plan.
        solved: how it was found.
        notes: what a reader should know, a sentence each.
    """

    entries: tuple[PlanStep, ...]
    aim: PlanTarget
    before: PlanFigures
    after: PlanFigures
    solved: SolverStats = field(default_factory=SolverStats)
    notes: tuple[str, ...] = ()
    _lives: list[AttachedProgram] = field(default_factory=list, repr=False, compare=False)

    def __repr__(self) -> str:
        names = ", ".join(choice.name for choice in self.choices) or "nothing to change"
        fits = "fits" if self.fits else "does not fit"
        limit = format_bytes(self.aim.budget_bytes - self.aim.margin_bytes)
        return f"<Plan for {self.aim.device}: {names}; {fits}, {format_bytes(self.after.total_bytes)} of {limit}>"

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The techniques with their settings."""
        return tuple(entry.choice for entry in self.entries)

    @property
    def numerics(self) -> Numerics:
        """The most that any of the techniques may change in the results."""
        return max((choice.promise.numerics for choice in self.choices), default=Numerics.BITWISE)

    @property
    def fits(self) -> bool:
        """Whether the program stays within the budget, less the margin, and its techniques within the host's."""
        host = self.aim.host_budget_bytes
        within_host = not host or not self.entries or self.after.host_bytes <= host
        return within_host and self.after.total_bytes <= self.aim.budget_bytes - self.aim.margin_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        return self.aim.budget_bytes - self.after.total_bytes

    # -- application ---------------------------------------------------------------------------------------------

    @overload
    def apply(self, program: Workload) -> Workload: ...
    @overload
    def apply(
        self, program: nn.Module, optimizer: torch.optim.Optimizer | None = None
    ) -> tuple[nn.Module, torch.optim.Optimizer | None]: ...
    def apply(self, program: Any, optimizer: Any = None) -> Any:
        """Put the techniques onto a workload, which gives a new one, or onto a model and its optimizer, in place.

        Args:
            program: a `Workload`, or the model: the same object is returned, its parameters too.
            optimizer: the model's; another one may come back.

        Raises:
            UsageError: a technique cannot be applied; nothing has been changed then.
        """
        if isinstance(program, Workload):
            return with_choices(program, self.choices)
        if self._lives:
            raise UsageError(
                "this plan is applied already", "Call plan.undo(model) first, or load the plan anew"
            )
        if program in _PLANNED:
            raise UsageError(
                "another plan is applied to this model already",
                "Undo it first: other.undo(model), with the plan that was applied",
            )
        if optimizer is not None:
            check_optimizer(optimizer)
        live = AttachedProgram(program, optimizer)
        live.attach(self.choices)
        self._lives.append(live)
        _PLANNED.add(program)
        live.on_undo(lambda: _PLANNED.discard(program))
        return live.model, live.optimizer

    def split(self, batch: Batch) -> Iterator[Batch]:
        """The micro-batches of a batch, the whole batch where the plan has no micro-batching."""
        return self._live().split(batch)

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch's loss, in place of ``loss.backward()``.

        Raises:
            UsageError: the loss is no scalar.
        """
        self._live().backward(loss)

    def step(self, *, clip_norm: float | None = None) -> torch.Tensor | None:
        """The optimizer's step and the end of the gradients, in place of ``optimizer.step()`` and ``zero_grad()``.

        Args:
            clip_norm: what all gradients together are cut to before; None does not cut, `math.inf` only measures.

        Returns:
            the norm of all gradients together before they were cut, as `torch.nn.utils.clip_grad_norm_` gives it; None
            without `clip_norm`.
        """
        return self._live().step(clip_norm=clip_norm)

    def undo(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Leave the model as it was before `apply`, its values as they are now; its optimizer comes back.

        Raises:
            UsageError: the plan was not applied to this model.
        """
        live = self._live()
        if live.model is not model:
            raise UsageError(
                "the plan is applied to another model", "Give the model that plan.apply returned"
            )
        live.undo()
        self._lives.clear()
        return live.optimizer

    def _live(self) -> AttachedProgram:
        if not self._lives:
            raise UsageError(
                "the plan is not applied yet", "Call model, optimizer = plan.apply(model, optimizer) first"
            )
        return self._lives[0]

    # -- files ---------------------------------------------------------------------------------------------------

    def save(self, path: Any) -> None:
        """Write the plan as TOML.

        Raises:
            WriteError: the file cannot be written.
        """
        from vramfit.planner.plan_file import write_plan

        write_plan(path, self)

    @classmethod
    def load(cls, path: Any) -> Plan:
        """Read what `save` or ``vramfit plan`` wrote.

        Raises:
            UsageError: there is no such file, or it is no plan; the message says where.
        """
        from vramfit.planner.plan_file import read_plan

        return read_plan(path)


def plan_of(choices: Iterable[Choice], aim: PlanTarget, before: PlanFigures, after: PlanFigures) -> Plan:
    """A plan whose entries were not run one by one."""
    return Plan(
        entries=tuple(PlanStep(choice=choice) for choice in choices), aim=aim, before=before, after=after
    )
