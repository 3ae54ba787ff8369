"""A ``libcuda.so.1`` for machines without a driver: every function answers that there is no device.

Some releases of cuDNN link a part of theirs to the driver's library, and do without its functions while plans are made.
The stand-in has the functions that the parts name, and each returns ``CUDA_ERROR_NO_DEVICE`` (100): it never pretends
that there is a card, and where there is a driver it is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from vramfit.errors import UsageError
from vramfit.launch.starting import answer

_NAME = "libcuda.so.1"
_NO_DEVICE = 100
_COMPILING = 120
"""Seconds that a compiler may take; it takes less than one."""

_DYNSYM = 11
"""Type of an ELF section of symbols that are linked at run time (elf.h, ``SHT_DYNSYM``)."""


def has_driver() -> bool:
    """Whether this machine has the driver's library."""
    try:
        ctypes.CDLL(_NAME)
    except OSError:
        return False
    return True


def stand_in(library: Path, cache: Path) -> str | None:
    """The folder of a stand-in for the driver's library; None where none is needed.

    Args:
        library: the first library of a cuDNN, beside which its parts lie.
        cache: where it is kept: it is compiled once.

    Raises:
        UsageError: there is no compiler, or it failed.
    """
    wanted = sorted(
        {name for part in library.parent.glob("libcudnn*.so.9") for name in driver_functions(part)}
    )
    if not wanted or has_driver():
        return None
    source = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in wanted)
    folder = cache / f"no-device-{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if not (folder / _NAME).is_file():
        _compile(source, folder)
    return str(folder)


def _compile(source: str, folder: Path) -> None:
    """Make the library in a folder beside, and rename it."""
    compiler = _compiler()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="no-device-", dir=folder.parent) as name:
        code, made = Path(name) / "no_device.c", Path(name) / _NAME
        code.write_text(source)
        try:
            done = answer(
                [*compiler, "-shared", "-fPIC", f"-Wl,-soname,{_NAME}", "-o", str(made), str(code)],
                timeout=_COMPILING,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"cannot run {compiler[0]}: {error}", "Install a C compiler") from error
        if done.returncode or not made.is_file():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UsageError(
                f"{compiler[0]} could not make a stand-in for the driver: {last}", "See its message"
            )
        folder.mkdir(exist_ok=True)
        made.replace(folder / _NAME)


def _compiler() -> list[str]:
    """A C compiler's command line.

    Raises:
        UsageError: no C compiler was found.
    """
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise UsageError(
        "this cuDNN wants the driver's library, which is not here, and there is no C compiler to make a stand-in",
        "Install one, or: pip install ziglang",
    )


def driver_functions(library: Path) -> set[str]:
    """The driver's functions (``cuInit`` and the like) that an ELF library leaves to be linked at run time.

    A file that is not one, or not whole, wants none.
    """
    try:
        with library.open("rb") as file:
            return set(_undefined(file))
    except (struct.error, ValueError, IndexError):
        return set()


def _undefined(file: BinaryIO) -> Iterator[str]:
    head = file.read(64)
    if head[:5] != b"\x7fELF\x02":  # those of 64 bits alone
        return
    (at,), (size, count) = struct.unpack_from("<Q", head, 40), struct.unpack_from("<HH", head, 58)
    table = _piece(file, at, size * count)
    sections = [struct.unpack_from("<IIQQQQIIQQ", table, size * i) for i in range(count)]
    for _, kind, _, _, start, length, strings, _, _, entry in sections:
        if kind != _DYNSYM:
            continue
        symbols, names = _piece(file, start, length), _piece(file, *sections[strings][4:6])
        for place in range(0, length, entry):
            name_at, _, _, defined = struct.unpack_from("<IBBH", symbols, place)
            name = names[name_at : names.index(b"\0", name_at)].decode(errors="replace")
            if not defined and name.startswith("cu") and name[2:3].isupper():
                yield name


def _piece(file: BinaryIO, at: int, length: int) -> bytes:
    file.seek(at)
    return file.read(length)
