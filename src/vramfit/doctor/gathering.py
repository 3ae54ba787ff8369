"""Finds out about this machine: files of the system here, driver and torch in children that may crash or hang."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from vramfit.allocator.versions import alloc_conf_from_env
from vramfit.doctor.facts import (
    RELEVANT,
    Container,
    Facts,
    FolderFacts,
    Host,
    HostProcess,
    NvidiaDriver,
    Torch,
)
from vramfit.doctor.host_processes import read_nccl_files, read_processes
from vramfit.doctor.probe import DriverAnswer, ProbeJob, Question, VirtualAnswer
from vramfit.launch.job import result_of
from vramfit.launch.starting import answer, python_command

_NO_LIMIT = 1 << 60
"""Control groups of version 1 write the largest page-aligned int64 for no limit."""


def read_host(root: Path = Path("/")) -> Host:
    """The host's memory, limits and places.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` lie; another folder for a recorded machine.
    """
    memory = _meminfo(root)
    release = _read(root / "proc/sys/kernel/osrelease") or platform.release()
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        python=sys.version_info[:3],
        wsl="microsoft" in release.lower(),
        memory_bytes=memory.get("MemTotal") or _sysconf_memory(),
        available_bytes=memory.get("MemAvailable", 0),
        swap_bytes=memory.get("SwapTotal", 0),
        overcommit=_number(_read(root / "proc/sys/vm/overcommit_memory")),
        commit_limit_bytes=memory.get("CommitLimit"),
        committed_bytes=memory.get("Committed_AS"),
        locked_limit_bytes=_limit("RLIMIT_MEMLOCK"),
        address_space_limit_bytes=_limit("RLIMIT_AS"),
        infiniband=_has_entries(root / "sys/class/infiniband"),
        shared_memory=_place(root / "dev/shm", root),
        scratch=_place(Path(tempfile.gettempdir()), root),
        kernel_module=_kernel_module(_read(root / "proc/driver/nvidia/version")),
        device_nodes=any((root / "dev" / name).exists() for name in ("nvidiactl", "dxg")),
    )


def read_container(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Container:
    """The control group limits of this process, the tightest of its group and of all above it."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    kind = _container_kind(root, os.environ if environ is None else environ, lines)
    base = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            return _version_1(base / "memory", path, kind)
    for line in lines:
        if line.startswith("0::"):
            return _version_2(base, line[3:], kind)
    return Container(kind=kind)


def _version_1(base: Path, path: str, kind: str) -> Container:
    limit, used = _tightest(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    both, _ = _tightest(base, path, "memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes")
    swap = max(0, both - limit) if both is not None and limit is not None else None
    return Container(
        kind=kind, version=1, memory_max_bytes=limit, memory_used_bytes=used, swap_max_bytes=swap
    )


def _version_2(base: Path, path: str, kind: str) -> Container:
    limit, used = _tightest(base, path, "memory.max", "memory.current")
    swap, _ = _tightest(base, path, "memory.swap.max", "memory.swap.current")
    return Container(
        kind=kind, version=2, memory_max_bytes=limit, memory_used_bytes=used, swap_max_bytes=swap
    )


def _tightest(base: Path, path: str, limit: str, used: str) -> tuple[int | None, int | None]:
    """The lowest limit from a group up to the root of the mount, and what is used there.

    Inside a container the path may be the host's while the mount shows the container's own group as its root; folders
    that do not exist are passed over.
    """
    folders = [base]
    for part in Path(path.lstrip("/")).parts:
        folders.append(folders[-1] / part)
    found: list[tuple[int, int | None]] = []
    own: int | None = None
    for folder in folders:
        amount = _number(_read(folder / limit))
        current = _number(_read(folder / used))
        own = current if current is not None else own
        if amount is not None and amount < _NO_LIMIT:
            found.append((amount, current))
    return min(found, key=lambda pair: pair[0]) if found else (None, own)


def _container_kind(root: Path, environ: Mapping[str, str], lines: list[str]) -> str:
    text = "\n".join(lines)
    if "KUBERNETES_SERVICE_HOST" in environ or "kubepods" in text:
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists() or "docker" in text:
        return "docker"
    return "slurm" if "SLURM_JOB_ID" in environ else ""


def _place(path: Path, root: Path) -> FolderFacts | None:
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):  # no such folder, or no such question (Windows)
        return None
    return FolderFacts(
        path=str(path),
        filesystem=_filesystem(path, root),
        total_bytes=found.f_frsize * found.f_blocks,
        free_bytes=found.f_frsize * found.f_bavail,
    )


