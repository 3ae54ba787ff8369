"""The checks, each a pure function from facts to findings."""

from __future__ import annotations

from vramfit.doctor.checks import (
    allocator,
    build,
    card_modes,
    host_limits,
    neighbours,
    virtual_gpu,
    visibility,
)
from vramfit.doctor.findings import Check

CHECKS: tuple[Check, ...] = (
    *build.CHECKS,
    *card_modes.CHECKS,
    *neighbours.CHECKS,
    *visibility.CHECKS,
    *allocator.CHECKS,
    *host_limits.CHECKS,
    *virtual_gpu.CHECKS,
)
"""All of them, in the order in which findings of equal weight and area are told."""
