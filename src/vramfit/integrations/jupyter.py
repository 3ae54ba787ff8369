"""Shows traces and runs in notebooks: ``%load_ext vramfit.integrations.jupyter``.

Results of ``vramfit.run`` and ``vramfit.track`` show themselves. This extension does the same for bare traces and runs,
such as ``MemoryTrace.load("run.vft")``: the verdict where there is one, figures and the timeline, static and without
scripts.
"""

from __future__ import annotations

from typing import Any

from vramfit.analysis import verdict
from vramfit.report.notebook import run_summary, trace_summary
from vramfit.trace import MemoryTrace, Run

_HTML = "text/html"


def load_ipython_extension(shell: Any) -> None:
    """Begin to show traces and runs; IPython calls it for ``%load_ext``."""
    formatter = shell.display_formatter.formatters[_HTML]
    formatter.for_type(MemoryTrace, trace_summary)
    formatter.for_type(Run, _run)


def unload_ipython_extension(shell: Any) -> None:
    """End it; IPython calls it for ``%unload_ext``."""
    formatter = shell.display_formatter.formatters[_HTML]
    for kind in (MemoryTrace, Run):
        formatter.pop(kind, None)


def _run(run: Run) -> str:
    return run_summary(run, verdict(run))
