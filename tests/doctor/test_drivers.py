"""NVML and nvidia-smi tell the same facts."""

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from vramfit.doctor.facts import Tool
from vramfit.doctor.nvidia import SmiError, query_nvml, query_smi, run_smi
from vramfit.units import GIB, MIB

UUID = "GPU-4f1d2f3a"


class NVMLError(Exception):
    pass


def unsupported(*_: Any, **__: Any) -> Any:
    raise NVMLError("Not Supported")


class StandIn:
    """The functions of nvidia-ml-py that are used, for one card."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028

    def __init__(self, **changes: Any) -> None:
        self.is_down = False
        for name, value in changes.items():
            setattr(self, name, value)

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.is_down = True

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"card {index}"

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H200" if handle.startswith("card") else "NVIDIA H200 MIG 1g.18gb"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return UUID if handle.startswith("card") else "MIG-1"

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        return SimpleNamespace(busId="00000000:3B:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        if handle.startswith("slice"):
            return SimpleNamespace(total=18 * GIB)
        return SimpleNamespace(total=100 * GIB, reserved=GIB, used=9 * GIB, free=90 * GIB)

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [0, 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index:
            raise NVMLError("Not Found")
        return "slice 0"

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        return [1, 0]

    def nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return 1

    def nvmlDeviceGetComputeMode(self, handle: str) -> int:
        return 3

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=None)]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=8, usedGpuMemory=8 * GIB)]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        return f"/usr/bin/p{pid}".encode()


def test_nvml() -> None:
    nvml = StandIn()
    driver = query_nvml(nvml)
    assert nvml.is_down
    assert (driver.tool, driver.version, driver.cuda_version) == (Tool.NVML, "580.95.05", (13, 1))
    [card] = driver.cards
    assert (card.total_bytes, card.reserved_bytes, card.used_bytes) == (100 * GIB, GIB, 9 * GIB)
    assert (card.ecc, card.ecc_pending, card.persistence) == (True, False, True)
    assert card.compute_mode == "exclusive_process"
    assert [(p.pid, p.used_bytes, p.graphics) for p in card.processes] == [
        (7, None, True),
        (8, 8 * GIB, False),
    ]
    assert card.mig == ()


def test_nvml_with_slices() -> None:
    [card] = query_nvml(StandIn(nvmlDeviceGetMigMode=lambda handle: [1, 1])).cards
    assert [(m.uuid, m.total_bytes) for m in card.mig] == [("MIG-1", 18 * GIB)]


def test_what_a_card_does_not_support_stays_unknown() -> None:
    names = [name for name in dir(StandIn) if name.startswith("nvmlDeviceGet")]
    needed = ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName")
    nvml = StandIn(**{name: unsupported for name in names if name not in needed})
    [card] = query_nvml(nvml).cards
    assert (card.total_bytes, card.capability, card.mig_enabled, card.processes) == (0, None, None, ())


def test_an_older_driver_does_not_tell_its_own_part() -> None:
    def first_version(handle: str, version: int | None = None) -> Any:
        if version:
            raise NVMLError("Function Not Found")
        return SimpleNamespace(total=100 * GIB, used=10 * GIB, free=90 * GIB)

    [card] = query_nvml(StandIn(nvmlDeviceGetMemoryInfo=first_version)).cards
    assert (card.total_bytes, card.reserved_bytes) == (100 * GIB, None)


def test_the_library_has_every_function_that_is_used() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is an extra")
    used = [name for name in vars(StandIn) if name.startswith(("nvml", "NVML"))]
    assert len(used) > 15
    assert [name for name in used if not hasattr(nvml, name)] == []


GPUS = (
    "0, NVIDIA A100-SXM4-80GB, GPU-4f1d2f3a, 00000000:3B:00.0, 81920, 701, 9000, 72219, 8.0, Enabled, "
    "Enabled, Enabled, Enabled, Default, 580.95.05\n"
)
APPS = "GPU-4f1d2f3a, 4242, /usr/bin/python3, 8996\nGPU-4f1d2f3a, 77, [Not Found], [N/A]\n"
LIST = (
    "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-4f1d2f3a)\n"
    "  MIG 1g.10gb     Device  0: (UUID: MIG-aaaa)\n"
    "  MIG 3g.40gb     Device  1: (UUID: MIG-bbbb)\n"
)


def answers(arguments: Sequence[str]) -> str:
    if not arguments:
        return "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05    CUDA Version: 13.0 |\n"
    if arguments[0].startswith("--query-gpu"):
        return GPUS
    return APPS if arguments[0].startswith("--query-compute-apps") else LIST


def test_nvidia_smi() -> None:
    driver = query_smi(answers)
    assert (driver.tool, driver.version, driver.cuda_version) == (Tool.NVIDIA_SMI, "580.95.05", (13, 0))
    [card] = driver.cards
    assert card.total_bytes == 81920 * MIB
    assert card.capability == (8, 0)
    assert [(p.pid, p.used_bytes) for p in card.processes] == [(4242, 8996 * MIB), (77, None)]
    assert [(m.uuid, m.total_bytes) for m in card.mig] == [("MIG-aaaa", 10 * GIB), ("MIG-bbbb", 40 * GIB)]


def test_an_older_nvidia_smi() -> None:
    def older(arguments: Sequence[str]) -> str:
        if arguments and "compute_cap" in arguments[0]:
            raise SmiError('Field "compute_cap" is not a valid field to query.')
        if arguments and arguments[0].startswith("--query-gpu"):
            return "0, Tesla K80, GPU-1, 0000:01:00.0, 11441, 3, 11438, N/A, N/A, Disabled, Default, 450.80\n"
        return answers(arguments)

    [card] = query_smi(older).cards
    assert (card.name, card.reserved_bytes, card.capability, card.ecc) == ("Tesla K80", None, None, None)
    assert card.persistence is False


def test_a_failure_is_told_in_its_own_words() -> None:
    def fails(_: Sequence[str]) -> str:
        raise SmiError("Failed to initialize NVML: Driver/library version mismatch")

    with pytest.raises(SmiError, match="mismatch"):
        query_smi(fails)


def test_the_command_itself(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\nif [ "$1" = ok ]; then echo fine; else echo broken; exit 9; fi\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert run_smi(["ok"]) == "fine\n"
    with pytest.raises(SmiError, match="broken"):
        run_smi(["no"])


def test_neither_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from vramfit.doctor import probe

    monkeypatch.setenv("PATH", str(tmp_path))
    original = importlib.import_module

    def missing(name: str) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return original(name)

    monkeypatch.setattr(probe.importlib, "import_module", missing)
    assert probe.query_driver() == (None, "")
