"""``torch.backends``: what a CPU build refuses to answer about cuDNN, cuBLAS, cuFFT and cuSOLVER."""

# ruff: noqa: ARG002  # the signatures are those of the C functions

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals import cuda_device
from vramfit.torch_internals.kernel_choice import BlasBackend, LinalgBackend, keep_preferred_libraries
from vramfit.virtual.kernels import Blas, KernelContext, workspace_bytes
from vramfit.virtual.machine import Machine
from vramfit.virtual.torch_cuda.base import C, CFunctions
from vramfit.virtual.torch_cuda.properties import TorchRelease, needs_older_build, release_for

_CUFFT_PLANS = 4096  # aten/src/ATen/native/cuda/CuFFTPlanCache.h, CUFFT_DEFAULT_CACHE_SIZE


class BackendFunctions(CFunctions):
    """State of the libraries that a program may read and set."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.benchmark_limit = 10  # ATen/Context.h: benchmark_limit_cudnn

    def _cuda_get_cudnn_benchmark_limit(self) -> int:
        return self.benchmark_limit

    def _cuda_set_cudnn_benchmark_limit(self, limit: int) -> None:
        self.benchmark_limit = limit

    def _cuda_get_conv_benchmark_empty_cache(self) -> bool:
        return self.machine.conv_benchmark_empties_cache

    def _cudnn_set_conv_benchmark_empty_cache(self, enable: bool) -> None:
        self.machine.conv_benchmark_empties_cache = enable

    def _get_cudnn_batch_norm_reserve_space_size(self, source: torch.Tensor, training: bool) -> int:
        # Asked where a graph is traced: nothing, as torch's meta kernel of cudnn_batch_norm has it.
        return 0

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their name in ``torch._C``."""
        table, chosen = super().functions(), self.machine.cublas_workspace_bytes
        for name, blas in (("Cublas", Blas.CUBLAS), ("CublasLt", Blas.CUBLASLT)):
            table[f"_cuda_get{name}WorkspaceSize"] = partial(self.workspace_bytes, blas)
            table[f"_cuda_set{name}WorkspaceSize"] = partial(chosen.__setitem__, blas.value)
            table[f"_cuda_reset{name}WorkspaceSize"] = partial(chosen.pop, blas.value, None)
        return table

    def workspace_bytes(self, blas: Blas) -> int:
        """What the program chose, else what the library takes on this card."""
        chosen = self.machine.cublas_workspace_bytes.get(blas.value)
        if chosen is not None:
            return chosen
        spec = self.device().spec
        context = KernelContext(
            spec=spec,
            capability=spec.compute_capability,
            torch_version=self.machine.torch_version,
            environ=os.environ,
        )
        return workspace_bytes(blas, context)


class CpuBuildFunctions(CFunctions):
    """Preferences that a CPU build refuses to set, or lacks."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.linalg = LinalgBackend.Default if LinalgBackend else None
        # ATen/Context.h, blas_preferred_backend
        preferred = os.environ.get("TORCH_BLAS_PREFER_CUBLASLT") == "1"
        self.blas = None
        if BlasBackend:
            self.blas = BlasBackend.Cublaslt if preferred else BlasBackend.Cublas

    def _get_linalg_preferred_backend(self) -> Any:
        return self.linalg

    def _set_linalg_preferred_backend(self, backend: Any) -> None:
        self.linalg = backend

    def _get_blas_preferred_backend(self) -> Any:
        return self.blas

    def _set_blas_preferred_backend(self, backend: Any) -> None:
        self.blas = backend

    def _get_blas_default_backend(self) -> Any:
        return BlasBackend.Cublas

    def _is_flash_attention_available(self) -> bool:
        return True

    def _nccl_version(self) -> int:
        major, minor, patch = _release(self.machine).nccl
        return major << 32 | minor << 16 | patch

    def _nccl_version_suffix(self) -> bytes:
        return b""


def _release(machine: Machine) -> TorchRelease:
    return release_for(machine.torch_version, [spec.compute_capability for spec in machine.specs])


class RNNMode(enum.IntEnum):
    """Stands for ``torch._C._cudnn.RNNMode`` (cudnn.h, cudnnRNNMode_t)."""

    rnn_relu = 0
    rnn_tanh = 1
    lstm = 2
    gru = 3


def _cudnn_module(version: int) -> ModuleType:
    """Stands for ``torch._C._cudnn`` (torch/csrc/cuda/shared/cudnn.cpp)."""
    triple = (version // 10000, version % 10000 // 100, version % 100)
    module = ModuleType(cuda_device.cudnn_module.path)
    module.__dict__.update(
        is_cuda=True,
        RNNMode=RNNMode,
        getVersionInt=lambda: version,
        getRuntimeVersion=lambda: triple,
        getCompileVersion=lambda: triple,
    )
    return module


def patch_backends(functions: BackendFunctions, patches: PatchStack) -> None:
    """Make ``torch.backends.cudnn`` and ``.cuda`` answer on a build without the libraries."""
    _patch_plan_cache(patches)
    machine = functions.machine
    if not cuda_device.has_cuda:
        for name, function in CpuBuildFunctions(machine).functions().items():
            patches.supply(C, name, function)
        _patch_cudnn(functions, patches)
        return
    keep_preferred_libraries(patches)
    # On a CUDA build its own cuDNN answers; torch remembers its version once it has read it.
    front: Any = torch.backends.cudnn
    patches.keep(front.m, cuda_device.CUDNN_VERSION)
    if needs_older_build(spec.compute_capability for spec in machine.specs):
        _patch_cudnn(functions, patches)


def _patch_cudnn(functions: BackendFunctions, patches: PatchStack) -> None:
    machine = functions.machine
    version = _release(machine).cudnn
    library = _cudnn_module(version)
    front = cuda_device.stand_in_for_cudnn(patches, library, version)
    # Read at import time: without cuDNN the class has None there.
    limit = torch.backends.ContextProp(
        functions._cuda_get_cudnn_benchmark_limit, functions._cuda_set_cudnn_benchmark_limit
    )
    patches.set(type(front), "benchmark_limit", limit)


class _PlanCacheFigure:
    """A figure of a device's cuFFT plan cache: held here, since no plan is ever made."""

    def __init__(self, name: str, default: int, *, settable: bool) -> None:
        self._name = f"_virtual_{name}"
        self._default = default
        self._settable = settable

    def __get__(self, obj: Any, owner: type) -> int:
        return int(obj.__dict__.get(self._name, self._default))

    def __set__(self, obj: Any, value: int) -> None:
        if not self._settable:
            raise RuntimeError(".size is a read-only property showing the number of plans in the cache")
        obj.__dict__[self._name] = value


def _clear_plan_cache(cache: object) -> None:
    """Nothing to clear: no plan is ever made."""


def _patch_plan_cache(patches: PatchStack) -> None:
    cache = torch.backends.cuda.cuFFTPlanCache
    # Both were bound at import time to C++ functions that ask the CUDA library.
    patches.set(cache, "size", _PlanCacheFigure("size", 0, settable=False))
    patches.set(cache, "max_size", _PlanCacheFigure("max_size", _CUFFT_PLANS, settable=True))
    patches.set(cache, "clear", _clear_plan_cache)
    manager: Any = torch.backends.cuda.cufft_plan_cache
    patches.set(torch.backends.cuda, "cufft_plan_cache", type(manager)())
