"""The checks, each a pure function from facts to findings."""

from __future__ import annotations

from vramfit.doctor.checks import allocator, build, cards, host, neighbours, virtual, visibility
from vramfit.doctor.findings import Check

CHECKS: tuple[Check, ...] = (
    *build.CHECKS,
    *cards.CHECKS,
    *neighbours.CHECKS,
    *visibility.CHECKS,
    *allocator.CHECKS,
    *host.CHECKS,
    *virtual.CHECKS,
)
"""All of them, in the order in which findings of equal weight and area are told."""
