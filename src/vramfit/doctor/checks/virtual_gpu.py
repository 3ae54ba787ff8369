"""Whether the virtual GPU runs here. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from vramfit.doctor.facts import Facts
from vramfit.doctor.findings import Check, Finding, FindingArea, Severity

_TESTED = ("Linux", "x86_64")


def check_virtual(facts: Facts) -> Iterator[Finding]:
    """Its self-check, a small training step in a process of its own, passed."""
    if facts.virtual_error is None:
        return
    if facts.virtual_error:
        yield Finding(
            check="virtual-gpu",
            area=FindingArea.VIRTUAL,
            severity=Severity.ERROR,
            finding=f"its self-check failed: {facts.virtual_error}",
            why="vramfit run --gpu, the planner and the tests on virtual cards cannot run in this interpreter",
            fix="Use a torch release from 2.11 on, from PyPI, on Linux; or report this version",
        )
    elif (facts.host.system, facts.host.machine) != _TESTED:
        yield Finding(
            check="virtual-gpu",
            area=FindingArea.VIRTUAL,
            severity=Severity.INFO,
            finding=f"its self-check passed on {facts.host.system} {facts.host.machine}",
            why="its developers have not run it on this platform",
            fix="Report what differs from a card",
        )
    else:
        yield Finding(
            check="virtual-gpu",
            area=FindingArea.VIRTUAL,
            severity=Severity.OK,
            finding="its self-check passed",
        )


CHECKS: tuple[Check, ...] = (check_virtual,)
