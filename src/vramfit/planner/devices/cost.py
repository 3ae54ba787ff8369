"""What a step of a workload costs on a device: bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vramfit.planner.plans import PlanFigures
from vramfit.planner.step_profiler import StepProfile
from vramfit.techniques import Profile
from vramfit.workload import Workload

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """What a step costs.

    Attributes:
        fits: whether it ran within the device's budget.
        peak_allocated_bytes: most bytes that tensors held at once, from the start of the model on.
        peak_reserved_bytes: most bytes that torch's allocator held; on the CPU the same as allocated.
        outside_bytes: memory of the device outside torch: the CUDA context.
        host_bytes: most bytes that were pinned on the host, and what else techniques hold there.
        step_seconds: of the last step.
        step_flops: of the last step.
        oom: the message of the request that failed, or empty.
    """

    fits: bool
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    outside_bytes: int = 0
    host_bytes: int = 0
    step_seconds: float = 0.0
    step_flops: int = 0
    oom: str = ""

    @property
    def figures(self) -> PlanFigures:
        """As a plan tells it."""
        return PlanFigures(
            peak_allocated_bytes=self.peak_allocated_bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            total_bytes=self.total_bytes,
            host_bytes=self.host_bytes,
            step_seconds=self.step_seconds,
            step_flops=self.step_flops,
        )

    @property
    def total_bytes(self) -> int:
        """All that the device has to have."""
        return self.peak_reserved_bytes + self.outside_bytes


class DeviceBackend(Protocol):
    """Where workloads are run: a virtual card, or this machine's CPU."""

    name: str
    device_type: str
    total_bytes: int

    def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
        """Run some steps; past the budget a request fails.

        Args:
            workload: with its techniques.
            sizes: of the batch.
            budget: bytes that the device is taken to have; None for as many as it takes.
        """
        ...

    def profile_step(
        self, workload: Workload, sizes: dict[str, int], places: Callable[[nn.Module], Sequence[str]]
    ) -> tuple[Profile, StepProfile]:
        """Run some steps without a limit, and look at the last.

        Args:
            workload: with its techniques.
            sizes: of the batch.
            places: the paths of the model's blocks.
        """
        ...
