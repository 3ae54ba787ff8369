"""``torch.accelerator``: the device-neutral questions, whose answer is ``cuda`` here."""

# ruff: noqa: ARG002  # the signatures are those of the C functions and classes

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.virtual.machine import Machine
from vramfit.virtual.torch_cuda.base import CFunctions
from vramfit.virtual.torch_cuda.devices import DeviceFunctions
from vramfit.virtual.torch_cuda.memory import MemoryFunctions
from vramfit.virtual.torch_cuda.streams import VirtualStream


class AcceleratorFunctions(CFunctions):
    """The functions of torch/csrc/DeviceAccelerator.cpp, answered by those of ``torch.cuda``."""

    def __init__(self, machine: Machine, devices: DeviceFunctions, memory: MemoryFunctions) -> None:
        super().__init__(machine)
        self.devices = devices
        self.memory = memory

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their name in ``torch._C``; some are those of ``torch.cuda`` themselves."""
        return super().functions() | {
            "_accelerator_getDeviceIndex": self.devices._cuda_getDevice,
            "_accelerator_setDeviceIndex": self.devices._cuda_setDevice,
            "_accelerator_exchangeDevice": self.devices._cuda_exchangeDevice,
            "_accelerator_maybeExchangeDevice": self.devices._cuda_maybeExchangeDevice,
            "_accelerator_hooks_device_count": self.devices._cuda_getDeviceCount,
            "_accelerator_hooks_get_current_device": self.devices._cuda_getDevice,
            "_accelerator_hooks_set_current_device": self.devices._cuda_setDevice,
            "_accelerator_hooks_exchange_device": self.devices._cuda_exchangeDevice,
            "_accelerator_hooks_maybe_exchange_device": self.devices._cuda_maybeExchangeDevice,
            "_accelerator_emptyCache": self.memory._cuda_emptyCache,
            "_accelerator_emptyHostCache": self.memory._host_emptyCache,
            "_accelerator_getDeviceStats": self.memory._cuda_memoryStats,
            "_accelerator_resetAccumulatedStats": self.memory._cuda_resetAccumulatedMemoryStats,
            "_accelerator_resetPeakStats": self.memory._cuda_resetPeakMemoryStats,
        }

    def _accelerator_getAccelerator(self) -> torch.device:
        return torch.device("cuda")

    def _get_accelerator(self, check: bool | None = None) -> torch.device:
        return torch.device("cuda")

    def _accelerator_getDeviceCapability(self, device: int) -> dict[str, Any]:
        self.device(device)
        # Every dtype has kernels on every card; what the hardware does fast is another question.
        return {"supported_dtypes": {v for v in vars(torch).values() if isinstance(v, torch.dtype)}}

    def _accelerator_getStream(self, device: int) -> VirtualStream:
        index = self.device(device).index
        return VirtualStream(stream_id=self.machine.current_stream(index), device_index=index)

    def _accelerator_setStream(self, stream: Any) -> None:
        self.machine.current_device = self.device(stream.device_index).index
        self.machine.set_stream(stream.stream_id, stream.device_index)

    def _accelerator_synchronizeDevice(self, device: int) -> None:
        self.machine.synchronize(self.device(device).index)

    def _accelerator_isAllocatorInitialized(self) -> bool:
        return self.machine.init_pid is not None

    def _accelerator_getMemoryInfo(self, device: int) -> tuple[int, int]:
        return self.device(device).memory_info()
