"""Asks the driver through NVML, in words of nvidia-ml-py. No torch.

What a driver, a card or a virtual machine does not support is left unknown rather than failing the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vramfit.doctor.facts import Card, MigInstance, NvidiaDriver, Process, Tool

_COMPUTE_MODES = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
"""nvml.h: nvmlComputeMode_t; 1 is the withdrawn mode of exclusive threads."""


def query_nvml(nvml: Any) -> NvidiaDriver:
    """Everything about the driver and its cards.

    Args:
        nvml: the module ``pynvml`` of nvidia-ml-py.

    Raises:
        pynvml.NVMLError: there is no driver, or it does not answer.
    """
    nvml.nvmlInit()
    try:
        cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        return NvidiaDriver(
            tool=Tool.NVML,
            version=_text(nvml.nvmlSystemGetDriverVersion()),
            cuda_version=None if cuda is None else (cuda // 1000, cuda % 1000 // 10),
            cards=tuple(_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())),
        )
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Card:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _memory(nvml, handle)
    pci = _ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    ecc = _ask(nvml, nvml.nvmlDeviceGetEccMode, handle) or (None, None)
    persistence = _ask(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return Card(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(_ask(nvml, nvml.nvmlDeviceGetUUID, handle) or ""),
        pci_bus_id="" if pci is None else _text(pci.busId),
        **memory,
        capability=None if capability is None else (int(capability[0]), int(capability[1])),
        mig_enabled=None if mode is None else bool(mode[0]),
        mig=_slices(nvml, handle) if mode is not None and mode[0] else (),
        ecc=_boolean(ecc[0]),
        ecc_pending=_boolean(ecc[1]),
        persistence=_boolean(persistence),
        compute_mode=_COMPUTE_MODES.get(_ask(nvml, nvml.nvmlDeviceGetComputeMode, handle)),
        processes=_processes(nvml, handle),
    )


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """Figures of the second version, which tells the driver's own part apart; of the first on older drivers."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        found = _ask(nvml, lambda device: nvml.nvmlDeviceGetMemoryInfo(device, version=version), handle)
        if found is not None:
            return {
                "total_bytes": int(found.total),
                "reserved_bytes": int(found.reserved),
                "used_bytes": int(found.used),
                "free_bytes": int(found.free),
            }
    found = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if found is None:  # unified memory (DGX Spark, Jetson): the card has none of its own to tell of
        return {"total_bytes": 0, "reserved_bytes": None, "used_bytes": 0, "free_bytes": 0}
    return {
        "total_bytes": int(found.total),
        "reserved_bytes": None,
        "used_bytes": int(found.used),
        "free_bytes": int(found.free),
    }


def _processes(nvml: Any, handle: Any) -> tuple[Process, ...]:
    found: dict[int, Process] = {}
    questions: tuple[tuple[bool, Callable[..., Any]], ...] = (
        (True, nvml.nvmlDeviceGetGraphicsRunningProcesses),
        (False, nvml.nvmlDeviceGetComputeRunningProcesses),
    )
    for graphics, question in questions:
        for process in _ask(nvml, question, handle) or ():
            used = process.usedGpuMemory
            name = _ask(nvml, nvml.nvmlSystemGetProcessName, process.pid)
            found[process.pid] = Process(
                pid=int(process.pid),
                name=_text(name or ""),
                used_bytes=None if used is None else int(used),
                graphics=graphics,
            )
    return tuple(found.values())


def _slices(nvml: Any, handle: Any) -> tuple[MigInstance, ...]:
    found = []
    for index in range(_ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        instance = _ask(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if instance is not None:
            memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, instance)
            found.append(
                MigInstance(
                    uuid=_text(nvml.nvmlDeviceGetUUID(instance)),
                    name=_text(_ask(nvml, nvml.nvmlDeviceGetName, instance) or ""),
                    total_bytes=None if memory is None else int(memory.total),
                )
            )
    return tuple(found)


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _boolean(value: Any) -> bool | None:
    return None if value is None else bool(value)


def _text(value: Any) -> str:
    """Older versions of the library give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
