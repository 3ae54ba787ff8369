"""Asks the driver through the nvidia-smi command, where nvidia-ml-py is not installed. No torch."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from vramfit.doctor.facts import Card, MigInstance, NvidiaDriver, Process, Tool
from vramfit.launch.starting import answer
from vramfit.units import GIB, MIB

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
_COMPUTE_MODES = {
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
    processes = _processes(run)
    slices = _slices(run) if any(row.get("mig.mode.current") == "Enabled" for row in rows) else {}
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", run([]))
    return NvidiaDriver(
        tool=Tool.NVIDIA_SMI,
        version=rows[0]["driver_version"] if rows else "",
        cuda_version=None if cuda is None else (int(cuda.group(1)), int(cuda.group(2))),
        cards=tuple(
            replace(_card(row), processes=processes.get(row["uuid"], ()), mig=slices.get(row["uuid"], ()))
            for row in rows
        ),
    )


def _card(row: dict[str, str]) -> Card:
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
        compute_mode=_COMPUTE_MODES.get(row["compute_mode"]),
    )


def _processes(run: Run) -> dict[str, tuple[Process, ...]]:
    """The computing processes of each card; the command does not list those that draw in this form."""
    found: dict[str, list[Process]] = {}
    fields = "gpu_uuid,pid,process_name,used_memory"
    for row in _rows(run([f"--query-compute-apps={fields}", "--format=csv,noheader,nounits"])):
        if len(row) == 4 and row[1].isdigit():
            process = Process(pid=int(row[1]), name=row[2], used_bytes=_mib(row[3]))
            found.setdefault(row[0], []).append(process)
    return {uuid: tuple(processes) for uuid, processes in found.items()}


def _slices(run: Run) -> dict[str, tuple[MigInstance, ...]]:
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
