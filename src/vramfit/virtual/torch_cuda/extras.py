"""The rest: the CUDA runtime's functions, NVTX, sensors, copies between devices, TunableOp, the profiler."""

# ruff: noqa: ARG002, ARG005  # the signatures are those of the C functions and classes

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

from vramfit.patching import PatchStack
from vramfit.torch_internals import cuda_device
from vramfit.torch_internals.names import in_signature_of
from vramfit.virtual.machine import InvalidDevice, Machine, VirtualDevice
from vramfit.virtual.torch_cuda.base import CFunctions, invalid_device
from vramfit.virtual.torch_cuda.devices import device_index_of

_ERROR_TEXTS = {0: "no error", 1: "invalid argument", 2: "out of memory", 101: "invalid device ordinal"}
# Plausible readings of a card at work; nothing measures them.
_TEMPERATURE_C = 55
_UTILISATION_PERCENT = 100
_POWER_MW = 250_000


class cudaError(int):  # the name of the C class
    """Stands for ``torch._C._cudart.cudaError``."""

    success: cudaError


cudaError.success = cudaError(0)


def _cudart_module(machine: Machine) -> ModuleType:
    """Stands for ``torch._C._cudart`` (torch/csrc/cuda/shared/cudart.cpp)."""

    def memory_info(device: int) -> tuple[int, int]:
        try:
            return machine.device(device).memory_info()
        except InvalidDevice:
            raise invalid_device() from None

    def done(*_: object) -> cudaError:
        return cudaError.success

    module = ModuleType(cuda_device.runtimes[0].path)
    module.__dict__.update(
        cudaError=cudaError,
        cudaGetErrorString=lambda error: _ERROR_TEXTS.get(int(error), "unrecognized error code"),
        cudaMemGetInfo=memory_info,
        cudaProfilerStart=done,
        cudaProfilerStop=done,
        cudaHostRegister=done,
        cudaHostUnregister=done,
        cudaStreamCreate=done,
        cudaStreamDestroy=done,
    )
    return module


