"""Processes that use a card or inherited one, as Linux tells, and the files that set NCCL's variables. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from vramfit.doctor.facts import RELEVANT, HostProcess, NcclFileSetting

_CONTEXT_FILE = "/dev/nvidia-uvm"
"""CUDA opens it for a context; programs that only ask or draw (nvidia-smi, persistence and display servers) do not."""


def read_processes(on_cards: Collection[int], root: Path = Path("/")) -> tuple[HostProcess, ...]:
    """Processes that the driver names, and others that have a card's files open.

    Of another user's process only its name and parent can be read. Of environments nothing is kept but ``RANK``,
    ``LOCAL_RANK`` and ``MASTER_PORT``.

    Args:
        on_cards: ids of the processes that the driver names. In a container they may be those of the host, which say
            nothing here.
        root: where ``proc`` lies; another folder for a recorded machine.
    """
    found = []
    for folder in sorted(_numbered(root / "proc"), key=lambda path: int(path.name)):
        pid = int(folder.name)
        is_open = _has_card_open(folder)
        if pid in on_cards or is_open:
            found.append(_process(folder, pid, has_card_open=is_open))
    return tuple(found)


def _numbered(proc: Path) -> list[Path]:
    try:
        return [path for path in proc.iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _has_card_open(folder: Path) -> bool:
    try:
        files = (one for one in (folder / "fd").iterdir() if one.is_symlink())
        return any(str(one.readlink()) == _CONTEXT_FILE for one in files)
    except OSError:  # another user's process, or one that has just ended
        return False


def _process(folder: Path, pid: int, *, has_card_open: bool) -> HostProcess:
    environ = dict(line.partition("=")[::2] for line in _text(folder / "environ").split("\0") if "=" in line)
    parent = re.search(r"^PPid:\s+(\d+)", _text(folder / "status"), re.MULTILINE)
    return HostProcess(
        pid=pid,
        parent=int(parent.group(1)) if parent else 0,
        name=_text(folder / "comm").strip(),
        has_card_open=has_card_open,
        rank=_number(environ.get("RANK", "")),
        local_rank=_number(environ.get("LOCAL_RANK", "")),
        job=environ.get("MASTER_PORT", ""),
    )


def read_nccl_files(root: Path = Path("/"), home: Path | None = None) -> tuple[NcclFileSetting, ...]:
    """What NCCL's files set: the user's, or that of ``NCCL_CONF_FILE``, before the system's.

    Lines are ``NAME=value`` without spaces (NCCL's src/misc/param.cc, setEnvFile).

    Args:
        root: where ``etc`` lies.
        home: the user's folder.
    """
    own = os.environ.get("NCCL_CONF_FILE")
    user = Path(own) if own else (Path.home() if home is None else home) / ".nccl.conf"
    found: dict[str, NcclFileSetting] = {}
    for path in (user, root / "etc" / "nccl.conf"):
        for line in _text(path).splitlines():
            name, equals, value = line.partition("=")
            if equals and name in RELEVANT:
                found.setdefault(name, NcclFileSetting(name=name, value=value, path=str(path)))
    return tuple(found.values())


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
