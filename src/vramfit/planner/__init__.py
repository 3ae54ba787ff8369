"""Finds the cheapest set of techniques with which a workload stays within a budget."""

REPORT_MODULES = (
    "vramfit.planner.reports.fit",
    "vramfit.planner.reports.plan",
    "vramfit.planner.reports.verify",
)
"""Where `vramfit.report` finds the reports of this package's values."""
