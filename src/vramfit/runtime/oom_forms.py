"""Tells which errors say that memory ran out, and which say that the device's context is dead.

NOTE [Forms]: only what is certain is recognised. Errors are told by their type first, and where one type stands for
many things (`RuntimeError`) by the words that the library's own source gives them, never by "memory" alone: "index out
of memory bounds" or a user's own text is nothing that a smaller batch cures. Each form names where its words come from.
``CUBLAS_STATUS_NOT_INITIALIZED`` and "unable to find an engine" often follow from too little memory, and as often from
something else; they pass untouched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from vramfit.errors import OutOfMemory


class ShortOf(Enum):
    """Who ran out of what.

    Attributes:
        DEVICE: torch's allocator, of the device's memory.
        DRIVER: the CUDA driver or runtime, outside of torch's allocator.
        CUBLAS: cuBLAS, hipBLAS or rocBLAS, for a handle or a workspace.
        CUDNN: cuDNN or MIOpen, for a handle or a workspace.
        MATHS: cuSOLVER, cuSPARSE, cuFFT or AMD's counterparts, for a handle, a plan or a workspace.
        NCCL: NCCL, for its buffers.
        HOST: the host's allocator.
        PRESSURE: the host is about to: a limit of its control group is near.
    """

    DEVICE = "device"
    DRIVER = "driver"
    CUBLAS = "cublas"
    CUDNN = "cudnn"
    MATHS = "maths"
    NCCL = "nccl"
    HOST = "host"
    PRESSURE = "pressure"


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """What an error says of memory.

    Attributes:
        of: who ran out of what.
        message: the first line of the error, without torch's advice.
    """

    of: ShortOf
    message: str


class HostPressureError(MemoryError):
    """The host's memory is nearly used up: raised by vramfit before the kernel ends the process."""


_FORMS: tuple[tuple[ShortOf, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(words))
    for kind, words in (
        # c10/cuda/CUDACachingAllocator.cpp and its counterparts for XPU and HIP; older torch raised a RuntimeError.
        (ShortOf.DEVICE, r"^(CUDA|HIP|XPU) out of memory\. "),
        # aten/src/ATen/mps/MPSAllocator.mm
        (ShortOf.DEVICE, r"^MPS backend out of memory "),
        # cuBLAS's names of its status, given by aten/src/ATen/cuda/Exceptions.cpp
        (ShortOf.CUBLAS, r"CUBLAS_STATUS_ALLOC_FAILED\b"),
        # cuDNN's names: cudnnStatus_t in cudnn_graph.h, of version 8 and of version 9
        (
            ShortOf.CUDNN,
            r"CUDNN_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
            r"|INTERNAL_ERROR_HOST_ALLOCATION_FAILED)\b",
        ),
        # hipBLAS, rocBLAS and MIOpen: hipblasStatus_t, rocblas_status and miopenStatus_t
        (ShortOf.CUBLAS, r"HIPBLAS_STATUS_ALLOC_FAILED\b|\brocblas_status_memory_error\b"),
        (ShortOf.CUDNN, r"\bmiopenStatusAllocFailed\b"),
        # cuSOLVER, cuSPARSE and cuFFT, and AMD's counterparts: ATen/cuda/Exceptions.h, native/cuda/CuFFTUtils.h;
        # cuSPARSE's own words for its status are those of cusparseGetErrorString
        (ShortOf.MATHS, r"\b(CUSOLVER|HIPSOLVER|CUSPARSE|HIPSPARSE)_STATUS_ALLOC_FAILED\b"),
        (ShortOf.MATHS, r"CUDA error: resource allocation failed when calling `cusparse"),
        (ShortOf.MATHS, r"\b(CU|HIP)FFT_ALLOC_FAILED\b"),
        # NCCL's src/include/alloc.h and its last error, passed on by torch/csrc/distributed/c10d/NCCLUtils.hpp
        (ShortOf.NCCL, r"(?s)NCCL .*(Cuda failure (2 )?'out of memory'|Failed to CUDA (host )?(c|m)?alloc)"),
        # c10/cuda/CUDAException.cpp with cudaGetErrorString(cudaErrorMemoryAllocation); CUDA_ERROR_OUT_OF_MEMORY
        (ShortOf.DRIVER, r"^(CUDA|HIP) (driver )?error: (CUDA_ERROR_OUT_OF_MEMORY|out of memory)\b"),
        # c10/core/impl/alloc_cpu.cpp
        (
            ShortOf.HOST,
            r"DefaultCPUAllocator: (can't allocate memory: you tried|not enough memory: you tried) to allocate",
        ),
    )
)

_ADVICE = re.compile(r" (?=If reserved but unallocated memory is large)")
"""What torch's message says after its figures."""

_LIBRARY_ERRORS = (RuntimeError, torch.AcceleratorError)
"""Types that torch gives what its libraries say; errors of a user's own kinds are none."""

_DEAD = re.compile(
    # cudaGetErrorString of errors after which "the process must be terminated and relaunched":
    # docs.nvidia.com/cuda/cuda-runtime-api, group__CUDART__TYPES
    r"CUDA error: (an illegal memory access was encountered|device-side assert triggered|misaligned address"
    r"|unspecified launch failure|an illegal instruction was encountered|invalid program counter"
    r"|the launch timed out and was terminated|uncorrectable ECC error encountered|hardware stack error"
    r"|operation not supported on global/shared address space|Invalid access of peer GPU memory over nvlink)"
)


def recognised(error: BaseException) -> MemoryShortage | None:
    """The shortage that an error tells of; None for every other error.

    What an error was raised from does not count: who caught a shortage and raised something else has dealt with it.
    """
    kind = _kind(error)
    if kind is None:
        return None
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else type(error).__name__
    return MemoryShortage(of=kind, message=_ADVICE.split(message)[0])


def _kind(error: BaseException) -> ShortOf | None:
    if isinstance(error, HostPressureError):
        return ShortOf.PRESSURE
    if isinstance(error, torch.OutOfMemoryError):
        return ShortOf.DEVICE
    if isinstance(error, OutOfMemory):  # a virtual card's, where it stands for torch's
        return ShortOf.DEVICE
    if isinstance(error, MemoryError):
        return ShortOf.HOST
    if not _of_a_library(error):
        return None
    text = str(error)
    return next((kind for kind, words in _FORMS if words.search(text)), None)


def _of_a_library(error: BaseException) -> bool:
    """Whether torch raised it: its errors are plain, where a program's or a framework's are kinds of their own."""
    return type(error) in _LIBRARY_ERRORS or type(error).__module__.partition(".")[0] == "torch"


def context_is_dead(error: BaseException) -> bool:
    """Whether no CUDA call will succeed in this process any more: only a new process helps."""
    return isinstance(error, _LIBRARY_ERRORS) and _DEAD.search(str(error)) is not None


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """An error and all that it was raised from or during, each once."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [other for other in (one.__cause__, one.__context__) if other is not None]
