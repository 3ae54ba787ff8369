"""What a plan takes on a card, beside what it says."""

from __future__ import annotations

from dataclasses import dataclass

from vramfit.planner.plan import Figures
from vramfit.planner.price import Device
from vramfit.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class CardRun:
    """A workload as it ran on a card.

    Attributes:
        figures: measured; as far as it came where it did not fit the card at all.
        fits: whether it stayed within its limit.
        oom: the message of the request that failed, or empty.
    """

    figures: Figures
    fits: bool
    oom: str = ""

    @property
    def ended(self) -> bool:
        """Whether it came to the end of its steps, within its limit or without one."""
        return self.figures.step_seconds > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A plan on a card.

    Attributes:
        card: its name, as torch tells it.
        before: the plain program, which may have the whole card.
        after: with the plan, which may have its budget less the margin.
        planned: what the plan says of `after`.
        limit_bytes: the budget less the margin.
        left_bytes: of tensors that outlived their run; more than 0 is the workload's own doing.
    """

    card: str
    before: CardRun
    after: CardRun
    planned: Figures
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


def run_on(device: Device, workload: Workload, sizes: dict[str, int], limit: int | None) -> CardRun:
    """Run a workload within a limit; beyond it, once more without, so that what it takes is known.

    Args:
        device: the card.
        workload: with its techniques.
        sizes: of the batch.
        limit: bytes of the card, the context included; None for all of it.
    """
    price = device.price(workload, sizes, limit)
    if price.fits or limit is None:
        return CardRun(figures=price.figures, fits=price.fits, oom=price.oom)
    without = device.price(workload, sizes, None)
    return CardRun(figures=without.figures, fits=False, oom=price.oom)
