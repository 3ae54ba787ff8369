"""Limits and sizes are read from the system's files."""

from pathlib import Path

import pytest

from vramfit.doctor.gathering import read_container, read_host
from vramfit.units import GIB, MIB


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_host(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       65536 kB\nMemAvailable:   1024 kB\nSwapTotal:      0 kB\n"
            "CommitLimit:    2048 kB\nCommitted_AS:   1024 kB\nHugePages_Total:       0\n",
            "proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n",
            "proc/sys/vm/overcommit_memory": "2\n",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\n",
            "dev/dxg": "",
            "sys/class/infiniband/mlx5_0": "",
        },
    )
    host = read_host(root)
    assert (host.memory_bytes, host.available_bytes, host.swap_bytes) == (64 * MIB, MIB, 0)
    assert (host.overcommit, host.commit_limit_bytes, host.committed_bytes) == (2, 2 * MIB, MIB)
    assert host.wsl
    assert host.infiniband
    assert host.device_nodes
    assert host.kernel_module == "580.95.05"
    assert host.shared_memory is None


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    host = read_host(tmp_path)
    assert (host.overcommit, host.kernel_module, host.infiniband) == (None, "", False)
    assert host.memory_bytes > 0  # by another way


@pytest.mark.parametrize(
    ("files", "limit", "used", "swap"),
    [
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/memory.swap.max": "0\n",
            },
            4 * GIB,
            GIB,
            0,
        ),
        (
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{8 * GIB}\n",
                "sys/fs/cgroup/user.slice/memory.current": f"{2 * GIB}\n",
                "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/job/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/user.slice/job/memory.swap.max": "max\n",
            },
            8 * GIB,
            2 * GIB,
            None,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": f"{3 * GIB}\n",
            },
            2 * GIB,
            GIB,
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            },
            None,
            GIB,
            None,
        ),
        ({}, None, None, None),
    ],
    ids=["v2 container", "v2 slice above", "v1 container", "v1 unlimited", "none"],
)
def test_control_groups(
    tmp_path: Path, files: dict[str, str], limit: int | None, used: int | None, swap: int | None
) -> None:
    found = read_container(write(tmp_path, files), {})
    assert (found.memory_max_bytes, found.memory_used_bytes, found.swap_max_bytes) == (limit, used, swap)


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({}, {"SLURM_JOB_ID": "7"}, "slurm"),
        ({}, {}, ""),
    ],
)
def test_who_set_the_limits(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str
) -> None:
    assert read_container(write(tmp_path, files), environ).kind == kind
