"""A tier of memory-mapped files, in /dev/shm or on a disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import UsageError
from vramfit.runtime.tiers.memory_tiers import rounded
from vramfit.runtime.tiers.owned_folders import OwnedFolder
from vramfit.runtime.tiers.tier import Copy, Layout, Tier
from vramfit.writing import StrPath, refused

PAGE = 4096
"""Files take whole pages, of memory in /dev/shm and of most disks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTensor:
    """A ticket for a tensor in a file: it can be sent to another process of this machine, which opens it.

    Attributes:
        path: the file.
        layout: how its values lie there.
    """

    path: str
    layout: Layout

    def open(self) -> torch.Tensor:
        """The tensor, on the CPU, in the same memory: what one process writes the other reads.

        The memory stays as long as the tensor does, also after the file is removed.

        Raises:
            UsageError: the file is gone, with the process or the store that it belonged to.
        """
        if not Path(self.path).exists():
            raise UsageError(
                f"the tensor in {self.path} is no longer shared",
                "Keep the store that shares it open until the other process has opened it",
            )
        return mapped(self.path, self.layout)


def mapped(path: str, layout: Layout) -> torch.Tensor:
    """A tensor over a file that has its size already."""
    if not layout.nbytes:
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
    return layout.over(torch.from_file(path, shared=True, size=layout.nbytes, dtype=torch.uint8))


class FileTier(Tier):
    """Files of this process alone, one a tensor; they hold nothing that is needed after it.

    Space is taken before a file is mapped: a page that cannot be had later kills the process (SIGBUS).

    Args:
        capacity: most bytes, in whole pages.
        root: a folder on a disk, or ``/dev/shm``.

    Raises:
        WriteError: nothing can be written there.
    """

    def __init__(self, capacity: int, root: StrPath) -> None:
        super().__init__("file", capacity)
        self.folder = OwnedFolder(root)
        self._next = 0

    def price(self, nbytes: int) -> int:
        """See `Tier`."""
        return rounded(nbytes, PAGE)

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        """See `Tier`."""
        layout = Layout.of(source)
        self._next += 1
        path = str(self.folder.path / str(self._next))
        try:
            _take_space(path, layout.nbytes)
            target = mapped(path, layout)
            copy(source, target)
        except BaseException as error:
            Path(path).unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise refused(path, error) from error
            raise
        return path, target

    def get(self, handle: Any) -> torch.Tensor:
        """See `Tier`."""
        found: torch.Tensor = handle[1]
        return found

    def drop(self, handle: Any) -> None:
        """See `Tier`."""
        Path(handle[0]).unlink(missing_ok=True)

    def ticket(self, handle: Any) -> SharedTensor:
        """What another process opens the tensor with."""
        return SharedTensor(path=handle[0], layout=Layout.of(handle[1]))

    def close(self) -> None:
        """See `Tier`."""
        self.folder.close()


def _take_space(path: str, nbytes: int) -> None:
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(number, 0, nbytes)
        elif nbytes:  # macOS has none
            os.truncate(number, nbytes)
    finally:
        os.close(number)
