"""Stress tests: a workload at changing sizes, up to where it no longer fits."""

from vramfit.stress.stress_run import Vary, stress

__all__ = ["Vary", "stress"]

REPORT_MODULES = ("vramfit.stress.stress_report",)
"""Where `vramfit.report` finds the reports of this package's values."""
