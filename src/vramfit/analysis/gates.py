"""Gates: whether a run stays within a budget, and whether it takes more than it used to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from vramfit.analysis._reconcile import bare_name
from vramfit.analysis._states import PeakState
from vramfit.analysis.reconciliation import Quantity, Tolerance
from vramfit.errors import UsageError


class Bound(Enum):
    """What a gate holds a run to."""

    BUDGET = "budget"
    BASELINE = "baseline"
    CARD = "card"
    """The run must not end by running out of memory."""
    USED = "used"
    """It must use a card at all: a figure of nothing is kept by any limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One requirement on one device.

    Attributes:
        actual: bytes of the run.
        limit: bytes that it may have; for `Bound.CARD` those that it could have had, 0 if unknown.
        baseline: bytes of the run before; None without one.
        passed: whether the requirement is met.
    """

    bound: Bound
    device: int
    quantity: Quantity
    actual: int
    limit: int
    baseline: int | None = None
    passed: bool
    note: str = ""

    @property
    def over(self) -> int:
        """Bytes above the limit; 0 if it is kept."""
        return max(0, self.actual - self.limit) if not self.passed else 0


def measure(state: PeakState, quantity: Quantity) -> int | None:
    """A figure of a run; None where its source does not say."""
    return {
        Quantity.TOTAL: state.used,
        Quantity.RESERVED: state.reserved,
        Quantity.ALLOCATED: state.allocated,
    }[quantity]


def card_gates(run: Sequence[PeakState]) -> tuple[Gate, ...]:
    """One failed gate for each device that ran out of memory at the end."""
    return tuple(
        Gate(
            bound=Bound.CARD,
            device=state.device,
            quantity=Quantity.TOTAL,
            actual=state.used or 0,
            limit=0,
            passed=False,
            note="the run ended by running out of memory: it would have taken more",
        )
        for state in run
        if state.ran_out
    )


def used_gates(run: Sequence[PeakState]) -> tuple[Gate, ...]:
    """A failed gate for a run that held nothing on any device: it says nothing of what the program takes."""
    if any(state.is_used for state in run):
        return ()
    return tuple(
        Gate(
            bound=Bound.USED,
            device=state.device,
            quantity=Quantity.TOTAL,
            actual=0,
            limit=0,
            passed=False,
            note="the program never used the card, so there is nothing to check",
        )
        for state in run[:1]
    )


def budget_gates(
    run: Sequence[PeakState], budget: int, quantity: Quantity = Quantity.TOTAL
) -> tuple[Gate, ...]:
    """Hold each device to a budget.

    A device that ran out within it is left out: what it held then says nothing of what it needs.

    Raises:
        UsageError: the run does not tell that figure.
    """
    return tuple(
        Gate(
            bound=Bound.BUDGET,
            device=state.device,
            quantity=quantity,
            actual=(actual := _known(state, quantity)),
            limit=budget,
            passed=actual <= budget,
            note=_unknown(state, quantity),
        )
        for state in run
        if not (state.ran_out and _known(state, quantity) <= budget)
    )


def baseline_gates(
    run: Sequence[PeakState], baseline: Sequence[PeakState], tolerance: Tolerance
) -> tuple[Gate, ...]:
    """Hold each device to what it took before, reserved and allocated alike. Less than before is never too much.

    Raises:
        UsageError: a device of the run is not in the baseline, or they tell no figure in common.
    """
    before = {state.device: state for state in baseline}
    gates = []
    for state in run:
        known = before.get(state.device)
        if known is None and len(run) == len(baseline) == 1:
            known = baseline[0]
        if known is None:
            name = baseline[0].name if baseline else "the baseline"
            raise UsageError(
                f"{name} has no data for device {state.device}",
                "Write the baseline again from a run on as many devices",
            )
        gates += _against(state, known, tolerance)
    return tuple(gates)


def _against(state: PeakState, known: PeakState, tolerance: Tolerance) -> list[Gate]:
    found: list[Gate] = []
    differs = _differs(state, known)
    for quantity in (Quantity.RESERVED, Quantity.ALLOCATED):
        actual, earlier = measure(state, quantity), measure(known, quantity)
        if actual is None or earlier is None:
            continue
        limit = earlier + tolerance.bound(earlier)
        lower = earlier - actual > tolerance.bound(earlier) and not state.ran_out
        notes = [differs] if differs and not found else []
        if lower:
            notes.append("it takes less than the baseline by more than the tolerance: write it again")
        found.append(
            Gate(
                bound=Bound.BASELINE,
                device=state.device,
                quantity=quantity,
                actual=actual,
                limit=limit,
                baseline=earlier,
                passed=actual <= limit,
                note="; ".join(notes),
            )
        )
    if not found:
        raise UsageError(
            f"{known.name} and {state.name} have no figure in common",
            "A baseline holds peak reserved or peak allocated bytes",
        )
    return found


def _differs(state: PeakState, known: PeakState) -> str:
    """What makes a baseline that of something else: another card, or another version of torch."""
    parts = []
    if state.gpu and known.gpu and bare_name(state.gpu) != bare_name(known.gpu):
        parts.append(f"the baseline is of {known.gpu}, this run of {state.gpu}")
    if state.torch and known.torch and _release(state.torch) != _release(known.torch):
        parts.append(f"the baseline is of torch {known.torch}, this run of {state.torch}")
    return "; ".join((*parts, "what differs may come from that: write it again")) if parts else ""


def _release(version: str) -> str:
    """The version without its build tag, such as ``+cu126``."""
    return version.partition("+")[0]


def _known(state: PeakState, quantity: Quantity) -> int:
    actual = measure(state, quantity)
    if actual is None:
        raise UsageError(
            f"{state.name} does not tell the {quantity.value} bytes of device {state.device}",
            "Give a trace, a snapshot or a report of vramfit run --json",
        )
    return actual


def _unknown(state: PeakState, quantity: Quantity) -> str:
    """What the figure leaves out."""
    notes = []
    if state.is_state:
        notes.append("a snapshot without history holds no peak: this is what was held when it was dumped")
    if quantity is Quantity.TOTAL and state.outside is None:
        notes.append("what lies outside PyTorch (the CUDA context) is not known here and not counted")
    return "; ".join(notes)
