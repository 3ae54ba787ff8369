"""The virtual GPU around a block of code, with the report of what the block did."""

from __future__ import annotations

from vramfit.analysis import verdict
from vramfit.api.programs import Report
from vramfit.virtual import gpu


class VirtualGPU(gpu.VirtualGPU):  # noqa: D101  # its docstring is inherited, and bound for help() below
    __doc__ = gpu.VirtualGPU.__doc__

    @property
    def report(self) -> Report:
        """What happened so far (inside the block) or in all (after it), as `vramfit.run` gives it for a script."""
        outcome = self.run
        return Report(run=outcome, verdict=verdict(outcome))

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict and the timeline, without scripts."""
        return self.report._repr_html_()
