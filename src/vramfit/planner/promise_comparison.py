"""The words for a comparison of a plan with the plain program: what was compared, and which technique fell short."""

from __future__ import annotations

import math

from vramfit.planner.verification import GradientCheck
from vramfit.techniques import Choice
from vramfit.units import counted


def words_of_check(check: GradientCheck, way: str) -> str:
    """How a comparison ended whose promises all held.

    Args:
        way: what was trained, and with how many examples.
    """
    gradients = f"the gradients of all {check.parameters} parameters"
    if check.equal == check.parameters:
        how = "are those of the plain program, bit for bit"
    elif check.allowed is None:
        how = f"differ by up to {check.worst:.2g} of their norm, which nothing bounds"
    else:
        how = f"differ by at most {check.worst:.2g} of their norm, {check.allowed:g} promised"
    states = f" and {counted(check.states, 'value')} that a step writes beside them" if check.states else ""
    return f"compared with {way}: {gradients}{states} {how}."


def words_of_fault(fault: Choice, check: GradientCheck, way: str) -> str:
    """Why a technique is left out, without a full stop: what differs, and what was promised.

    Args:
        way: what was trained, and with how many examples.
    """
    if check.state:
        by = f"by {check.state_error:.2g} of its norm" if math.isfinite(check.state_error) else "altogether"
        what = f"{check.state}, which a step writes, differs {by}"
    elif check.passes:
        what = "the losses of the first steps are not equal"
    else:
        what = f"the gradient of {check.worst_name} differs by {check.worst:.2g} of its norm"
    promised = fault.promise.numerics.value
    return f"{fault.name} is left out: compared with {way}, {what}, and {promised} was promised"
