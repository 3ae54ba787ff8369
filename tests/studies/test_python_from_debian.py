"""Which packages a Python of Debian's is made of, and what starts it."""

from __future__ import annotations

import lzma
import os
import subprocess
from pathlib import Path

import pytest
import python_from_debian as debian

INDEX = """\
Package: python3.14
Version: 3.14.10-1
Depends: python3.14-minimal (= 3.14.10-1), media-types | mime-support, libfirst | libsecond
Description: a language
 with more: lines

Package: python3.14-minimal
Depends: libc6 (>= 2.42)

Package: libc6
Depends: libgcc-s1
Pre-Depends: debconf

Package: libgcc-s1
Depends: libc6 (>= 2.35)

Package: libsecond

Package: media-types

Package: debconf

Package: libother
"""


def test_a_package_comes_with_what_it_depends_on_once_and_without_what_the_system_has() -> None:
    packages = debian.read_index(INDEX)
    assert packages["python3.14"]["Version"] == "3.14.10-1"
    names = [package["Package"] for package in debian.needed(["python3.14"], packages)]
    assert sorted(names) == ["libc6", "libgcc-s1", "libsecond", "python3.14", "python3.14-minimal"]


def test_the_starter_runs_the_real_one_by_its_own_loader_under_the_name_that_was_called(
    tmp_path: Path,
) -> None:
    binaries, libraries = tmp_path / "usr" / "bin", tmp_path / "usr" / "lib" / "x86_64-linux-gnu"
    binaries.mkdir(parents=True)
    libraries.mkdir(parents=True)
    (binaries / "python3.14").write_text("the real one")
    loader = libraries / "ld-linux-x86-64.so.2"
    loader.write_text('#!/bin/sh\necho "$@"\n')
    loader.chmod(0o755)
    starter = debian.put_starter("3.14", tmp_path)
    link = tmp_path / "python"
    link.symlink_to(starter)
    told = subprocess.run(
        [link, "-c", "pass"], capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    first, name, option, folder, real, *given = told.split()
    assert (first, name, option, given) == ("--argv0", str(link), "--library-path", ["-c", "pass"])
    assert Path(folder).resolve() == libraries
    assert Path(real).read_text() == "the real one"


def test_pip_is_found_where_it_was_unpacked(tmp_path: Path) -> None:
    library = tmp_path / "usr" / "lib" / "python3.14"
    library.mkdir(parents=True)
    file = library / "_sysconfigdata__linux_x86_64-linux-gnu.py"
    file.write_text(
        "V = {'WHEEL_PKG_DIR': '/usr/share/python-wheels/', 'A': '--with=/usr/share/python-wheels'}\n"
    )
    for _ in range(2):
        debian.move_wheels("3.14", tmp_path)
        found: dict[str, dict[str, str]] = {}
        exec(file.read_text(), found)
        assert found["V"]["WHEEL_PKG_DIR"] == f"{tmp_path}/usr/share/python-wheels/"
        assert found["V"]["A"] == "--with=/usr/share/python-wheels"


@pytest.mark.parametrize(
    ("version", "folder", "said"), [("3.99", "new", "has no Python 3.99"), ("3.14", ".", "exists already")]
)
def test_what_cannot_be_done_is_said_in_one_line(
    version: str, folder: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["python_from_debian.py", version, str(tmp_path / folder)])
    monkeypatch.setattr(debian, "download", lambda url: lzma.compress(INDEX.encode()))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match=said):
        debian.main()
    assert list(tmp_path.iterdir()) == []
