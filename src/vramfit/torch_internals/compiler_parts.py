"""Modules of the compiler by name, for those who must not load it: loading takes seconds."""

from __future__ import annotations

from vramfit.torch_internals.names import Feature

DYNAMO = "torch._dynamo"

FAKE_TENSORS = "torch._subclasses.fake_tensor"

GRAPH_TREES = "torch._inductor.cudagraph_trees"

KERNEL_HELPERS = ("torch._inductor.runtime", "torch._inductor.async_compile")
"""What a program that Inductor wrote imports to build and run its kernels."""

allocator_state = Feature("CUDA graphs of compiled programs").place(
    "torch._C._cuda_CUDAAllocator_AllocatorState"
)
"""A class that `GRAPH_TREES` imports; a CPU build has none."""
