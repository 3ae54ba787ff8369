"""Blocks that last for one kernel."""

from __future__ import annotations

import pytest
import torch

from vramfit.trace import EventKind
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.kernels.rules import given_back
from vramfit.virtual.op_call import EMPTY_CACHE, Spare


def test_a_block_is_given_back_while_the_kernel_runs(gpu: VirtualGPU) -> None:
    start = len(gpu.trace)
    held = gpu.meter.temporary([1024, 2048, -1, 4096], 0, "op")
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
    assert len(held) == 2
    gpu.meter.give_back(held, 0)
    assert torch.cuda.memory_allocated() == 0


def test_a_kernel_that_runs_out_keeps_nothing(gpu: VirtualGPU) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        gpu.meter.temporary([1 << 20, 1 << 20, -1, 1 << 50], 0, "op")
    assert torch.cuda.memory_allocated() == 0


def test_a_kernel_does_without_what_it_can_spare(gpu: VirtualGPU) -> None:
    held = gpu.meter.temporary([Spare(1 << 50), 1024, given_back(1), Spare(2048)], 0, "op")
    assert len(held) == 2
    assert gpu.meter.machine.devices[0].allocator.allocated_bytes == 1024 + 2048
    gpu.meter.give_back(held, 0)


def test_a_search_empties_the_cache(gpu: VirtualGPU) -> None:
    held = gpu.meter.temporary([64 << 20, given_back(1), EMPTY_CACHE, 1024], 0, "op")
    assert gpu.meter.machine.devices[0].allocator.reserved_bytes == 2 << 20  # the segment of 64 MiB is gone
    gpu.meter.give_back(held, 0)


def test_gradients_of_a_convolution_are_made_in_turn(gpu: VirtualGPU) -> None:
    # Columns of 64 x 9 x 32 x 32 floats for each of two gradients of 2 MiB and 1 MiB: never both at once
    source = torch.randn(8, 64, 32, 32, device="cuda", requires_grad=True)
    weight = torch.randn(512, 64, 3, 3, device="cuda", requires_grad=True)
    with torch.backends.cudnn.flags(enabled=False):
        out = torch.nn.functional.conv2d(source, weight, padding=1)
        gradient = torch.ones_like(out)
        start = len(gpu.trace)
        out.backward(gradient)
    trace = gpu.trace
    sizes = [
        (EventKind(int(trace.kind[row])).name, int(trace.size[row]))
        for row in range(start, len(trace))
        if EventKind(int(trace.kind[row])) in (EventKind.ALLOC, EventKind.FREE_REQUESTED)
    ]
    columns = 64 * 9 * 32 * 32 * 4
    in_turn = [("ALLOC", columns), ("FREE_REQUESTED", columns)]
    gradients = [("ALLOC", source.nbytes), *in_turn, ("ALLOC", weight.nbytes), *in_turn]
    first = sizes.index(("ALLOC", source.nbytes))
    assert sizes[first : first + 6] == gradients


def test_benchmark_mode_ends_its_search_with_an_empty_cache(gpu: VirtualGPU) -> None:
    source, weight = torch.randn(32, 64, 64, 64, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
        kept = torch.nn.functional.conv2d(source, weight, padding=1)
        assert torch.cuda.max_memory_allocated() > 2 * torch.cuda.memory_allocated()
        assert torch.cuda.memory_reserved() < torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        again = torch.nn.functional.conv2d(source, weight, padding=1)
    assert torch.cuda.max_memory_allocated() < torch.cuda.memory_allocated() + (1 << 20)
    del kept, again


@pytest.mark.usefixtures("kept_workspaces")
def test_a_workspace_grows_when_the_program_asks_for_more(gpu: VirtualGPU) -> None:
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch sets no workspace sizes")
    matrix = torch.randn(64, 64, device="cuda")
    torch.mm(matrix, matrix)
    assert torch.cuda.memory_allocated() == matrix.nbytes + 8_519_680
    torch.backends.cuda.cublas_workspace_size(32 << 20)
    torch.mm(matrix, matrix)
    assert torch.cuda.memory_allocated() == matrix.nbytes + (32 << 20)
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == matrix.nbytes
