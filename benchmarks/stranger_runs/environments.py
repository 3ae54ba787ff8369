"""One virtual environment for each group of requirements, with what stands in for torchvision's compiled part."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from stranger_runs.manifest import REQUIREMENTS

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


class EnvironmentFailed(Exception):
    """The packages of a group do not install here; says which."""


def python_of(group: str, root: Path) -> Path:
    """The interpreter of a group's environment, which is made if it is not there; raises :class:`EnvironmentFailed`."""
    wanted = REQUIREMENTS / f"{group}.txt"
    alone = REQUIREMENTS / f"{group}-without-dependencies.txt"
    lists = [path for path in (wanted, alone) if path.is_file()]
    stamp = hashlib.sha256(b"".join(path.read_bytes() for path in lists)).hexdigest()
    place = root / group
    python = place / "bin" / "python"
    if _says(place / _DONE, stamp):
        return python
    if _says(place / _FAILED, stamp):
        raise EnvironmentFailed(_reason(place))
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    for path in lists:
        options = ["--no-deps"] if path == alone else []
        _install(place, python, path, options, stamp)
    _adapt_torchvision(place)
    (place / _DONE).write_text(stamp, encoding="utf-8")
    return python


def _install(place: Path, python: Path, requirements: Path, options: list[str], stamp: str) -> None:
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--quiet",
        *options,
        "-r",
        requirements,
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
        utils = package / "datasets" / "utils.py"
        if UNCHECKED not in (text := utils.read_text(encoding="utf-8")):
            utils.write_text(text + UNCHECKED, encoding="utf-8")


def _says(path: Path, stamp: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8").startswith(stamp)


def _reason(place: Path) -> str:
    lines = (place / _FAILED).read_text(encoding="utf-8").splitlines()[1:]
    errors = [line.strip() for line in lines if "error" in line.lower()] or lines[-1:]
    return errors[0] if errors else "pip failed without a word"
