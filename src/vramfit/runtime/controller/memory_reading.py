"""What a device holds of this process, of its neighbours, and what is left, as a controller of sizes needs it."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from vramfit.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReading:
    """A device's memory at one moment, in bytes.

    Attributes:
        total: of the device.
        free: for anyone.
        allocated: of this process' tensors.
        reserved: by torch in this process, with those.
        neighbours: of other processes; where the driver names no processes, with this one's CUDA context.
    """

    total: int
    free: int
    allocated: int
    reserved: int
    neighbours: int

    @property
    def room(self) -> int:
        """What this process could allocate beside what is alive, were it in one piece."""
        return self.free + self.reserved - self.allocated


class MemorySource(Protocol):
    """Where readings come from: a card, or what stands for one."""

    def now(self) -> MemoryReading:
        """The memory now."""
        ...

    def begin(self) -> None:
        """Follow the peak from here on."""
        ...

    def peak(self) -> int:
        """The most bytes that tensors held since then."""
        ...


class CardMemory:
    """A card's memory as torch and, where nvidia-ml-py is installed, the driver tell it.

    Each step resets torch's own peak statistics of the device (`torch.cuda.reset_peak_memory_stats`).

    Raises:
        UsageError: the device is no card.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise UsageError(
                f"nothing says what is free on the device {device}",
                "Give source=, which tells it, or use a card",
            )
        self._device = device
        self._nvml, self._handle = _nvml_of(device)

    def now(self) -> MemoryReading:
        """The memory now."""
        free, total = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return MemoryReading(
            total=total,
            free=free,
            allocated=torch.cuda.memory_allocated(self._device),
            reserved=reserved,
            neighbours=self._neighbours(total - free - reserved),
        )

    def begin(self) -> None:
        """Follow the peak from here on."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most bytes that tensors held since then."""
        return torch.cuda.max_memory_allocated(self._device)

    def _neighbours(self, otherwise: int) -> int:
        if self._nvml is None:
            return max(0, otherwise)
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return max(0, otherwise)
        known = [one.usedGpuMemory for one in running if one.pid != os.getpid()]
        # In a container, and under Windows' driver, processes or their bytes are hidden.
        return sum(known) if running and all(known) else max(0, otherwise)


def _nvml_of(device: torch.device) -> tuple[Any, Any]:
    """NVML and the card's handle; None where it is not installed or does not know the card."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, None
    try:
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except (nvml.NVMLError, AttributeError):
        return None, None
