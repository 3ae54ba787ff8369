"""Which release of torch this is: the oldest that is carried, the newest that was tried, and what is said of others.

Importing this imports no torch, so that a release that is too old is refused before anything of it is used.

NOTE [The oldest release]: 2.10 is the first in which the autograd engine can be given a guard for CUDA devices that
asks no driver: ``torch._C._ensureCUDADeviceGuardSet`` (torch/csrc/Module.cpp; c10/core/impl/FakeGuardImpl.h is in no
library of 2.9). Before, nothing of torch's own could stand in for one, and vramfit compiles nothing.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

from vramfit.errors import EnvironmentUnfitError

Release = tuple[int, int]

OLDEST: Release = (2, 10)
"""The oldest release that carries the virtual GPU. See NOTE [The oldest release]."""

NEWEST_TRIED: Release = (2, 15)
"""The newest release on which the tests have run."""

ADVICE = (
    f"Use a torch release from {OLDEST[0]}.{OLDEST[1]} to {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}, from PyPI, on Linux; "
    "or report this version."
)
"""What to do about a build that does not carry the virtual GPU."""

UNTRIED = "torch-not-tried"
"""Code of the warning that a run with a newer release has."""


def installed_version() -> str | None:
    """The version of the torch that this interpreter imports, such as ``2.15.0+cu132``, without importing it.

    None where there is none, or where it does not say.
    """
    loaded = sys.modules.get("torch")
    if loaded is not None:
        return str(getattr(loaded, "__version__", "")) or None
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    told = (
        Path(found.submodule_search_locations[0]) / "version.py"
    )  # tools/generate_torch_version.py writes it
    match = (
        re.search(r"^__version__ *= *['\"]([^'\"]+)", told.read_text(), re.MULTILINE)
        if told.is_file()
        else None
    )
    return match.group(1) if match else None


def release_of(version: str) -> Release | None:
    """Major and minor number of a version, a nightly's and a development build's too; None if it has none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return None if match is None else (int(match.group(1)), int(match.group(2)))


def at_least(major: int, minor: int) -> bool:
    """Whether the installed torch is of this release or a newer one; of a later one, where it does not say."""
    release = release_of(installed_version() or "")
    return release is None or release >= (major, minor)


def refuse_older() -> None:
    """Refuse an installed torch that is older than the oldest supported release.

    Raises:
        EnvironmentUnfitError: it is.
    """
    version = installed_version()
    if version is not None and not at_least(*OLDEST):
        raise EnvironmentUnfitError(
            f"torch {version} is too old: vramfit needs {dotted(OLDEST)} or later, the first that carries CUDA tensors "
            "without a driver",
            f"Install one: pip install --upgrade 'torch>={dotted(OLDEST)}'",
        )


def untried() -> str | None:
    """A sentence for a run with a newer torch than any that was tried; None if this one is known."""
    version = installed_version()
    release = release_of(version or "")
    if release is None or release <= NEWEST_TRIED:
        return None
    return (
        f"torch {version} is newer than {dotted(NEWEST_TRIED)}, the newest that vramfit was tried with: what it "
        "allocates differently is not known"
    )


def dotted(release: Release) -> str:
    """``2.10``."""
    return ".".join(map(str, release))
