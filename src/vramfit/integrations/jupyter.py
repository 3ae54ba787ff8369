"""The extension for IPython and notebooks, ``%load_ext vramfit``: the cell magic ``%%vram``, and traces that show
themselves.

Results of ``vramfit.run`` and ``vramfit.track`` show themselves without it. It does the same for bare traces and runs,
such as ``MemoryTrace.load("run.vft")``: the verdict where there is one, figures and the timeline, static and without
scripts. IPython itself is not imported: it calls what stands here with its shell.
"""

from __future__ import annotations

from typing import Any

from vramfit.analysis import verdict
from vramfit.integrations.cell_magic import CellMagic
from vramfit.report.html.page import run_summary, trace_summary
from vramfit.trace import MemoryTrace, Run

_HTML = "text/html"
_MAGIC = "vram"


def load_ipython_extension(shell: Any) -> None:
    """Add the magic and begin to show traces and runs; IPython calls it for ``%load_ext``."""
    formatter = shell.display_formatter.formatters[_HTML]
    formatter.for_type(MemoryTrace, trace_summary)
    formatter.for_type(Run, _run)
    shell.register_magic_function(CellMagic(shell), magic_kind="cell", magic_name=_MAGIC)


def unload_ipython_extension(shell: Any) -> None:
    """End it; IPython calls it for ``%unload_ext``."""
    formatter = shell.display_formatter.formatters[_HTML]
    for kind in (MemoryTrace, Run):
        formatter.pop(kind, None)
    shell.magics_manager.magics["cell"].pop(_MAGIC, None)


def _run(run: Run) -> str:
    return run_summary(run, verdict(run))
