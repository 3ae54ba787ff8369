"""What follows from the facts: findings, each with its weight, its reason and its cure. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from vramfit.doctor.facts import Facts


class Severity(Enum):
    """How much a finding weighs."""

    OK = "ok"
    """As it should be."""
    INFO = "info"
    """Worth knowing; nothing to do."""
    WARNING = "warning"
    """Costs memory or time, or will surprise."""
    ERROR = "error"
    """Programs fail, or do not use the card."""

    @property
    def rank(self) -> int:
        """0 for the lightest."""
        return list(Severity).index(self)


class FindingArea(Enum):
    """What a finding is about; the order of the report."""

    TORCH = "torch"
    DRIVER = "driver"
    CARDS = "cards"
    VISIBILITY = "visible devices"
    ALLOCATOR = "allocator settings"
    HOST = "host"
    VIRTUAL = "virtual GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that decides about memory on this machine.

    Attributes:
        check: the short name of what was looked at; stays the same from version to version.
        area: what it belongs to.
        severity: its weight.
        finding: what is so, in one line.
        why: what it does to memory or to the program; empty for what is as it should be.
        fix: what to do; empty where there is nothing to do.
    """

    check: str
    area: FindingArea
    severity: Severity
    finding: str
    why: str = ""
    fix: str = ""


Check = Callable[[Facts], Iterable[Finding]]
"""A pure function: what it finds in the facts, nothing where it does not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The facts of a machine, and what they say.

    Attributes:
        facts: what was found out.
        findings: the heaviest first, then by area.
    """

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Severity:
        """The weight of the heaviest finding."""
        return max((finding.severity for finding in self.findings), key=lambda s: s.rank, default=Severity.OK)

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """The findings of one weight."""
        return tuple(finding for finding in self.findings if finding.severity is severity)