class Nvtx:
    """Stands for ``torch._C._nvtx`` (torch/csrc/cuda/shared/nvtx.cpp); passes ranges and marks on to the machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._depth = 0
        self._ids = itertools.count(1)

    def _tell(self, what: str, name: str = "") -> None:
        if self._machine.hooks.on_nvtx is not None:
            self._machine.hooks.on_nvtx(what, name)

    def rangePushA(self, message: str) -> int:
        """Begin a nested range; gives its depth."""
        self._tell("push", message)
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        """End the innermost range; gives its depth, -2 if there is none (NVTX_NO_PUSH_POP_TRACKING)."""
        if self._depth == 0:
            return -2
        self._tell("pop")
        self._depth -= 1
        return self._depth

    def rangeStartA(self, message: str) -> int:
        """Begin a range that may overlap others; gives its id."""
        self._tell("start", message)
        return next(self._ids)

    def rangeEnd(self, range_id: int) -> None:
        """End the range of an id."""
        self._tell("end")

    def markA(self, message: str) -> None:
        """Mark a moment."""
        self._tell("mark", message)

    def deviceRangeStart(self, message: str, stream: int = 0) -> object:
        """Begin a range on a stream; gives its handle."""
        return self.rangeStartA(message)

    def deviceRangeEnd(self, handle: object, stream: int = 0) -> None:
        """End a range on a stream."""
        self._tell("end")


def _split(tensor: torch.Tensor, sizes: list[int], dim: int) -> tuple[torch.Tensor, ...]:
    return cast(tuple[torch.Tensor, ...], tensor.split(sizes, dim))


class CommFunctions(CFunctions):
    """Copies between devices (torch/csrc/cuda/comm.cpp), made of ordinary ops."""

    def _broadcast(self, tensor: torch.Tensor, devices: Sequence[Any]) -> list[torch.Tensor]:
        return [tensor.to(torch.device("cuda", device_index_of(self.machine, d))) for d in devices]

    def _broadcast_out(self, tensor: torch.Tensor, out: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [destination.copy_(tensor) for destination in out]

    def _broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[Any], buffer_size: int = 0
    ) -> list[list[torch.Tensor]]:
        copies = [self._broadcast(tensor, devices) for tensor in tensors]
        return [[copy[number] for copy in copies] for number in range(len(devices))]

    def _scatter(
        self,
        tensor: torch.Tensor,
        devices: Sequence[Any],
        chunk_sizes: Sequence[int] | None = None,
        dim: int = 0,
        streams: object = None,
    ) -> list[torch.Tensor]:
        if chunk_sizes is None:
            chunks = tensor.chunk(len(devices), dim)
        else:
            chunks = _split(tensor, list(chunk_sizes), dim)
        indices = [device_index_of(self.machine, device) for device in devices]
        return [chunk.to(torch.device("cuda", index)) for chunk, index in zip(chunks, indices, strict=False)]

    def _scatter_out(
        self, tensor: torch.Tensor, out: Sequence[torch.Tensor], dim: int = 0, streams: object = None
    ) -> list[torch.Tensor]:
        chunks = _split(tensor, [destination.size(dim) for destination in out], dim)
        return [destination.copy_(chunk) for destination, chunk in zip(out, chunks, strict=True)]

    def _gather(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, destination: int | None = None
    ) -> torch.Tensor:
        if destination == -1:
            where = torch.device("cpu")
        else:
            where = torch.device("cuda", device_index_of(self.machine, destination))
        return torch.cat([tensor.to(where) for tensor in tensors], dim)

    def _gather_out(self, tensors: Sequence[torch.Tensor], out: torch.Tensor, dim: int = 0) -> torch.Tensor:
        parts = _split(out, [tensor.size(dim) for tensor in tensors], dim)
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor)
        return out


class TunableFunctions(CFunctions):
    """Switches of TunableOp: kept, never acted on, since no kernel runs that could be tuned."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.state: dict[str, Any] = {
            "enable": False,
            "tuning_enable": True,
            "record_untuned": False,
            "max_tuning_duration": 30,
            "max_tuning_iterations": 100,
            "rotating_buffer_size": -1,
            "filename": "tunableop_results.csv",
            "cublaslt_requested_algo_count": 8,  # TunableOp's own default (since 2.14)
            "wildcard_fallback": False,
        }

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their name in ``torch._C``."""
        table: dict[str, Callable[..., Any]] = {
            "_cuda_record_untuned_enable": self._setter("record_untuned"),
            "_cuda_record_untuned_is_enabled": self._getter("record_untuned"),
            "_cuda_tunableop_enable": self._setter("enable"),
            "_cuda_tunableop_is_enabled": self._getter("enable"),
            "_cuda_tunableop_tuning_enable": self._setter("tuning_enable"),
            "_cuda_tunableop_tuning_is_enabled": self._getter("tuning_enable"),
            "_cuda_tunableop_wildcard_fallback_enable": self._setter("wildcard_fallback"),
            "_cuda_tunableop_wildcard_fallback_is_enabled": self._getter("wildcard_fallback"),
            "_cuda_tunableop_push_dynamic_dims_mask": lambda mask: None,
            "_cuda_tunableop_pop_dynamic_dims_mask": lambda handle: None,
            "_cuda_tunableop_clear_all": lambda: None,
            "_cuda_tunableop_get_results": lambda: (),
            "_cuda_tunableop_get_validators": lambda: (),
            "_cuda_tunableop_read_file": lambda filename=None: False,
            "_cuda_tunableop_set_numerical_check_tolerances": lambda enable, atol=1e-5, rtol=1e-5: None,
        }
        for name in (
            "max_tuning_duration",
            "max_tuning_iterations",
            "rotating_buffer_size",
            "filename",
            "cublaslt_requested_algo_count",
        ):
            table[f"_cuda_tunableop_set_{name}"] = self._setter(name)
            table[f"_cuda_tunableop_get_{name}"] = self._getter(name)
        return table

    def _setter(self, name: str) -> Callable[..., None]:
        def set_value(value: Any, *_: object) -> None:
            self.state[name] = value

        return set_value

    def _getter(self, name: str) -> Callable[[], Any]:
        return lambda: self.state[name]


def patch_extras(machine: Machine, patches: PatchStack) -> None:
    """Replace the runtime's functions, NVTX, the sensors, which torch asks of NVML, and parts of the profiler."""
    runtime = _cudart_module(machine)
    for place in cuda_device.runtimes:
        place.supply(patches, runtime)
    nvtx = Nvtx(machine)
    for place in cuda_device.nvtx:
        place.supply(patches, nvtx)
    # Reductions between devices take torch's own path; a CPU build would also warn that it lacks NCCL.
    patches.set(torch.cuda.nccl, "is_available", lambda *args, **kwargs: False)
    _patch_sensors(machine, patches)
    _patch_profiler(machine, patches)


