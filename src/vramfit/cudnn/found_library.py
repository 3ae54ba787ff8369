"""Finds a cuDNN that the user has installed, and what it needs to be loaded; refuses one that cannot be asked.

Nothing is loaded here: a library that does not fit may end the process that loads it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vramfit.errors import UsageError
from vramfit.options.cudnn_choice import AUTO

LEAST = 90800
"""The first cuDNN that answers for a card which is only described (cudnn-frontend, ``backend/device_properties.h``)."""

_LIBRARY = "libcudnn.so.9"
_PARTS = ("graph", "heuristic", "engines_precompiled", "engines_runtime_compiled")
"""Libraries that it loads while it makes plans."""

_SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64")
_INSTALL = "pip install nvidia-cudnn-cu13 nvidia-cublas"

_MACHINES = {62: "x86-64", 183: "64-bit Arm"}
"""ELF numbers of machines (elf.h, ``e_machine``)."""

OF_WHEEL = {
    (2, 8): 91002,
    (2, 9): 91002,
    (2, 10): 91002,
    (2, 11): 91900,
    (2, 12): 92000,
    (2, 13): 92000,
    (2, 14): 92400,
    (2, 15): 92600,
}
"""cuDNN that the default wheel of each torch release asks for (its ``nvidia-cudnn-cu12`` or ``-cu13`` requirement on
PyPI), in cuDNN's own numbering: 9.19.0 is 91900."""

OF_NEWER = 92600
"""What later releases count as: the last one known."""


def of_torch(torch_version: tuple[int, int]) -> int:
    """The cuDNN of a torch release's default wheel, in cuDNN's own numbering."""
    return OF_WHEEL.get(torch_version, OF_NEWER)


def dotted(version: int) -> str:
    """A version in cuDNN's own numbering as people write it: 91002 is 9.10.2."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CudnnInstallation:
    """A cuDNN on this machine.

    Attributes:
        library: its first library.
        version: in cuDNN's own numbering; 0 where only the library itself could say.
        needs: folders of the libraries that it looks for.
    """

    library: str
    version: int
    needs: tuple[str, ...]


def find_cudnn(wanted: str) -> CudnnInstallation:
    """Find what ``--cudnn`` names.

    Args:
        wanted: ``auto``, the path of a library, or of a folder that holds one (itself, its ``lib``, or the
            ``nvidia/cudnn`` of a folder of packages).

    Raises:
        UsageError: there is none, it is too old, of another machine's kind, or not whole.
    """
    if sys.platform != "linux":
        raise UsageError(
            f"cuDNN can be asked on Linux only, and this is {platform.system()}", "Leave --cudnn out"
        )
    library = _first_found(wanted)
    _check_machine(library)
    folder = library.parent
    missing = [name for name in _PARTS if not (folder / f"libcudnn_{name}.so.9").exists()]
    if missing:
        raise UsageError(
            f"the cuDNN in {folder} is not whole: libcudnn_{missing[0]}.so.9 is missing", "Install it again"
        )
    version = _version(folder)
    if version and version < LEAST:
        raise UsageError(
            f"the cuDNN in {folder} is {dotted(version)}, and cuDNN answers without a card from "
            f"{dotted(LEAST)} on",
            f"Install a newer one: {_INSTALL}",
        )
    return CudnnInstallation(library=str(library), version=version, needs=_needs(folder))


def _first_found(wanted: str) -> Path:
    """The library that is meant.

    Raises:
        UsageError: cuDNN was not found.
    """
    if wanted != AUTO:
        named = Path(wanted).expanduser()
        if named.is_file():
            return named.absolute()
        if not named.is_dir():
            raise UsageError(f"there is no cuDNN at {wanted}", "Name its library, its folder, or auto")
        folders = list(_beneath(named))
    else:
        folders = list(_usual_folders())
    for folder in folders:
        if (folder / _LIBRARY).is_file():
            return (folder / _LIBRARY).absolute()
    older = next((found for folder in folders for found in folder.glob("libcudnn.so.[78]")), None)
    if older is not None:
        raise UsageError(
            f"{older} is of cuDNN {older.name[-1]}, and cuDNN answers without a card from {dotted(LEAST)} on",
            f"Install a newer one: {_INSTALL}",
        )
    where = "this machine" if wanted == AUTO else wanted
    raise UsageError(f"no {_LIBRARY} was found in {where}", f"Install one: {_INSTALL}")


def _beneath(folder: Path) -> Iterator[Path]:
    for below in ("", "lib", "lib64", "nvidia/cudnn/lib", "cudnn/lib"):
        yield folder / below


def _usual_folders() -> Iterator[Path]:
    """Where it may lie: packages of the index, torch's own, and what the loader looks through."""
    for entry in sys.path:
        yield Path(entry or ".") / "nvidia" / "cudnn" / "lib"
        yield Path(entry or ".") / "torch" / "lib"
    named = os.environ.get("CUDNN_PATH")
    if named:
        yield from _beneath(Path(named))
    yield from (Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one)
    yield from map(Path, _SYSTEM)


