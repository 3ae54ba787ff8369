"""An environment for each row: torch in the wanted release and build, beside pinned packages or a month's libraries."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from torch_rows.libraries import Month
from torch_rows.rows import ROOT, Build, Row, project

CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("test", "frameworks")
_OWN = {"torch", "setuptools"}
"""Not as pinned for the developed release: the row's own, and what each release bounds by itself."""
_READY = "ready"
_ASK = "import torch; print(torch.__version__, torch.version.cuda)"


class CannotBuild(Exception):
    """The packages of a row do not install here; says why in a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What an environment is to hold.

    Attributes:
        name: of its folder.
        row: release, build and Python.
        packages: requirements, torch among them.
        pins: versions of what these need besides.
    """

    name: str
    row: Row
    packages: tuple[str, ...]
    pins: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """One that is there.

    Attributes:
        python: its interpreter.
        torch: the version that it says, with its build.
        seconds: what it took to make it, now or when it was made.
    """

    python: Path
    torch: str
    seconds: float


def environment(wanted: Wanted, interpreter: Path, folder: Path) -> Environment:
    """An environment, made if it is not there or was made of other packages; raises `CannotBuild`."""
    place = folder / wanted.name
    stamp = hashlib.sha256("\n".join([*wanted.packages, *wanted.pins]).encode()).hexdigest()
    ready = place / _READY
    there = ready.is_file() and _python(place).exists()  # not where its interpreter has gone away
    if there and (lines := ready.read_text(encoding="utf-8").split())[0] == stamp:
        return Environment(python=_python(place), torch=lines[1], seconds=float(lines[2]))
    began = time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    pinned = folder / f"{wanted.name}.constraints"
    folder.mkdir(parents=True, exist_ok=True)
    pinned.write_text("\n".join(wanted.pins), encoding="utf-8")
    _install(wanted, interpreter, place, pinned)
    torch = _checked(wanted.row, place)
    seconds = time.monotonic() - began
    ready.write_text(f"{stamp} {torch} {seconds:.1f}", encoding="utf-8")
    return Environment(python=_python(place), torch=torch, seconds=seconds)


def of_row(row: Row) -> Wanted:
    """The row's torch, and what vramfit, its tests and its examples need, as it is pinned."""
    extras = project()["optional-dependencies"]
    named = [text for extra in EXTRAS for text in extras[extra]]
    # torch 2.10 compiles with setuptools without asking for it.
    return Wanted(
        name=row.name, row=row, packages=_with_torch(row, [*named, "setuptools"]), pins=constraints()
    )


def of_month(month: Month, row: Row) -> Wanted:
    """A row's torch with the libraries of a month, and with what these ask for in its newest version that they take."""
    return Wanted(name=f"libraries-{month.name}", row=row, packages=_with_torch(row, month.packages), pins=())


def _with_torch(row: Row, packages: Sequence[str]) -> tuple[str, ...]:
    """Packages with a row's torch and what vramfit itself needs."""
    torch = f"torch=={row.release}{'+cpu' if row.build is Build.CPU and sys.platform != 'darwin' else ''}"
    named = [*project()["dependencies"], *packages]
    return (torch, *dict.fromkeys(text for text in named if Requirement(text).name != "torch"))


def constraints() -> tuple[str, ...]:
    """The pins of constraints.txt that hold for every release."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    return tuple(pin for pin in pins if canonicalize_name(Requirement(pin).name) not in _OWN)


def sources(row: Row, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Where torch's wheel is looked for beside the package index, as options of pip and of uv.

    A CUDA build is the index's own. A CPU build is where PIP_ARGS says, in a folder of wheels that pip is told of, or
    at PyTorch's own index.
    """
    if row.build is Build.CUDA:
        return []
    if given := shlex.split(environ.get("PIP_ARGS", "")):
        return given
    for folder in environ.get("PIP_FIND_LINKS", "").split():
        if any(Path(folder).glob(f"torch-{row.release}+cpu-*.whl")):
            return ["--find-links", folder]
    return ["--extra-index-url", CPU_WHEELS]


def _install(wanted: Wanted, interpreter: Path, place: Path, pinned: Path) -> None:
    options = ["--constraint", str(pinned), *sources(wanted.row), *wanted.packages]
    # A folder of wheels that pip is told of may hold the CPU build of the very release.
    environ = {name: value for name, value in os.environ.items() if name != "PIP_FIND_LINKS"}
    if uv := _uv():
        try:
            _run([uv, "venv", "--quiet", "--python", str(interpreter), str(place)], environ)
            install = [uv, "pip", "install", "--quiet", "--python", str(_python(place))]
            # As pip does: the best version of all indexes, not that of the first which has the package.
            _run([*install, "--index-strategy", "unsafe-best-match", *options], environ)
            return
        except CannotBuild:  # pip knows certificates and indexes that uv does not
            shutil.rmtree(place, ignore_errors=True)
    _run([str(interpreter), "-m", "venv", str(place)], environ)
    pip = [str(_python(place)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *options], environ)


def _uv() -> str | None:
    """uv beside this interpreter, else on PATH; None where it is not installed."""
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"error|×|because", line, re.IGNORECASE)]
        raise CannotBuild((telling or lines or [f"exit code {done.returncode}"])[0][:300])


def _checked(row: Row, place: Path) -> str:
    """The version of the torch that was installed; raises `CannotBuild` if it is of another build."""
    done = subprocess.run([_python(place), "-c", _ASK], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"torch cannot be imported: {done.stderr.strip().splitlines()[-1][:200]}")
    version, cuda = done.stdout.split()
    if (cuda == "None") is not (row.build is Build.CPU):
        raise CannotBuild(
            f"the package index gives torch {version}, which is not the {row.build.value} build"
        )
    return version


def _python(place: Path) -> Path:
    return place / "bin" / "python"
