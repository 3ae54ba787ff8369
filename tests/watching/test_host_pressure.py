"""Limits of control groups, read from trees as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vramfit
from vramfit.runtime.oom_forms import ShortOf, recognised
from vramfit.runtime.survival.host_watch import HostWatch
from vramfit.runtime.survival.ladder import Rung
from vramfit.runtime.survival.survivor import SurvivalSettings, Survivor
from vramfit.techniques import Numerics
from vramfit.units import GIB, MIB
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


def test_pressure_is_a_shortage_of_its_own_kind(v2: Tree) -> None:
    folder = v2.group("sys/fs/cgroup/user.slice/job", current=90 * MIB, max=100 * MIB)
    watch = HostWatch(0.05, v2.groups, every=0)
    assert watch.near() is None
    (folder / "memory.current").write_text(f"{96 * MIB}\n")
    error = watch.near()
    assert error is not None
    found = recognised(error)
    assert found is not None and found.of is ShortOf.PRESSURE and "4.00 MiB left" in found.message
    assert not watch.relieve()
    assert HostWatch(0.0, v2.groups, every=0).near() is None


def survivor_of(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> Survivor:
    monkeypatch.setattr(
        "vramfit.runtime.survival.climber.HostWatch", lambda margin: HostWatch(margin, tree.groups, every=0)
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Survivor(
        model,
        optimizer,
        lambda net, batch: net(batch).square().mean(),
        SurvivalSettings(patience=3, numerics=Numerics.ROUNDING),
    )


def test_a_step_under_pressure_is_done_in_pieces_and_whole_again_later(
    v2: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = v2.group("sys/fs/cgroup/user.slice/job", current=50 * MIB, max=100 * MIB)
    batches = list(torch.rand(20, 8, 8))
    plain = survivor_of(v2, monkeypatch)
    losses = [plain.step(batch) for batch in batches]
    assert plain.events == []

    survivor = survivor_of(v2, monkeypatch)
    seen = [survivor.step(batch) for batch in batches[:2]]  # before the second, pieces are compared
    (folder / "memory.current").write_text(f"{97 * MIB}\n")
    seen.append(survivor.step(batches[2]))
    (event,) = survivor.events
    assert (event.kind, event.step, event.pieces) == ("host-pressure", 2, 2)
    assert "3.00 MiB left" in event.cause
    (folder / "memory.current").write_text(f"{50 * MIB}\n")
    seen += [survivor.step(batch) for batch in batches[3:]]
    assert {one.kind for one in survivor.events[1:]} == {"down"} and survivor.events[-1].rung is Rung.PLAIN
    assert survivor.steps == 20
    torch.testing.assert_close(torch.stack(seen), torch.stack(losses))


def test_what_cannot_be_helped_is_said_once(v2: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=99 * MIB, max=100 * MIB)
    survivor = survivor_of(v2, monkeypatch)
    for batch in torch.rand(12, 4, 8):
        survivor.step(batch)
    kinds = [one.kind for one in survivor.events]
    assert set(kinds) == {"host-pressure"}
    said = [one.evidence for one in survivor.events]
    assert said.count("nothing that vramfit.survive may do takes less of the host") == 1
    assert len(kinds) == len(set(map(str, survivor.events))) and survivor.steps == 12


def test_offloaded_activations_stay_on_a_card_that_has_room(
    v2: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2.group("sys/fs/cgroup/user.slice/job", current=99 * MIB, max=100 * MIB)
    monkeypatch.setattr(
        "vramfit.runtime.survival.climber.HostWatch", lambda margin: HostWatch(margin, v2.groups, every=0)
    )
    with vramfit.VirtualGPU("8GiB", writes="real"):
        model = torch.nn.Sequential(
            *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4)]
        )
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        survivor = Survivor(
            model,
            optimizer,
            lambda net, batch: net(batch).square().mean(),
            SurvivalSettings(numerics=Numerics.ROUNDING),
        )
        batch = torch.ones(8, 64, device="cuda")
        ladder = survivor._climber.ladder_for(batch)
        offload = next(place for place, level in enumerate(ladder.levels) if level.offload)
        ladder.climb(offload)
        survivor.step(batch)
        (event,) = survivor.events
        assert (event.kind, event.evidence) == ("host-pressure", "activations stay on the device")
        assert not ladder.level.offload

        ladder.climb(offload)
        ladder.shortage(offload - 1, 9 * GIB)  # without offloading the card was too small
        survivor.step(batch)
        assert ladder.level.offload
        assert survivor.events[-1].evidence == "nothing that vramfit.survive may do takes less of the host"
        survivor.close()

        ladder.climb(len(ladder.levels) - 1)
        ladder.shortage(offload, 9 * GIB)  # with states on the device it was too small
        survivor.step(batch)
        assert ladder.level.states and survivor._guard.hosted == set(model.parameters())


def test_mounts_of_any_bytes_are_passed_over(tmp_path: Path) -> None:
    """The kernel writes paths as they are, but for white space: a folder may have been named in Latin-1."""
    tree = Tree(tmp_path, "0::/job\n", "")
    mounts = tmp_path / "proc" / "self" / "mountinfo"
    odd = b"25 1 8:2 / /media/caf\xe9 rw - ext4 /dev/sdb1 rw\n"
    mounts.write_bytes(odd + V2_MOUNT.format(inside="/").encode())
    tree.group("sys/fs/cgroup/job", current=GIB, max=2 * GIB)
    found = tree.groups.nearest()
    assert found is not None and found.limit == 2 * GIB
