"""What workloads hold on the virtual GPU, for the tests of techniques."""

from __future__ import annotations

import gc

import torch

from vramfit.workload import Workload, to_device

LOSS_BLOCK_BYTES = 512  # of a scalar


def peak_bytes(workload: Workload, *, steps: int = 2) -> int:
    """Most bytes that tensors hold in the last of some steps; call it while a virtual GPU is there."""
    state = workload.start("cuda")
    for _ in range(steps):
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        workload.run_step(state, workload.sizes)
    peak = torch.cuda.max_memory_allocated()
    del state
    gc.collect()
    return peak


def kept_bytes(workload: Workload) -> int:
    """Bytes that are held between the forward and the backward pass of a second step, beyond those held before it."""
    assert workload.loss is not None
    state = workload.start("cuda")
    workload.run_step(state, workload.sizes)
    gc.collect()
    batch = to_device(workload.batch(**workload.sizes), state.device)
    before = torch.cuda.memory_allocated()
    loss = workload.loss(state.model, batch)
    gc.collect()
    kept = torch.cuda.memory_allocated() - before - LOSS_BLOCK_BYTES
    del loss
    return kept
