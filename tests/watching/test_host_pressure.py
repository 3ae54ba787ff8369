"""Limits of control groups, read from trees as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.units import GIB
from vramfit.watching.host_pressure import ControlGroups
from watching.group_trees import V1_MOUNT, V2_MOUNT, Tree, v2

__all__ = ["v2"]


def test_version_2_without_its_droppable_file_pages(v2: Tree) -> None:
    folder = v2.group(
        "sys/fs/cgroup/user.slice/job",
        current=7 * GIB,
        max=8 * GIB,
        high="max",
        stat=f"anon {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}",
        events="low 0\nhigh 3\nmax 12\noom 1\noom_kill 1",
        pressure="some avg10=12.50 avg60=3.00 avg300=0.10 total=5\nfull avg10=1.00 avg60=0.00 avg300=0.00 total=1",
    )
    found = v2.groups.nearest()
    assert found is not None and found.path == folder
    assert (found.used, found.limit, found.left, found.cache) == (5 * GIB, 8 * GIB, 3 * GIB, 2 * GIB)
    assert (found.at_limit, found.killed, found.stalled) == (12, 1, 12.5)
    assert found.share == 0.625
    assert "5.00 GiB of the 8.00 GiB" in str(found) and "12 % of the last 10 s" in str(found)


def test_the_soft_limit_counts_where_it_is_lower(v2: Tree) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=GIB, max=8 * GIB, high=2 * GIB)
    found = v2.groups.nearest()
    assert found is not None and found.limit == 2 * GIB


def test_the_group_above_counts_where_it_is_nearer_to_its_limit(v2: Tree) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=GIB, max=8 * GIB)
    above = v2.group("sys/fs/cgroup/user.slice", current=3 * GIB, max=4 * GIB)
    v2.group("sys/fs/cgroup", stat="anon 1")  # the root has no limit
    found = v2.groups.nearest()
    assert found is not None and found.path == above and found.left == GIB


def test_no_limit_is_none(v2: Tree) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=GIB, max="max", high="max")
    assert v2.groups.nearest() is None


def test_a_container_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/\n", V2_MOUNT.format(inside="/../../docker/abc"))
    tree.group("sys/fs/cgroup", current=GIB, max=2 * GIB)
    found = tree.groups.nearest()
    assert found is not None and found.limit == 2 * GIB


@pytest.mark.parametrize("inside", ["/", "/docker/abc"])
def test_version_1(tmp_path: Path, inside: str) -> None:
    tree = Tree(
        tmp_path, "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/x\n", V1_MOUNT.format(inside=inside)
    )
    where = "sys/fs/cgroup/memory" + ("/docker/abc" if inside == "/" else "")
    tree.group(
        where,
        usage_in_bytes=3 * GIB,
        limit_in_bytes=4 * GIB,
        failcnt=7,
        stat=f"cache 5\ninactive_file 1\ntotal_inactive_file {GIB}",
        oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2",
    )
    found = tree.groups.nearest()
    assert found is not None
    assert (found.used, found.limit, found.at_limit, found.killed) == (2 * GIB, 4 * GIB, 7, 2)
    assert found.stalled is None


def test_version_1_without_a_limit_is_none(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/\n", V1_MOUNT.format(inside="/"))
    tree.group("sys/fs/cgroup/memory", usage_in_bytes=GIB, limit_in_bytes=9223372036854771712)
    assert tree.groups.nearest() is None


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert ControlGroups(root=tmp_path).nearest() is None


def test_this_machine_can_be_asked() -> None:
    found = ControlGroups().nearest()
    assert found is None or 0 <= found.used <= found.limit + GIB


def test_mounts_of_any_bytes_are_passed_over(tmp_path: Path) -> None:
    """The kernel writes paths as they are, but for white space: a folder may have been named in Latin-1."""
    tree = Tree(tmp_path, "0::/job\n", "")
    mounts = tmp_path / "proc" / "self" / "mountinfo"
    odd = b"25 1 8:2 / /media/caf\xe9 rw - ext4 /dev/sdb1 rw\n"
    mounts.write_bytes(odd + V2_MOUNT.format(inside="/").encode())
    tree.group("sys/fs/cgroup/job", current=GIB, max=2 * GIB)
    found = tree.groups.nearest()
    assert found is not None and found.limit == 2 * GIB
