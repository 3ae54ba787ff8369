"""Stress tests: a workload at changing sizes, up to where it no longer fits."""

from vramfit.stress.stress_run import Vary, stress

__all__ = ["Vary", "stress"]
