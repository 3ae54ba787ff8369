"""Real messages of every form of running out, each with where it was reported, and look-alikes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vramfit.runtime.oom_forms import HostPressureError, ShortOf, context_is_dead, recognised

pytestmark = pytest.mark.torch_versions

_LATER = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)

REAL = [
    # github.com/NVIDIA/nccl/issues/1284 and docs/explain.md: the class says it, whatever the words
    (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate more than 1EB memory", ShortOf.DEVICE),
    (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB of which 9.38 MiB "
        "is free.",
        ShortOf.DEVICE,
    ),
    # torch before 1.13 raised it as a RuntimeError: github.com/pytorch/pytorch/issues/16417
    (
        RuntimeError,
        "CUDA out of memory. Tried to allocate 196.00 MiB (GPU 0; 2.00 GiB total capacity; 359.38 MiB already "
        "allocated; 192.29 MiB free; 152.37 MiB cached)",
        ShortOf.DEVICE,
    ),
    # github.com/deepbeepmeep/Wan2GP/issues/1083, github.com/taohan10200/IIM/issues/28
    (torch.AcceleratorError, f"CUDA error: out of memory{_LATER}", ShortOf.DRIVER),
    (RuntimeError, f"CUDA error: out of memory{_LATER}.", ShortOf.DRIVER),
    # github.com/QwenLM/Qwen3/issues/873, github.com/layumi/Person_reID_baseline_pytorch/issues/286
    (
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ShortOf.CUBLAS,
    ),
    # aten/src/ATen/cuda/CUDABlas.cpp: a workspace of cuBLASLt
    (
        RuntimeError,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasLtMatmul( ltHandle, computeDesc.descriptor(), "
        "&alpha_val, mat1_ptr, Adesc.descriptor(), mat2_ptr)`",
        ShortOf.CUBLAS,
    ),
    # github.com/pytorch/pytorch/issues/20123, and cuDNN 9's name of it
    (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", ShortOf.CUDNN),
    (
        RuntimeError,
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        ShortOf.CUDNN,
    ),
    # github.com/NVIDIA/TensorRT-LLM/issues/1670 and github.com/NVIDIA/nccl/issues/1235 have NCCL's own words
    (
        torch.distributed.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.20.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'",
        ShortOf.NCCL,
    ),
    (
        torch.distributed.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, unhandled cuda error, NCCL version "
        "2.19.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc 6291456 "
        "bytes",
        ShortOf.NCCL,
    ),
    # github.com/JingyunLiang/VRT/issues/49, github.com/MaximeVandegar/Papers-in-100-Lines-of-Code/issues/10
    (
        RuntimeError,
        "[enforce fail at alloc_cpu.cpp:73] . DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "116813856768 bytes. Error code 12 (Cannot allocate memory)",
        ShortOf.HOST,
    ),
    (
        RuntimeError,
        "[enforce fail at C:\\work\\c10\\core\\impl\\alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: "
        "you tried to allocate 1981808640 bytes.",
        ShortOf.HOST,
    ),
    (MemoryError, "", ShortOf.HOST),
    # github.com/pytorch/pytorch/issues/77764
    (
        RuntimeError,
        "MPS backend out of memory (MPS allocated: 6.81 GB, other allocations: 8.94 GB, max allowed: 18.13 GB)",
        ShortOf.DEVICE,
    ),
    # rocBLAS', hipBLAS' and MIOpen's names of their status: rocblas-types.h, hipblas.h, miopen.h
    (
        RuntimeError,
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        ShortOf.CUBLAS,
    ),
    (RuntimeError, "CUDA error: rocblas_status_memory_error when calling `rocblas_sgemm`", ShortOf.CUBLAS),
    (RuntimeError, "MIOpen error: miopenStatusAllocFailed", ShortOf.CUDNN),
    # aten/src/ATen/cuda/Exceptions.h and aten/src/ATen/native/cuda/CuFFTUtils.h
    (
        RuntimeError,
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        ShortOf.MATHS,
    ),
    (
        RuntimeError,
        "CUDA error: resource allocation failed when calling `cusparseCreate(handle)`",
        ShortOf.MATHS,
    ),
    (RuntimeError, "cuFFT error: CUFFT_ALLOC_FAILED", ShortOf.MATHS),
    (RuntimeError, "cuFFT error: HIPFFT_ALLOC_FAILED", ShortOf.MATHS),
    (HostPressureError, "memory.high of the control group is near", ShortOf.PRESSURE),
]


class MyServiceError(RuntimeError):
    """A program's own error that passes words on."""


LOOK_ALIKES = [
    RuntimeError("index out of memory bounds"),
    RuntimeError("the cache is out of memory. Please buy more"),
    MyServiceError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ValueError("CUDA error: out of memory"),
    RuntimeError("CUDA error: too many resources requested for launch"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
                 "non-contiguous input."),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Expected to allocate memory format channels_last, got contiguous"),
    torch.distributed.DistBackendError("NCCL error in: NCCLUtils.hpp:275, Cuda failure 1 'invalid argument'"),
    OSError(28, "No space left on device"),
    KeyError("exp_avg_sq"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "expected"), REAL)
def test_real_messages_are_recognised(kind: type[BaseException], message: str, expected: ShortOf) -> None:
    found = recognised(kind(message))
    assert found is not None
    assert found.of is expected
    assert "\n" not in found.message


def test_what_this_machine_itself_says_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert recognised(caught.value).of is ShortOf.HOST  # type: ignore[union-attr]
    with pytest.raises(MemoryError) as missing:
        np.empty(1 << 55, dtype=np.uint8)
    assert recognised(missing.value).of is ShortOf.HOST  # type: ignore[union-attr]


@pytest.mark.parametrize("error", LOOK_ALIKES, ids=lambda error: f"{type(error).__name__}: {error}"[:60])
def test_look_alikes_pass(error: BaseException) -> None:
    assert recognised(error) is None


def test_a_shortage_that_was_dealt_with_does_not_count() -> None:
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        except torch.OutOfMemoryError as first:
            raise ValueError("no such layer") from first
    except ValueError as error:
        assert recognised(error) is None


@pytest.mark.parametrize(
    ("message", "dead"),
    [
        (f"CUDA error: an illegal memory access was encountered{_LATER}", True),
        (f"CUDA error: device-side assert triggered{_LATER}", True),
        ("CUDA error: uncorrectable ECC error encountered", True),
        ("CUDA error: out of memory", False),
        ("CUDA error: invalid argument", False),
    ],
)
def test_a_dead_context_is_told_apart(message: str, dead: bool) -> None:
    assert context_is_dead(torch.AcceleratorError(message)) is dead
