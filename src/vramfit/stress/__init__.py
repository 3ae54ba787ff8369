"""Stress tests: a workload at changing sizes, up to where it no longer fits."""

from vramfit.stress.plan import Vary
from vramfit.stress.run import stress

__all__ = ["Vary", "stress"]
