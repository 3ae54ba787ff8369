"""One virtual environment for each group of requirements, with what stands in for torchvision's compiled part."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from pathlib import Path

from stranger_runs.manifest import REQUIREMENTS

_PROJECT = REQUIREMENTS.parents[2] / "pyproject.toml"

_DONE = "ready"
_FAILED = "failed.txt"

SCHEMAS = '''"""Beside another torch torchvision has no compiled operators: their schemas suffice here."""
import torch as _torch

if not hasattr(_torch.ops.torchvision, "nms"):
    _library = _torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
'''
"""Prepended to ``torchvision/_meta_registrations.py``, which registers rules for both and fails without them."""

UNCHECKED = '''

def check_integrity(fpath, md5=None):
    """Made-up data has other checksums: that the file is there is enough."""
    return os.path.isfile(fpath)
'''
"""Appended to ``torchvision/datasets/utils.py``: CIFAR compares checksums before it believes that it was downloaded."""

UNHASHED = '''

def validate_file(fpath, file_hash, algorithm="auto", chunk_size=65535):
    """Made-up data has other hashes: that the file is there is enough."""
    return os.path.isfile(fpath)
'''
"""Appended to ``keras/src/utils/file_utils.py``, for the same reason."""


class EnvironmentFailed(Exception):
    """The packages of a group do not install here; says which."""


def python_of(group: str, root: Path) -> Path:
    """The interpreter of a group's environment, which is made if it is not there; raises :class:`EnvironmentFailed`."""
    wanted = REQUIREMENTS / f"{group}.txt"
    alone = REQUIREMENTS / f"{group}-without-dependencies.txt"
    lists = [path for path in (wanted, alone) if path.is_file()]
    own = needed_by_vramfit()
    kept = [path.read_bytes() for path in lists] + [" ".join(own).encode()]
    # A changed patch must reach the environments that are there.
    kept += [patch.encode() for patch in (SCHEMAS, UNCHECKED, UNHASHED)]
    stamp = hashlib.sha256(b"".join(kept)).hexdigest()
    place = root / group
    python = place / "bin" / "python"
    if _says(place / _DONE, stamp):
        return python
    if _says(place / _FAILED, stamp):
        raise EnvironmentFailed(_reason(place))
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    for path in lists:
        options = ["--no-deps"] if path == alone else []
        _install(place, python, [*options, "-r", str(path)], stamp)
    _install(place, python, own, stamp)
    _adapt_torchvision(place)
    _append(place, "keras/src/utils/file_utils.py", UNHASHED)
    (place / _DONE).write_text(stamp, encoding="utf-8")
    return python


def needed_by_vramfit() -> list[str]:
    """The requirements of vramfit itself, as pip takes them; what a group has pinned already stays."""
    with _PROJECT.open("rb") as file:
        requirements: list[str] = tomllib.load(file)["project"]["dependencies"]
    return requirements


def folder_of(packages: tuple[str, ...], group: str, root: Path) -> Path:
    """A folder of packages that one script wants in other versions than its group has, to be put before those.

    It is made if it is not there; what the packages need is the group's, unless it is named too. Raises
    :class:`EnvironmentFailed`.
    """
    python = python_of(group, root)
    stamp = "+".join(packages)
    place = root / f"{group}+{stamp}"
    if _says(place / _DONE, stamp):
        return place
    if _says(place / _FAILED, stamp):
        raise EnvironmentFailed(_reason(place))
    place.mkdir(parents=True, exist_ok=True)
    _install(place, python, ["--no-deps", "--upgrade", "--target", str(place), *packages], stamp)
    (place / _DONE).write_text(stamp, encoding="utf-8")
    return place


def _install(place: Path, python: Path, what: list[str], stamp: str) -> None:
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        *what,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        (place / _FAILED).write_text(f"{stamp}\n{done.stdout}{done.stderr}", encoding="utf-8")
        raise EnvironmentFailed(_reason(place))


def _adapt_torchvision(place: Path) -> None:
    for package in place.glob("lib/python*/site-packages/torchvision"):
        meta = package / "_meta_registrations.py"
        if SCHEMAS not in (text := meta.read_text(encoding="utf-8")):
            meta.write_text(SCHEMAS + text, encoding="utf-8")
    _append(place, "torchvision/datasets/utils.py", UNCHECKED)


def _append(place: Path, module: str, addition: str) -> None:
    """Add to the end of an installed module, once; where it is not installed there is nothing to do."""
    for path in place.glob(f"lib/python*/site-packages/{module}"):
        if addition not in (text := path.read_text(encoding="utf-8")):
            path.write_text(text + addition, encoding="utf-8")


def _says(path: Path, stamp: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8").startswith(stamp)


def _reason(place: Path) -> str:
    lines = (place / _FAILED).read_text(encoding="utf-8").splitlines()[1:]
    errors = [line.strip() for line in lines if "error" in line.lower()] or lines[-1:]
    return errors[0] if errors else "pip failed without a word"
