"""Asks the NVIDIA driver: through NVML, or through nvidia-smi where nvidia-ml-py is not installed. No torch.

What a driver, a card or a virtual machine does not support is left unknown rather than failing the rest.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vramfit.doctor.facts import Card, MigInstance, NvidiaDriver, Process, Tool
from vramfit.launch.starting import answer
from vramfit.units import GIB, MIB

_NVML_MODES = {0: "default", 1: "exclusive_process", 2: "prohibited", 3: "exclusive_process"}
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
            cards=tuple(_nvml_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())),
        )
    finally:
        nvml.nvmlShutdown()


def _nvml_card(nvml: Any, index: int) -> Card:
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
        mig=_nvml_slices(nvml, handle) if mode is not None and mode[0] else (),
        ecc=_boolean(ecc[0]),
        ecc_pending=_boolean(ecc[1]),
        persistence=_boolean(persistence),
        compute_mode=_NVML_MODES.get(_ask(nvml, nvml.nvmlDeviceGetComputeMode, handle)),
        processes=_nvml_processes(nvml, handle),
    )


def _memory(nvml: Any, handle: Any) -> dict[str, Any]:
    """Figures of NVML's second version, which has the driver's own part; of the first on older drivers."""
    version, found, reserved = getattr(nvml, "nvmlMemory_v2", None), None, None
    if version is not None:
        found = _ask(nvml, lambda device: nvml.nvmlDeviceGetMemoryInfo(device, version=version), handle)
        reserved = None if found is None else int(found.reserved)
    if found is None:
        found = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    if found is None:  # unified memory (DGX Spark, Jetson): the card has none of its own to tell of
        return {"total_bytes": 0, "reserved_bytes": None, "used_bytes": 0, "free_bytes": 0}
    return {
        "total_bytes": int(found.total),
        "reserved_bytes": reserved,
        "used_bytes": int(found.used),
        "free_bytes": int(found.free),
    }


def _nvml_processes(nvml: Any, handle: Any) -> tuple[Process, ...]:
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


def _nvml_slices(nvml: Any, handle: Any) -> tuple[MigInstance, ...]:
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


_FIELDS = (
    "index",
    "name",
    "uuid",
    "pci.bus_id",
    "memory.total",
    "memory.reserved",
    "memory.used",
    "memory.free",
    "compute_cap",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.mode.pending",
    "persistence_mode",
    "compute_mode",
    "driver_version",
)
_LATER_FIELDS = ("memory.reserved", "compute_cap", "mig.mode.current")
"""What older drivers do not know: they refuse the whole question."""
_SMI_MODES = {
    "Default": "default",
    "Exclusive_Process": "exclusive_process",
    "Exclusive_Thread": "exclusive_process",
    "Prohibited": "prohibited",
}

Run = Callable[[Sequence[str]], str]
"""Runs nvidia-smi with arguments and gives what it printed."""


class SmiError(Exception):
    """nvidia-smi failed; the message is its own."""


def run_smi(arguments: Sequence[str]) -> str:
    """Run the command.

    Raises:
        FileNotFoundError: there is no nvidia-smi.
        SmiError: nvidia-smi failed.
    """
    done = answer(["nvidia-smi", *arguments])
    if done.returncode:
        raise SmiError(" ".join((done.stdout + done.stderr).split()) or f"exit code {done.returncode}")
    return done.stdout


def query_smi(run: Run = run_smi) -> NvidiaDriver:
    """Everything about the driver and its cards.

    Raises:
        FileNotFoundError: there is no nvidia-smi.
        SmiError: nvidia-smi failed.
    """
    try:
        fields: Sequence[str] = _FIELDS
        table = run([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    except SmiError as error:
        if "not a valid field" not in str(error):
            raise
        fields = tuple(name for name in _FIELDS if name not in _LATER_FIELDS)
        table = run([f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"])
    rows = [dict(zip(fields, row, strict=False)) for row in _rows(table)]
    processes = _smi_processes(run)
    slices = _smi_slices(run) if any(row.get("mig.mode.current") == "Enabled" for row in rows) else {}
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", run([]))
    return NvidiaDriver(
        tool=Tool.NVIDIA_SMI,
        version=rows[0]["driver_version"] if rows else "",
        cuda_version=None if cuda is None else (int(cuda.group(1)), int(cuda.group(2))),
        cards=tuple(
            replace(_smi_card(row), processes=processes.get(row["uuid"], ()), mig=slices.get(row["uuid"], ()))
            for row in rows
        ),
    )


def _smi_card(row: dict[str, str]) -> Card:
    capability = re.fullmatch(r"(\d+)\.(\d+)", row.get("compute_cap", ""))
    return Card(
        index=int(row["index"]),
        name=row["name"],
        uuid=row["uuid"],
        pci_bus_id=row["pci.bus_id"],
        total_bytes=_mib(row["memory.total"]) or 0,
        reserved_bytes=_mib(row.get("memory.reserved", "")),
        used_bytes=_mib(row["memory.used"]) or 0,
        free_bytes=_mib(row["memory.free"]) or 0,
        capability=None if capability is None else (int(capability.group(1)), int(capability.group(2))),
        mig_enabled=_enabled(row.get("mig.mode.current", "")),
        ecc=_enabled(row["ecc.mode.current"]),
        ecc_pending=_enabled(row["ecc.mode.pending"]),
        persistence=_enabled(row["persistence_mode"]),
        compute_mode=_SMI_MODES.get(row["compute_mode"]),
    )


def _smi_processes(run: Run) -> dict[str, tuple[Process, ...]]:
    """The computing processes of each card; the command does not list graphics processes in this form."""
    found: dict[str, list[Process]] = {}
    fields = "gpu_uuid,pid,process_name,used_memory"
    for row in _rows(run([f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"])):
        if len(row) == 4 and row[1].isdigit():
            process = Process(pid=int(row[1]), name=row[2], used_bytes=_mib(row[3]))
            found.setdefault(row[0], []).append(process)
    return {uuid: tuple(processes) for uuid, processes in found.items()}


def _smi_slices(run: Run) -> dict[str, tuple[MigInstance, ...]]:
    """What ``nvidia-smi -L`` lists below each card: ``MIG 1g.10gb Device 0: (UUID: MIG-...)``."""
    found: dict[str, list[MigInstance]] = {}
    card = ""
    for line in run(["-L"]).splitlines():
        if match := re.match(r"GPU \d+:.*\(UUID: (GPU-[^)]+)\)", line):
            card = match.group(1)
        elif match := re.match(r"\s+MIG (\S+)\s+Device\s+\d+:\s+\(UUID: (MIG-[^)]+)\)", line):
            size = re.search(r"\.(\d+)gb", match.group(1))
            total = int(size.group(1)) * GIB if size else None
            found.setdefault(card, []).append(
                MigInstance(uuid=match.group(2), name=f"MIG {match.group(1)}", total_bytes=total)
            )
    return {uuid: tuple(instances) for uuid, instances in found.items()}


def _rows(table: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(table), skipinitialspace=True) if row]


def _mib(text: str) -> int | None:
    return int(text) * MIB if text.strip().isdigit() else None


def _enabled(text: str) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(text.strip())
