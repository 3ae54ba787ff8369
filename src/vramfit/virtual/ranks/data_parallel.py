"""What ``DistributedDataParallel`` asks of CUDA below Python.

Its reducer is C++ and runs as it is: it allocates the buckets, lays gradients into them in ready order, makes them
anew after the first backward pass, and calls ``c10d::allreduce_`` from autograd's threads: all through the dispatcher.
"""

from __future__ import annotations

from torch._C._distributed_c10d import Logger

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Leave out DDP's own timings: they come from CUDA events in C++, which a CPU build lacks, and say nothing here."""
    patches.set(Logger, "set_runtime_stats_and_log", lambda self: None)
