"""Stress tests: a workload at changing sizes, up to where it no longer fits."""

from vramfit.stress.schedule import Vary
from vramfit.stress.stress_run import stress

__all__ = ["Vary", "stress"]