def _filesystem(path: Path, root: Path) -> str:
    """Type of the file system of the longest mount point above ``path``."""
    best, kind = "", ""
    for line in _read(root / "proc/mounts").splitlines():
        parts = line.split()
        if len(parts) > 2 and path.is_relative_to(parts[1]) and len(parts[1]) >= len(best):
            best, kind = parts[1], parts[2]
    return kind


def _meminfo(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(amount) * 1024 for name, amount in found}


def _sysconf_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _limit(name: str) -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _kernel_module(text: str) -> str:
    match = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else ""


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdigit() else None


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


Answer = TypeVar("Answer")

DEFAULT_TIMEOUT = 60.0
"""Seconds for each child: importing torch from a cold disk takes long, a hanging driver for ever."""

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def gather(
    *, timeout: float = DEFAULT_TIMEOUT, root: Path = Path("/"), say: Callable[[str], None] | None = None
) -> Facts:
    """Look at this machine; takes a few seconds.

    Args:
        timeout: seconds that each child may take.
        root: where the system's files lie.
    """
    tell = say or (lambda _: None)
    environ = {name: os.environ[name] for name in RELEVANT if name in os.environ}
    tell("the driver and its cards")
    driver, driver_error = _driver(timeout)
    tell("torch and what it sees")
    torch, torch_error = _ask(Question.TORCH, Torch, timeout)
    virtual_error: str | None = None
    if torch is not None:
        tell("the virtual GPU")
        virtual, virtual_error = _ask(Question.VIRTUAL, VirtualAnswer, timeout)
        if virtual is not None:
            virtual_error = virtual.error
    return Facts(
        host=read_host(root),
        container=read_container(root),
        environ=environ,
        driver=driver,
        driver_error=driver_error,
        torch=torch,
        torch_error=torch_error,
        virtual_error=virtual_error,
        nccl_files=read_nccl_files(root),
        processes=_processes(driver, root),
    )


def _processes(driver: NvidiaDriver | None, root: Path) -> tuple[HostProcess, ...]:
    """Who uses or inherited a card here; nobody where there is none."""
    if driver is None or not driver.cards:
        return ()
    return read_processes({one.pid for card in driver.cards for one in card.processes}, root)


def _driver(timeout: float) -> tuple[NvidiaDriver | None, str]:
    told, failure = _ask(Question.DRIVER, DriverAnswer, timeout)
    return (None, failure) if told is None else (told.driver, told.error)


def _ask(question: Question, kind: type[Answer], timeout: float) -> tuple[Answer | None, str]:
    """The answer of a child, or None and how it failed in one line."""
    # Settings that torch refuses would end the child at once: they travel in the job, and are tried there.
    environ = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    settings = alloc_conf_from_env(os.environ)
    with tempfile.TemporaryDirectory(prefix="vramfit-") as folder:
        job = ProbeJob(folder=folder, question=question, settings=settings)
        command = python_command("vramfit.doctor.probe", str(job.write()))
        try:
            done = answer(command, env=environ, stdin=subprocess.DEVNULL, timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, f"did not answer within {timeout:.0f} s"
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            return None, f"could not be asked: cannot start {sys.executable}: {reason}"
        found = result_of(Path(folder), kind)
    return (found, "") if found is not None else (None, _how_it_died(done.returncode, done.stderr))


def _how_it_died(code: int, stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    last = f": {lines[-1][:300]}" if lines else ""
    if code < 0:
        return f"died of signal {signal.Signals(-code).name}{last}"
    return f"ended with exit code {code}{last}"
