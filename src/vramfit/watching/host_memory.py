"""The host memory of a process and its children, and of the machine: by proc(5), or psutil where there is no /proc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vramfit.errors import UsageError
from vramfit.watching.host_pressure import ControlGroups
from vramfit.watching.watch_reading import HostUse


class HostProbe:
    """Looks at the host memory of a process.

    Args:
        pid: of the process.
        root: of the file system, for tests.

    Raises:
        UsageError: the system has no /proc, and psutil is not installed.
    """

    def __init__(self, pid: int, root: Path = Path("/")) -> None:
        self._pid, self._proc = pid, root / "proc"
        self._groups = ControlGroups(pid, root)
        self._psutil: Any = None
        if not (self._proc / "meminfo").exists():
            try:
                import psutil  # type: ignore[import-untyped, unused-ignore]
            except ImportError:
                raise UsageError(
                    "this system has no /proc, and psutil is not installed", "Install it: pip install psutil"
                ) from None
            self._psutil = psutil

    def look(self) -> HostUse | None:
        """The memory now; None once the process has ended."""
        if self._psutil is not None:
            return self._by_psutil()
        family = list(self.family())
        sizes = [size for pid in family if (size := self._resident(pid)) is not None]
        if not sizes:
            return None
        machine = self._machine()
        group = self._groups.nearest()
        return HostUse(
            resident=sum(sizes),
            processes=len(sizes),
            available=machine.get("MemAvailable", machine.get("MemFree", 0)),
            total=machine.get("MemTotal", 0),
            limit=None if group is None else group.limit,
            limit_used=None if group is None else group.used,
        )

    def family(self) -> Iterator[int]:
        """The process and those below it."""
        waiting, seen = [self._pid], set()
        while waiting:
            pid = waiting.pop()
            if pid in seen:
                continue
            seen.add(pid)
            yield pid
            with contextlib.suppress(OSError):  # it may end while it is looked at
                tasks = list((self._proc / str(pid) / "task").iterdir())
                for task in tasks:
                    with contextlib.suppress(OSError):
                        told = (task / "children").read_text(encoding="ascii")
                        waiting += [int(one) for one in told.split()]

    def _resident(self, pid: int) -> int | None:
        """Resident bytes; None for a process that has ended, or waits as a zombie to be collected."""
        try:
            pages = (self._proc / str(pid) / "statm").read_text(encoding="ascii").split()
        except OSError:
            return None
        return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") or None

    def _machine(self) -> dict[str, int]:
        lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
        pairs = (line.split() for line in lines)
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in pairs if len(words) == 3}

    def _by_psutil(self) -> HostUse | None:
        psutil = self._psutil
        try:
            first = psutil.Process(self._pid)
            sizes = [first.memory_info().rss]
            children = first.children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        for child in children:
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile, or is somebody else's
                sizes.append(child.memory_info().rss)
        machine = psutil.virtual_memory()
        return HostUse(
            resident=sum(sizes), processes=len(sizes), available=machine.available, total=machine.total
        )


def check_process(pid: int, root: Path = Path("/")) -> str:
    """The name of a process that may be watched.

    Raises:
        UsageError: there is none, or it has ended.
    """
    proc = root / "proc"
    if not proc.exists():  # no Linux: psutil says so at the first look
        return ""
    gone = UsageError(f"there is no process {pid}", "List them with ps, or nvidia-smi for those on a card")
    try:
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        command = (proc / str(pid) / "cmdline").read_bytes()
    except PermissionError:
        raise UsageError(
            f"process {pid} may not be looked at by this user", "Ask as its owner, or as root"
        ) from None
    except OSError:
        raise gone from None
    name, _, rest = fields.partition("(")[2].rpartition(")")
    if rest.split()[0] in ("Z", "X"):
        raise gone
    shown = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return shown or name
