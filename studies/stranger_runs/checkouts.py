"""Fresh checkouts of strangers' repositories at one commit, from local git directories or from GitHub."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path


class CheckoutError(Exception):
    """A repository or a commit of it cannot be had."""


def git_directory(repository: str, commit: str, mirrors: Path | None, cache: Path) -> Path:
    """A git directory that has the commit: of ``mirrors`` if given, else a shallow clone kept under ``cache``.

    Mirrors are folders ``owner+name``: a git directory, bare or not, or one called ``repo`` inside.
    """
    name = repository.replace("/", "+")
    if mirrors is not None:
        for found in (mirrors / name / "repo", mirrors / name):
            for place in (found / ".git", found):
                if (place / "objects").is_dir() and _has(place, commit):
                    return place
        raise CheckoutError(f"{mirrors} has no {name} with commit {commit}")
    place = cache / name
    if not _has(place, commit):
        place.mkdir(parents=True, exist_ok=True)
        _git(place, "init", "--quiet", "--bare")
        _git(place, "fetch", "--quiet", "--depth", "1", f"https://github.com/{repository}", commit)
    return place


def check_out(git: Path, commit: str, folders: tuple[str, ...], destination: Path) -> int:
    """Write the files of a commit under ``destination``; returns how many blobs the git directory lacked.

    Blobs are read one by one: ``git archive`` stops at the first that is missing, and mirrors leave large ones out.
    """
    missing = 0
    entries = list(_entries(git, commit, folders))
    with subprocess.Popen(
        ["git", f"--git-dir={git}", "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        for mode, blob, path in entries:
            reader.stdin.write(f"{blob}\n".encode())
            reader.stdin.flush()
            header = reader.stdout.readline().split()
            if header[-1] == b"missing":
                missing += 1
                continue
            content = reader.stdout.read(int(header[-1]))
            reader.stdout.read(1)
            _write(destination / path, mode, content)
        reader.stdin.close()
    return missing


def _entries(git: Path, commit: str, folders: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    listing = _git(git, "ls-tree", "-r", "-z", commit, "--", *folders)
    for line in listing.split("\0"):
        if not line:
            continue
        facts, _, path = line.partition("\t")
        mode, kind, blob = facts.split()
        if kind == "blob":  # others are submodules
            yield mode, blob, path


def _write(path: Path, mode: str, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode == "120000":
        path.symlink_to(content.decode())
    else:
        path.write_bytes(content)
        path.chmod(0o755 if mode == "100755" else 0o644)


def copy(source: Path, destination: Path) -> None:
    """Copy a file, or the content of a folder into one that may be there already."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, destination, dirs_exist_ok=True, symlinks=True)
    else:
        shutil.copy2(source, destination)


def _has(git: Path, commit: str) -> bool:
    if not (git / "objects").is_dir():
        return False
    asked = ["git", f"--git-dir={git}", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


def _git(git: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", f"--git-dir={git}", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CheckoutError(f"git {' '.join(arguments[:3])}: {done.stderr.strip()}")
    return done.stdout
