"""A driver with one card and two processes, as nvidia-ml-py's module looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vramfit.units import GIB


class NVMLError(Exception):
    pass


class FakeNvml:
    """Functions of pynvml with fixed answers."""

    NVMLError = NVMLError

    def __init__(self, own: int, *, hidden: bool = False, sensors: bool = True) -> None:
        self.own, self.hidden, self.sensors, self.started = own, hidden, sensors, 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card{index}"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=80 * GIB, used=30 * GIB, free=50 * GIB)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        raise NVMLError("not supported")

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        used = None if self.hidden else 10 * GIB
        return [
            SimpleNamespace(pid=self.own, usedGpuMemory=used),
            SimpleNamespace(pid=4_000_000, usedGpuMemory=19 * GIB),
        ]

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return "/usr/bin/other"

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        if not self.sensors:
            raise NVMLError("not supported")
        return 61

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if not self.sensors:
            raise NVMLError("not supported")
        return 312_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlShutdown(self) -> None:
        self.started -= 1
