"""vramfit makes PyTorch programs fit the GPU they have.

- `run`: a script or module on the virtual GPU, in a process of its own.
- `VirtualGPU`: the virtual GPU around a block of code.
- `track`: a recording of the memory of any block of code, on a card or on the metered CPU.
- `snapshot`: a line of figures.
- `Workload`: a model and its batches at sizes that can be varied, for ``vramfit plan``, ``fit`` and ``stress``.
- `plain_workload`, `transformers_workload`, `lightning_workload`: one of what you have.
- `check_leaks`: what grows when a function is called again and again, and who holds it.
- `annotate`, `join_profile`: names for Nsight Systems, and categories for torch.profiler.
- `plan`, `fit`, `verify`: the cheapest changes that make a workload fit, the largest size that does, and the proof.
- `Plan`: what `plan` finds, to be applied to a workload or to your own model and loop.
- `MemoryTrace`: what every run, recording and snapshot comes to.

In a notebook, ``%load_ext vramfit`` gives the cell magic ``%%vram``.

PYTEST_DONT_REWRITE: a package with a pytest plugin would have its assertions rewritten, and may be imported before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vramfit.api import Report as Report
    from vramfit.api import run as run
    from vramfit.errors import VramfitError as VramfitError
    from vramfit.in_process import VirtualGPU as VirtualGPU
    from vramfit.leakcheck import LeakFoundError as LeakFoundError
    from vramfit.leakcheck import assert_no_leaks as assert_no_leaks
    from vramfit.leakcheck import check_leaks as check_leaks
    from vramfit.planner.plan import Plan as Plan
    from vramfit.planning import fit as fit
    from vramfit.planning import plan as plan
    from vramfit.planning import verify as verify
    from vramfit.record.annotating import annotate as annotate
    from vramfit.record.profilers import join_profile as join_profile
    from vramfit.trace import MemoryTrace as MemoryTrace
    from vramfit.tracking import Track as Track
    from vramfit.tracking import snapshot as snapshot
    from vramfit.tracking import track as track
    from vramfit.virtual.foreign.registry import fake_kernel as fake_kernel
    from vramfit.workload import Workload as Workload
    from vramfit.workloads import lightning_workload as lightning_workload
    from vramfit.workloads import plain_workload as plain_workload
    from vramfit.workloads import transformers_workload as transformers_workload

__all__ = [
    "LeakFoundError",
    "MemoryTrace",
    "Plan",
    "Report",
    "Track",
    "VirtualGPU",
    "VramfitError",
    "Workload",
    "__version__",
    "annotate",
    "assert_no_leaks",
    "check_leaks",
    "fake_kernel",
    "fit",
    "join_profile",
    "lightning_workload",
    "plain_workload",
    "plan",
    "run",
    "snapshot",
    "track",
    "transformers_workload",
    "verify",
]

# Where each name lives. They are imported at first use: `import vramfit` must not import torch.
_HOMES = {
    "LeakFoundError": "vramfit.leakcheck",
    "MemoryTrace": "vramfit.trace",
    "Plan": "vramfit.planner.plan",
    "Report": "vramfit.api",
    "Track": "vramfit.tracking",
    "VirtualGPU": "vramfit.in_process",
    "VramfitError": "vramfit.errors",
    "Workload": "vramfit.workload",
    "annotate": "vramfit.record.annotating",
    "assert_no_leaks": "vramfit.leakcheck",
    "check_leaks": "vramfit.leakcheck",
    "fake_kernel": "vramfit.virtual.foreign.registry",
    "fit": "vramfit.planning",
    "join_profile": "vramfit.record.profilers",
    "lightning_workload": "vramfit.workloads",
    "plain_workload": "vramfit.workloads",
    "plan": "vramfit.planning",
    "run": "vramfit.api",
    "snapshot": "vramfit.tracking",
    "track": "vramfit.tracking",
    "transformers_workload": "vramfit.workloads",
    "verify": "vramfit.planning",
}


_MODULES = frozenset({"analysis", "doctor", "gpus", "report", "techniques", "trace"})
"""Packages that can be used after ``import vramfit`` alone."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        from importlib import import_module

        return import_module(f"vramfit.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext vramfit``: the cell magic ``%%vram``, and traces that show themselves."""
    from vramfit.integrations import jupyter

    jupyter.load_ipython_extension(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext vramfit``."""
    from vramfit.integrations import jupyter

    jupyter.unload_ipython_extension(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
