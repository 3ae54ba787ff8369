"""Feeding a card: batches brought ahead, data sets in mapped files, and what a loader's workers are worth."""

REPORT_MODULES = ("vramfit.runtime.feeding.loader_report",)
"""Where `vramfit.report` finds the reports of this package's values."""
