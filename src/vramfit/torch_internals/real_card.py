"""``torch.cuda`` and the functions of ``torch._C`` behind it: names by what they need of a real card."""

from __future__ import annotations

from typing import Any

from vramfit.torch_internals.names import Feature

NCCL_CALLS = (
    "_nccl_init_rank",
    "_nccl_all_reduce",
    "_nccl_reduce",
    "_nccl_broadcast",
    "_nccl_all_gather",
    "_nccl_reduce_scatter",
)
"""Collectives of one process over several cards (torch/csrc/cuda/python_nccl.cpp)."""

DIRECT_STORAGE = (
    "_gds_register_buffer",
    "_gds_deregister_buffer",
    "_gds_register_handle",
    "_gds_deregister_handle",
    "_gds_load_storage",
    "_gds_save_storage",
)
"""cuFile (torch/csrc/cuda/GdsFile.cpp)."""

POOL_CHECKPOINTS = (
    "_cuda_getCheckpointState",
    "_cuda_setCheckpointPoolState",
    "_cuda_checkPoolLiveAllocations",
)
"""What trees of CUDA graphs (torch/_inductor/cudagraph_trees.py) ask of the real allocator, which has no pool of ours:
asked for one, it reads where nothing is (torch/csrc/cuda/Module.cpp)."""

LIBRARIES_OF_COMPILED_CODE = (
    "_get_cuda_library",
    "_get_gpu_runtime_library",
    "_get_nvrtc_library",
    "_get_gpu_rtc_library",
)
"""How ``torch.cuda._compile_kernel`` loads the driver's library and NVRTC (torch/cuda/_utils.py)."""

GREEN_CONTEXT = "_CUDAGreenContext"

SYMMETRIC_MEMORY = (
    "empty_strided_p2p",
    "rendezvous",
    "get_mempool_allocator",
    "memset32",
    "stream_write_value32",
)
"""Static methods of ``_SymmetricMemory`` that ask the driver (torch/csrc/distributed/c10d/symm_mem)."""

utilities: Any = Feature("refusing compilers of CUDA code").find("torch.cuda._utils")
"""The module that has `LIBRARIES_OF_COMPILED_CODE`."""
