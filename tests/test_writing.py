import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from vramfit.errors import WriteError
from vramfit.writing import check_writable, write_file, write_text

needs_permissions = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_text_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    write_text(path, "nü\n")
    assert path.read_text(encoding="utf-8") == "nü\n"
    assert names(tmp_path) == ["report.json"]


def test_a_full_disk_leaves_the_old_file_and_no_half_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="no space left on device") as caught:
        write_text(path, "new")
    assert "Free some space" in caught.value.hint
    assert caught.value.exit_code == 2
    assert path.read_text() == "old"
    assert names(tmp_path) == ["report.json"]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_file(tmp_path / "trace.vft", fails)
    assert names(tmp_path) == []


@pytest.mark.parametrize("act", [check_writable, lambda path: write_text(path, "x")])
def test_impossible_places_are_explained(tmp_path: Path, act: object) -> None:
    assert callable(act)
    (tmp_path / "file").write_text("x")
    for path, reason, hint in (
        (tmp_path, "is a directory", "not of a folder"),
        (tmp_path / "missing" / "report.json", "no such file or directory", "Create the folder"),
        (tmp_path / "file" / "report.json", "not a directory", "is a file"),
        (tmp_path / ("x" * 300), "file name too long", "shorter"),
    ):
        with pytest.raises(WriteError) as caught:
            act(path)
        assert reason in caught.value.message
        assert hint in caught.value.hint
    assert names(tmp_path) == ["file"]


@needs_permissions
def test_a_folder_without_permission_is_explained(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(WriteError, match="permission denied"):
            check_writable(tmp_path / "report.json")
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_checking_leaves_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    check_writable(path)
    assert names(tmp_path) == []
    path.write_text("old")
    check_writable(path)
    assert path.read_text() == "old"


def test_a_link_is_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="no /dev/null")
def test_devices_are_written_not_replaced() -> None:
    check_writable(Path("/dev/null"))
    write_text(Path("/dev/null"), "x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_device_is_explained() -> None:
    with pytest.raises(WriteError, match="no space left on device"):
        write_text(Path("/dev/full"), "x")
