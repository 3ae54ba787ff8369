"""``torch.profiler``: records the CPU side; there are no kernels whose times it could take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from vramfit.patching import PatchStack
from vramfit.virtual.machine import Machine


def patch_profiler(machine: Machine, patches: PatchStack) -> None:
    """Keep the profiler from asking a CUDA library for event times, which writes a stack per op to stderr."""
    module: Any = profiler
    supported = module._supported_activities

    def supported_activities() -> set[ProfilerActivity]:
        machine.warn("profiler-without-kernels", "torch.profiler records no kernels on the virtual GPU")
        return {*supported(), ProfilerActivity.CUDA}

    # With this, torch.profiler asks Kineto for CUDA activities, of which there are none ...
    patches.set(module, "_supported_activities", supported_activities)
    # ... and where Kineto is not wanted, it does not record CUDA events around each op instead.
    states = dict(module.ProfilerState.__members__)
    states["KINETO_GPU_FALLBACK"] = states["KINETO"]
    patches.set(module, "ProfilerState", SimpleNamespace(**states))
    # emit_nvtx enables a C++ observer that a CPU build lacks.
    patches.set(module.emit_nvtx, "__enter__", lambda self: self)
    patches.set(module.emit_nvtx, "__exit__", lambda *_: False)
