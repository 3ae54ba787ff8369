"""``torch.cuda`` below its public functions: initialisation, counting of cards, libraries, and C functions."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.names import Feature

FEATURE = Feature("showing programs torch.cuda as on a card")
SENSORS = Feature("answering what torch asks NVML")
_LIBRARIES = Feature("torch.backends as on a card")

C: Any = torch._C
"""The module of torch's C++ functions, where the facade puts its own."""

has_cuda: bool = C._has_cuda
"""Whether this torch was built with CUDA, read before anything is replaced."""

# -- what is kept in Python about devices (torch/cuda/__init__.py) --------------------------------------------

initialized = FEATURE.place("torch.cuda._initialized")
queued_calls = FEATURE.place("torch.cuda._queued_calls")
lazy_seed_tracker = FEATURE.place("torch.cuda._lazy_seed_tracker")
get_device_properties = FEATURE.place("torch.cuda._get_device_properties")
in_bad_fork = FEATURE.place("torch.cuda._is_in_bad_fork")
exchange_device = FEATURE.place("torch.cuda._exchange_device")
maybe_exchange_device = FEATURE.place("torch.cuda._maybe_exchange_device")
cached_device_count = FEATURE.place("torch.cuda._cached_device_count")
lazy_initialization = FEATURE.place("torch.cuda._lazy_init")
fork_rng_warned = FEATURE.place("torch.random._fork_rng_warned_already")
gpu_context = FEATURE.place("torch._subclasses.fake_tensor.init_gpu_context")
"""Wakes up a real card before fake tensors are made (torch/_subclasses/fake_tensor.py)."""

device_count_by_nvml = SENSORS.place("torch.cuda._device_count_nvml")
raw_device_count_by_nvml = SENSORS.place("torch.cuda._raw_device_count_nvml")
raw_uuids_by_nvml = SENSORS.place("torch.cuda._raw_device_uuid_nvml")

properties_classes = (
    FEATURE.place("torch._C._CudaDeviceProperties"),
    FEATURE.place("torch.cuda._CudaDeviceProperties"),
)
"""A C class without a constructor (CUDA build) or a dummy (CPU build)."""

built_with_cuda = FEATURE.place("torch._C._has_cuda")
built_with_magma = FEATURE.place("torch._C._has_magma")
stream_base = FEATURE.place("torch._C._CudaStreamBase")
event_base = FEATURE.place("torch._C._CudaEventBase")
graph_base = FEATURE.place("torch._C._CUDAGraph")
pool_base = FEATURE.place("torch._C._MemPool")

# -- libraries ---------------------------------------------------------------------------------------------------

runtimes = (FEATURE.place("torch._C._cudart"), FEATURE.place("torch.cuda._cudart"))
nvtx = (_LIBRARIES.place("torch._C._nvtx"), _LIBRARIES.place("torch.cuda.nvtx._nvtx"))
profiler_activities = _LIBRARIES.place("torch.autograd.profiler._supported_activities")
built_with_cudnn = _LIBRARIES.place("torch._C._has_cudnn")
cudnn_module = _LIBRARIES.place("torch._C._cudnn")
AcceleratorError: Any = FEATURE.find("torch._C.AcceleratorError")

CUDNN_VERSION = "__cudnn_version"
"""Where torch/backends/cudnn/__init__.py remembers cuDNN's version once it has read it."""


def initialize() -> None:
    """What ``torch.cuda`` does at a first use; raises where there is no card."""
    torch.cuda._lazy_init()


def call_when_initialized(function: Any) -> None:
    """Call a function as soon as CUDA is initialised, now if it is."""
    torch.cuda._lazy_call(function)


def queued_before_first_use() -> list[Any]:
    """What torch itself has queued for the first use of CUDA.

    The Triton kernels of sparse matrices are left out: once registered, they cannot be taken back.
    """
    return [call for call in queued_calls.get() if call[0].__name__ != "_register_triton_kernels"]


def seed_tracker() -> Any:
    """A new keeper of seeds that are set before the first use of CUDA."""
    return type(lazy_seed_tracker.get())()


def cached_answers() -> list[Any]:
    """Functions that forget what torch remembers of the devices; some releases remember more than others."""
    caches = (
        FEATURE.find("torch.cuda._check_bf16_tensor_supported"),
        torch.get_device_module,
        getattr(torch.accelerator, "get_device_capability", None),
    )
    return [cache.cache_clear for cache in caches if cache and hasattr(cache, "cache_clear")]


def nvtx_module() -> Any:
    """The NVTX functions in C++, or what stands there without them; None where there is neither."""
    return getattr(torch.cuda.nvtx, "_nvtx", None)


def has_nvtx() -> bool:
    """Whether ``torch.cuda.nvtx`` calls the library rather than a stand-in that raises."""
    return type(nvtx_module()).__name__ not in ("_NVTXStub", "NoneType")


def preferred_blas_backend() -> Any:
    """Which library multiplies matrices; on a CPU build the facade answers."""
    ask = getattr(C, "_get_blas_preferred_backend", None)
    return None if ask is None else ask()


def default_device_context() -> Any:
    """The mode of ``torch.set_default_device``; None without one (torch/__init__.py)."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def stand_in_for_cudnn(patches: PatchStack, module: Any, version: int) -> Any:
    """Put a module in the place of torch's cuDNN, of which ``torch.backends.cudnn`` and its ``rnn`` read.

    Returns:
        the object that stands for ``torch.backends.cudnn``.
    """
    # torch.backends.cudnn and its rnn replace themselves by objects; the module of functions is behind `m`.
    front: Any = torch.backends.cudnn
    built_with_cudnn.supply(patches, True)
    cudnn_module.supply(patches, module)
    patches.set(front.m, "_cudnn", module)
    patches.set(front.m, "_init", lambda: True)
    patches.set(front.m, CUDNN_VERSION, version)
    recurrent: Any = importlib.import_module(
        "torch.backends.cudnn.rnn"
    )  # until then `front.rnn` is a setting on 2.10
    patches.set(getattr(recurrent, "m", recurrent), "_cudnn", module)
    return front
