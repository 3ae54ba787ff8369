"""The interpreters of this machine, by their version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_ASK = "import sys; print('%d.%d' % sys.version_info[:2])"


class NoPython(Exception):
    """A Python is not on this machine; says how to give one."""


def interpreter(version: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The interpreter of a version such as 3.12: the one that a variable names, else one that is found.

    Raises:
        NoPython: if there is none, or the variable names another.
    """
    variable = f"PYTHON_{version.replace('.', '_')}"
    if given := environ.get(variable):
        if (found := _version(Path(given))) != version:
            raise NoPython(f"{variable}={given} is {f'Python {found}' if found else 'no Python that starts'}")
        return Path(given)
    for candidate in _candidates(version, environ):
        if _version(candidate) == version:
            return candidate
    raise NoPython(f"Python {version} is not here: give one by {variable}=/path/to/python{version}")


def _candidates(version: str, environ: Mapping[str, str]) -> Iterator[Path]:
    yield Path(sys.executable)
    if on_path := shutil.which(f"python{version}", path=environ.get("PATH")):
        yield Path(on_path)
    # pyenv's commands on PATH start only the version that is chosen at the moment.
    pyenv = Path(environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(pyenv.glob(f"{version}.*/bin/python3"))


def _version(python: Path) -> str | None:
    """What an interpreter says of itself; None if it does not start."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
