"""The checks, each a pure function from facts to findings, and the diagnosis that they make together."""

from __future__ import annotations

from vramfit.doctor.checks import (
    allocator,
    build,
    cards,
    host_limits,
    nccl_environment,
    ranks_on_cards,
    visibility,
)
from vramfit.doctor.facts import Check, Diagnosis, Facts, FindingArea

CHECKS: tuple[Check, ...] = (
    *build.CHECKS,
    *cards.CHECKS,
    *visibility.CHECKS,
    *allocator.CHECKS,
    *nccl_environment.CHECKS,
    *ranks_on_cards.CHECKS,
    *host_limits.CHECKS,
)
"""All of them, in the order in which findings of equal weight and area stand."""


def diagnose(facts: Facts) -> Diagnosis:
    """Look at the facts with every check."""
    found = [finding for check in CHECKS for finding in check(facts)]
    areas = list(FindingArea)
    found.sort(key=lambda finding: (-finding.severity.rank, areas.index(finding.area)))
    return Diagnosis(facts=facts, findings=tuple(found))
