"""A file system's root with a process in a control group, as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.watching.host_pressure import ControlGroups

V2_MOUNT = "30 23 0:26 {inside} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "36 30 0:32 {inside} /sys/fs/cgroup/memory rw,nosuid shared:12 - cgroup cgroup rw,memory\n"


class Tree:
    """A root of a file system with one process in one group."""

    def __init__(self, root: Path, cgroup: str, mountinfo: str) -> None:
        self.root = root
        proc = root / "proc" / "self"
        proc.mkdir(parents=True)
        (proc / "cgroup").write_text(cgroup)
        (proc / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo)

    def group(self, path: str, **files: object) -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / f"memory.{name}").write_text(f"{value}\n")
        return folder

    @property
    def groups(self) -> ControlGroups:
        return ControlGroups(root=self.root)


@pytest.fixture
def v2(tmp_path: Path) -> Tree:
    return Tree(tmp_path, "0::/user.slice/job\n", V2_MOUNT.format(inside="/"))
