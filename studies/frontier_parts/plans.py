"""Plans of vramfit for the same workloads: run on the CPU, where they are measured, and priced in a card's seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import nn

from frontier_parts.hollow import Hollow
from frontier_parts.measuring import card_seconds
from frontier_parts.subjects import Subject
from vramfit.capture.gradient_sums import measure_counts
from vramfit.planner.candidates import Candidates, key_of
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.devices.cpu_backend import CpuBackend, rates
from vramfit.planner.plans import MEMORY, THROUGHPUT, NothingFits, Plan, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import AppliedWorkload, Profile
from vramfit.workload import Workload

WHOLE = frozenset({"activation-checkpointing", "chunked-loss", "early-release", "in-place-activations"})
"""Techniques that change what is held between the passes and nothing else: what peers choose from."""

CUT = WHOLE | {"micro-batching"}
"""The same, and the batch may be cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the planner said.

    Attributes:
        plan: its plan, or the closest where it says that nothing fits.
        fits: whether it says that it fits.
        runs: that it made; what it remembers of others is not among them.
    """

    plan: Plan
    fits: bool
    runs: int


@dataclass(slots=True)
class Remembering:
    """The CPU, where a workload runs once with each set of techniques: searches for other budgets see the same runs.

    It is priced in a card's seconds, which is what the tables compare.

    Attributes:
        runs: that were made so far.
    """

    name: str = CpuBackend.name
    device_type: str = CpuBackend.device_type
    device: CpuBackend = field(default_factory=lambda: CpuBackend(estimate=card_seconds))
    runs: int = 0
    _prices: dict[Any, StepCost] = field(default_factory=dict)
    _seen: dict[Any, tuple[Profile, StepProfile]] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Memory of the machine."""
        return self.device.total_bytes

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """See `DeviceBackend.step_cost`."""
        key = _key(workload, sizes)
        if key not in self._prices:
            self.runs += 1
            with Hollow():
                self._prices[key] = self.device.step_cost(workload, sizes)
        found = self._prices[key]
        fits = budget is None or found.total_bytes <= budget
        return replace(found, fits=fits, oom="" if fits else f"the peak is {found.total_bytes} B")

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """See `DeviceBackend.profile_step`. Remembered models hold no values: techniques look at their structure."""
        key = (_key(workload, sizes), places.__name__)
        if key not in self._seen:
            self.runs += 1
            with Hollow():
                profile, step_profile = self.device.profile_step(workload, sizes, places)
            for group in profile.optimizer.param_groups if profile.optimizer is not None else ():
                group["params"] = [parameter.detach().to("meta") for parameter in group["params"]]
            self._seen[key] = (replace(profile, model=profile.model.to("meta")), step_profile)
        return self._seen[key]


def _key(workload: Workload, sizes: dict[str, int]) -> Any:
    choices = workload.choices if isinstance(workload, AppliedWorkload) else ()
    return key_of(choices), tuple(sizes.items())


@cache
def remembering(subject: str) -> Remembering:
    """The device of all searches for a subject in this process."""
    del subject
    return Remembering()


def fixed_bytes(subject: Subject) -> int:
    """Parameters and gradients, once where they are shared."""
    model = subject.workload.model()
    return sum(
        parameter.numel() * parameter.element_size() * (2 if parameter.requires_grad else 1)
        for parameter in model.parameters()
    )


def plan_for(
    subject: Subject, budget: int | None, *, cut: bool, say: Callable[[str], None] = lambda _: None
) -> Answer:
    """The plan for so many bytes above parameters and gradients; None asks for the lowest peak."""
    fixed = fixed_bytes(subject)
    device = remembering(subject.name)
    rates(), measure_counts()  # in full
    before = device.runs
    request = PlanRequest(
        workload=subject.workload,
        sizes=dict(subject.workload.sizes),
        budget_bytes=device.total_bytes if budget is None else fixed + budget,
        allowed=CUT if cut else WHOLE,
        objective=MEMORY if budget is None else THROUGHPUT,
        entries=False,
        recipes=False,  # these are the peers, of which plans are to know nothing
    )
    try:
        plan, fits = PlanSearch(Candidates(device=device, request=request, progress=say)).plan(), True
    except NothingFits as error:
        plan, fits = error.plan, False
    return Answer(plan=plan, fits=fits, runs=device.runs - before)
