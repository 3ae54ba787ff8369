"""A plan: what is asked for, the plan itself with its application to a program, and the error that none fits."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

from vramfit.errors import UsageError
from vramfit.planner.plan_file import (
    PlanContents,
    PlanFigures,
    PlanStep,
    PlanTarget,
    plan_to_toml,
    read_plan,
    write_plan,
)
from vramfit.planner.planner_job import DeviceMemory, PlanOptions
from vramfit.techniques import AttachedProgram, Choice, Numerics, Technique, find_technique, with_choices
from vramfit.units import format_bytes
from vramfit.workload import Batch, Workload, check_optimizer

if TYPE_CHECKING:
    import torch
    from torch import nn

_PLANNED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a plan is applied to."""

THROUGHPUT, MEMORY = "throughput", "memory"
"""Objectives: the quickest step, and the lowest peak."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is asked for.

    Attributes:
        workload: without techniques.
        budget_bytes: of the device, the CUDA context included.
        margin_bytes: of it, to be left free.
        host_bytes: of the host that may be spent.
        objective: ``throughput`` or ``memory``.
        allowed: names of the techniques to choose from; None for all.
        forbidden: names of those that are left out.
        target: the workload's name as ``FILE.py:NAME``.
        time_limit: seconds for one solution of the program.
        entries: whether what each technique saves and costs is found by a run of its own.
        search_seconds: for the whole search; None for as long as it takes.
        recipes: whether what people try by hand is run before the search goes on.
    """

    workload: Workload
    sizes: Mapping[str, int]
    budget_bytes: int
    margin_bytes: int = 0
    host_bytes: int = 0
    numerics: Numerics = Numerics.ROUNDING
    objective: str = THROUGHPUT
    allowed: frozenset[str] | None = None
    forbidden: frozenset[str] = frozenset()
    target: str = ""
    time_limit: float = 10.0
    entries: bool = True
    search_seconds: float | None = None
    recipes: bool = True

    def __post_init__(self) -> None:
        """Refuse names that belong to no technique."""
        for name in (*sorted(self.allowed or ()), *sorted(self.forbidden)):
            find_technique(name)

    @property
    def limit(self) -> int:
        """Bytes that the run may take."""
        return self.budget_bytes - self.margin_bytes

    def may(self, technique: Technique[Any]) -> bool:
        """Whether a technique may be used."""
        if technique.name in self.forbidden:
            return False
        if self.allowed is None:
            return not technique.on_request
        return technique.name in self.allowed


def plan_request(
    workload: Workload, options: PlanOptions, memory: DeviceMemory, target: str = ""
) -> PlanRequest:
    """The request for a plan with these options, within a memory.

    Args:
        target: the workload's name as ``FILE.py:NAME``.

    Raises:
        UsageError: there is no such size, technique or level of numerics.
    """
    return PlanRequest(
        workload=workload,
        sizes=sizes_of(workload, options.sizes),
        budget_bytes=memory.budget,
        margin_bytes=memory.margin,
        host_bytes=memory.host_bytes,
        numerics=Numerics.parse(options.numerics),
        objective=options.objective,
        allowed=None if options.allow is None else frozenset(options.allow),
        forbidden=frozenset(options.forbid),
        target=target,
        time_limit=options.time_limit,
        search_seconds=options.search_seconds,
    )


def sizes_of(workload: Workload, given: Mapping[str, int]) -> dict[str, int]:
    """The workload's sizes, with those that were given in place of its own.

    Raises:
        UsageError: it has no such size.
    """
    for name in given:
        if name not in workload.sizes:
            raise UsageError(f"the workload has no size {name!r}", f"It has {', '.join(workload.sizes)}")
    return {**workload.sizes, **given}


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(PlanContents):
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

    What it holds, such as `entries` and `after`, is described at `PlanContents`.
    """

    _lives: list[AttachedProgram] = field(default_factory=list, repr=False, compare=False)

    def __repr__(self) -> str:
        names = ", ".join(choice.name for choice in self.choices) or "nothing to change"
        fits = "fits" if self.fits else "does not fit"
        limit = format_bytes(self.aim.budget_bytes - self.aim.margin_bytes)
        return f"<Plan for {self.aim.device}: {names}; {fits}, {format_bytes(self.after.total_bytes)} of {limit}>"

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
            UsageError: the loss is not a scalar.
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
        write_plan(path, self)

    @classmethod
    def load(cls, path: Any) -> Plan:
        """Read what `save` or ``vramfit plan`` wrote.

        Raises:
            UsageError: there is no such file, or it is not a plan; the message says where.
        """
        return read_plan(path, cls)


def plan_of(choices: Iterable[Choice], aim: PlanTarget, before: PlanFigures, after: PlanFigures) -> Plan:
    """A plan whose entries were not run one by one."""
    return Plan(
        entries=tuple(PlanStep(choice=choice) for choice in choices), aim=aim, before=before, after=after
    )


class NothingFits(UsageError):
    """No plan stays within the budget.

    Attributes:
        plan: the one that came closest.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str, plan: Plan) -> None:
        super().__init__(message, hint)
        self.plan = plan

    @property
    def found(self) -> dict[str, str]:
        """The plan as a text, for another process."""
        return {"plan": plan_to_toml(self.plan)}