def _needs(folder: Path) -> tuple[str, ...]:
    """Folders of what it looks for: beside it, in the packages beside its own, and in the system's."""
    packages = folder.parent.parent  # nvidia/
    found = [folder, packages / "cublas" / "lib", packages / "cuda_nvrtc" / "lib"]
    found += sorted(packages.glob("cu[0-9]*/lib"))
    there = [str(one) for one in found if one.is_dir()]
    searched = (*there, *os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_SYSTEM)
    if not any(_holds_cublaslt(one) for one in searched if one):
        cuda = _cuda_of_package(folder)
        name = "nvidia-cublas" if cuda is None or cuda >= 13 else f"nvidia-cublas-cu{cuda}"
        raise UsageError(
            f"the cuDNN in {folder} needs cuBLASLt, which was not found", f"Install it: pip install {name}"
        )
    return tuple(there)


def _holds_cublaslt(folder: str) -> bool:
    return any(Path(folder).glob("libcublasLt.so.*"))


def _check_machine(library: Path) -> None:
    """Refuse a file that is no library of this kind of machine."""
    own, its = _elf_machine(Path(sys.executable)), _elf_machine(library)
    if its is None:
        raise UsageError(f"{library} is no shared library of Linux", "Name a libcudnn.so.9")
    if own is not None and its != own:
        raise UsageError(
            f"{library} is for {_MACHINES.get(its, f'machine {its}')}, and this is "
            f"{_MACHINES.get(own, platform.machine())}",
            f"Install one for this machine: {_INSTALL}",
        )


def _elf_machine(file: Path) -> int | None:
    """``e_machine`` of an ELF file, None for any other file."""
    try:
        with file.open("rb") as stream:
            head = stream.read(20)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}", "Name a libcudnn.so.9") from error
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    return int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")


def _version(folder: Path) -> int:
    """The version of a library, as its header, its package or the full name of its file say it; 0 if none does."""
    return next((version for version in _versions(folder) if version), 0)


def _versions(folder: Path) -> Iterator[int]:
    header = folder.parent / "include" / "cudnn_version.h"
    if header.is_file():
        text = header.read_text(errors="replace")
        yield _numbered(
            re.findall(rf"#define CUDNN_{part}\s+(\d+)", text)[:1]
            for part in ("MAJOR", "MINOR", "PATCHLEVEL")
        )
    for record in folder.parent.parent.parent.glob("nvidia_cudnn_cu*.dist-info"):
        parts = record.name.removesuffix(".dist-info").partition("-")[2].split(".")
        yield _numbered([part] for part in parts[:3])
    name = (folder / _LIBRARY).resolve().name
    yield _numbered([part] for part in name.removeprefix("libcudnn.so.").split("."))


def _numbered(parts: Iterable[list[str]]) -> int:
    """Three numbers as one, as cuDNN has it; 0 where one is missing."""
    numbers = [int(part[0]) for part in parts if part and part[0].isdecimal()]
    return numbers[0] * 10000 + numbers[1] * 100 + numbers[2] if len(numbers) == 3 else 0


def _cuda_of_package(folder: Path) -> int | None:
    """The CUDA for which a package of the index was built."""
    for record in folder.parent.parent.parent.glob("nvidia_cudnn_cu*.dist-info"):
        return int(record.name.removeprefix("nvidia_cudnn_cu").partition("-")[0])
    return None
