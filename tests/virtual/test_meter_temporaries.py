"""Blocks that last for one kernel."""

from __future__ import annotations

import pytest
import torch

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU


def test_a_block_is_given_back_while_the_kernel_runs(gpu: VirtualGPU) -> None:
    start = len(gpu.trace)
    addresses = gpu.meter.temporary([1024, 2048, -1, 4096], 0, "op")
    trace = gpu.trace
    rows = range(start, len(trace))
    events = [(EventKind(int(trace.kind[row])), int(trace.size[row])) for row in rows]
    requests = [e for e in events if e[0] in (EventKind.ALLOC, EventKind.FREE_REQUESTED)]
    assert requests == [
        (EventKind.ALLOC, 1024),
        (EventKind.ALLOC, 2048),
        (EventKind.FREE_REQUESTED, 1024),
        (EventKind.ALLOC, 4096),
    ]
    assert len(addresses) == 2
    for address in addresses:
        gpu.meter.free(address, 0)
    assert torch.cuda.memory_allocated() == 0


def test_a_kernel_that_runs_out_keeps_nothing(gpu: VirtualGPU) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        gpu.meter.temporary([1 << 20, 1 << 20, -1, 1 << 50], 0, "op")
    assert torch.cuda.memory_allocated() == 0
