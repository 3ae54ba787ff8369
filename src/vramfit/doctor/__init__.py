"""What decides about memory on this machine: facts gathered once, and findings drawn from them by pure functions."""

from __future__ import annotations

from vramfit.doctor.checks import diagnose
from vramfit.doctor.facts import Diagnosis, Facts, Finding, Severity
from vramfit.doctor.gathering import gather

__all__ = ["Diagnosis", "Facts", "Finding", "Severity", "diagnose", "gather"]
