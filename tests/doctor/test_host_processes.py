"""Processes and NCCL's files, read from a recorded machine and from this one."""

import os
from pathlib import Path

import pytest

from vramfit.doctor.facts import HostProcess, NcclFileSetting
from vramfit.doctor.host_processes import read_nccl_files, read_processes


def process(root: Path, pid: int, parent: int, *, environ: str = "", files: tuple[str, ...] = ()) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text("python\n")
    (folder / "status").write_text(f"Name:\tpython\nPPid:\t{parent}\nUid:\t0\n")
    (folder / "environ").write_text(environ)
    for number, target in enumerate(files):
        (folder / "fd" / str(number)).symlink_to(target)


def test_processes_of_a_recorded_machine(tmp_path: Path) -> None:
    rank = "PATH=/bin\0SECRET_TOKEN=abc\0RANK=3\0LOCAL_RANK=1\0MASTER_PORT=29500\0"
    process(tmp_path, 10, 7, environ=rank, files=("/dev/null", "/dev/nvidia0", "/dev/nvidia-uvm"))
    process(tmp_path, 11, 10, files=("/dev/nvidia-uvm",))
    process(tmp_path, 12, 1, files=("/dev/nvidia0", "/dev/nvidiactl"))  # nvidia-persistenced
    process(tmp_path, 13, 1, environ="RANK=x\0")
    (tmp_path / "proc" / "self").mkdir()
    told = read_processes({13, 4711}, tmp_path)
    assert told == (
        HostProcess(pid=10, parent=7, name="python", has_card_open=True, rank=3, local_rank=1, job="29500"),
        HostProcess(pid=11, parent=10, name="python", has_card_open=True),
        HostProcess(pid=13, parent=1, name="python"),
    )
    assert "abc" not in repr(told)


def test_a_system_without_proc_tells_nothing(tmp_path: Path) -> None:
    assert read_processes({1}, tmp_path) == ()


def test_this_process() -> None:
    [own] = [one for one in read_processes({os.getpid()}) if one.pid == os.getpid()]
    assert own.parent == os.getppid()
    assert own.name
    assert not own.has_card_open


def test_files_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_CONF_FILE", raising=False)
    home, etc = tmp_path / "home", tmp_path / "etc"
    home.mkdir()
    etc.mkdir()
    (home / ".nccl.conf").write_text("# NCCL_ALGO=Ring\nNCCL_BUFFSIZE=1\nNCCL_DEBUG = INFO\nOTHER=2\n")
    (etc / "nccl.conf").write_text("NCCL_BUFFSIZE=3\nNCCL_SHM_DISABLE=1\n")
    assert read_nccl_files(tmp_path, home) == (
        NcclFileSetting(name="NCCL_BUFFSIZE", value="1", path=str(home / ".nccl.conf")),
        NcclFileSetting(name="NCCL_SHM_DISABLE", value="1", path=str(etc / "nccl.conf")),
    )
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "own"))
    (tmp_path / "own").write_text("NCCL_SHM_DISABLE=0\n")
    assert [one.value for one in read_nccl_files(tmp_path, home)] == ["0", "3"]
    assert read_nccl_files(tmp_path / "nowhere", home)[0].path == str(tmp_path / "own")
