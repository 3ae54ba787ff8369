"""Measures, once per process, how torch's engine presents a gradient that nobody else holds.

See NOTE [Gradients summed in place] in vramfit/capture/gradient_sums.py. A tiny backward pass on a virtual card of its
own, in which one sum is exclusive by construction, gives the use counts.
"""

from __future__ import annotations

import torch
from torch._subclasses import fake_tensor

from vramfit.gpus import find_gpu
from vramfit.patching import PatchStack
from vramfit.trace import TraceBuilder
from vramfit.virtual.machine import Machine
from vramfit.virtual.meter import Meter
from vramfit.virtual.mode import VirtualMode
from vramfit.virtual.workspaces import Workspaces

_measured: tuple[int, int] | None = None


def _nothing(*_: object) -> None:
    """Stands in for what would wake a real device up."""


def exclusive_counts() -> tuple[int, int] | None:
    """Use counts of a tensor and of its storage when only the engine holds it; None where no sum was seen."""
    global _measured
    if _measured is None:
        with PatchStack() as patches:
            patches.set(fake_tensor, "init_gpu_context", _nothing)
            patches.set(torch.cuda, "_lazy_init", _nothing)
            machine = Machine([find_gpu("24GiB")], alloc_conf="", visible="0", context_bytes=0)
            meter = Meter(machine, TraceBuilder())
            mode = VirtualMode(machine, meter, Workspaces(machine, meter))
            mode.observed_counts = []
            with mode, torch.inference_mode(False), torch.enable_grad():  # the caller may have turned it off
                leaf = torch.empty(4, 4, device="cuda:0", requires_grad=True)
                product = leaf * 2.0
                (product.sin() + product.cos()).sum().backward()
            if mode.observed_counts:
                _measured = mode.observed_counts[-1]
    return _measured