def _patch_sensors(machine: Machine, patches: PatchStack) -> None:
    def of(device: Any) -> VirtualDevice:
        return machine.devices[device_index_of(machine, device)]

    def held(device: VirtualDevice) -> int:
        free, total = device.memory_info()
        return total - free

    def processes(device: Any = None) -> str:
        card = of(device)
        megabytes = held(card) / (1 << 20)
        return f"GPU:{card.index}\nprocess {os.getpid():>10d} uses {megabytes:>12.3f} MB GPU memory"

    # Each of these asks NVML about the machine we run on, in torch/cuda/__init__.py and memory.py.
    answers: dict[str, Callable[..., Any]] = {
        "device_memory_used": lambda device=None: held(of(device)),
        "memory_usage": lambda device=None: _UTILISATION_PERCENT,
        "utilization": lambda device=None: _UTILISATION_PERCENT,
        "temperature": lambda device=None: _TEMPERATURE_C,
        "power_draw": lambda device=None: _POWER_MW,
        "clock_rate": lambda device=None: round(of(device).spec.boost_clock / 1e6),
        "list_gpu_processes": processes,
    }
    for name, answer in answers.items():
        original = getattr(torch.cuda, name, None)
        if original is not None:
            answers[name] = in_signature_of(cuda_device.SENSORS, original, answer)
            patches.set(torch.cuda, name, answers[name])
    patches.set(torch.cuda.memory, "list_gpu_processes", answers["list_gpu_processes"])


def _patch_profiler(machine: Machine, patches: PatchStack) -> None:
    """Let ``torch.profiler`` record the CPU side: there are no kernels whose times it could take.

    Asked for those, a CUDA library that is not there would have it write a stack per op to stderr. On a CUDA build
    Kineto counts the machine's real cards all the same, for the head of its trace, when any profile ends
    (libkineto/src/DeviceProperties.cpp): it takes nothing of them.
    """
    module: Any = profiler
    supported = cuda_device.profiler_activities.get()

    def supported_activities() -> set[ProfilerActivity]:
        machine.warn("profiler-without-kernels", "torch.profiler records no kernels on the virtual GPU")
        return {*supported(), ProfilerActivity.CUDA}

    # With this, torch.profiler asks Kineto for CUDA activities, of which there are none: it does not hear of them ...
    cuda_device.profiler_activities.replace(patches, supported_activities)
    for name in _WITH_ACTIVITIES:
        if hasattr(module, name):
            patches.set(module, name, _for_the_host(getattr(module, name)))
    # ... and where Kineto is not wanted, it does not record CUDA events around each op instead.
    states = dict(module.ProfilerState.__members__)
    states["KINETO_GPU_FALLBACK"] = states["KINETO"]
    patches.set(module, "ProfilerState", SimpleNamespace(**states))
    # emit_nvtx enables a C++ observer that a CPU build lacks.
    patches.set(module.emit_nvtx, "__enter__", lambda self: self)
    patches.set(module.emit_nvtx, "__exit__", lambda *_: False)


_WITH_ACTIVITIES = ("_prepare_profiler", "_enable_profiler", "_toggle_collection_dynamic")
"""Functions of ``torch.autograd.profiler`` whose second argument is what Kineto shall record."""


def _for_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def record(first: Any, activities: Iterable[ProfilerActivity], *rest: Any, **named: Any) -> Any:
        return function(first, set(activities) - {ProfilerActivity.CUDA}, *rest, **named)

    return record
