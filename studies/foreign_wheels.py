"""What wheels of torch for machines that we do not have would tell the virtual GPU: read, not run.

    pip download --no-deps --only-binary=:all: --platform macosx_14_0_arm64 --python-version 3.11 torch==2.13.0
    python studies/foreign_wheels.py *.whl

For the two virtual tables that are used at run time, each entry's function is looked up in the symbol table of the
library, as `vramfit.torch_internals.virtual_tables` does in a process, and compared with the headers of the same wheel.
The pointers of a table come from the file: from relocations (ELF), or as the loader will find them (Mach-O).
"""

from __future__ import annotations

import argparse
import mmap
import re
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from vramfit.torch_internals.headers import declared
from vramfit.torch_internals.symbols import SymbolTable
from vramfit.torch_internals.virtual_tables import PREFIX, TableNames, methods_of

WORD = 8
SHT_RELA = 4
LC_SEGMENT_64 = 0x19
MACH_TARGET = (1 << 36) - 1  # mach-o/fixup-chains.h, dyld_chained_ptr_64_rebase: what is left is the chain


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A virtual table: its library, its symbol, what its methods' names begin with, and where they are declared."""

    label: str
    library: str
    symbol: str
    encodings: tuple[str, ...]
    headers: tuple[tuple[str, str], ...]


TABLES = (
    Wanted(
        label="CUDA hooks",
        library="libtorch_cpu",
        symbol="_ZTVN2at18CUDAHooksInterfaceE",
        encodings=("2at18CUDAHooksInterface", "2at25AcceleratorHooksInterface"),
        headers=(
            ("ATen/detail/AcceleratorHooksInterface.h", "AcceleratorHooksInterface"),
            ("ATen/detail/CUDAHooksInterface.h", "CUDAHooksInterface"),
        ),
    ),
    Wanted(
        label="no-op guard",
        library="libc10",
        symbol="_ZTVN3c104impl13FakeGuardImplILNS_10DeviceTypeE1EEE",
        encodings=("3c104impl13FakeGuardImplILNS_10DeviceTypeE1EE", "3c104impl24DeviceGuardImplInterface"),
        headers=(("c10/core/impl/DeviceGuardImplInterface.h", "DeviceGuardImplInterface"),),
    ),
)
FUNCTIONS = {
    "libtorch_cpu": "_ZN2at6detail12getCUDAHooksEv",
    "libc10": "_ZN3c104impl26device_guard_impl_registryE",
}
"""What is found by name at run time, beside the tables."""


def pointers(file: Path, start: int, length: int) -> list[int]:
    """What a table will hold, as addresses in the file."""
    with file.open("rb") as opened:
        data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    return (_elf_pointers if data[:4] == b"\x7fELF" else _mach_pointers)(data, start, length)


def _elf_pointers(data: mmap.mmap, start: int, length: int) -> list[int]:
    (at,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    found = [0] * length
    for section in range(count):
        kind, offset, size, link = struct.unpack_from("<4xI16xQQI", data, at + 64 * section)
        if kind != SHT_RELA:
            continue
        (symbols,) = struct.unpack_from("<24xQ", data, at + 64 * link)
        entries = np.frombuffer(data, "<u8, <u8, <i8", size // 24, offset)
        inside = (entries["f0"] >= start) & (entries["f0"] < start + length * WORD)
        for place, info, addend in entries[inside]:
            symbol = int(info) >> 32  # 0 for R_*_RELATIVE
            value = struct.unpack_from("<8xQ", data, symbols + 24 * symbol)[0] if symbol else 0
            found[(int(place) - start) // WORD] = value + int(addend)
    return found


def _mach_pointers(data: mmap.mmap, start: int, length: int) -> list[int]:
    (commands,) = struct.unpack_from("<16xI", data)
    position = 32
    for _ in range(commands):
        command, size = struct.unpack_from("<II", data, position)
        if command == LC_SEGMENT_64:
            address, extent, offset = struct.unpack_from("<24xQQQ", data, position)
            if address <= start < address + extent:
                words = struct.unpack_from(f"<{length}Q", data, offset + start - address)
                return [word & MACH_TARGET for word in words]
        position += size
    return [0] * length


def read(folder: Path, wanted: Wanted) -> list[str]:
    """The cells that a table of a wheel has in the printed one."""
    file = next((folder / "torch" / "lib").glob(f"{wanted.library}.*"))
    symbols = SymbolTable(file)
    start = symbols.address_of(wanted.symbol)
    found = "yes" if symbols.address_of(FUNCTIONS[wanted.library]) is not None else "no"
    by_header = declared(*wanted.headers, include=folder / "torch" / "include")
    if start is None:
        return [wanted.label, found, "no", str(by_header.length), "-", "-"]
    length = symbols.size_at(start) // WORD - PREFIX
    entries = pointers(file, start + PREFIX * WORD, length)
    named = symbols.names_at(entries)
    names = TableNames(
        of=wanted.label,
        symbols=[methods_of(named[entry], wanted.encodings) for entry in entries],
        declared=by_header,
    )
    agreed = [name for name, slot in by_header.slots.items() if names.by_symbol(name) == [slot]]
    against = sorted(set(by_header.slots) - set(agreed))
    return [
        wanted.label,
        found,
        str(length),
        str(by_header.length),
        str(len(agreed)),
        ", ".join(against) or "none",
    ]


def main(arguments: list[str] | None = None) -> None:
    """Read the wheels of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    printed = Table(
        "wheel", "table", "found by name", "entries", "by the headers", "methods agreed", "others"
    )
    for wheel in parser.parse_args(arguments).wheels:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
            needed = re.compile(
                r"torch/(lib/(libtorch_cpu|libc10)\.(so|dylib)|include/(ATen/detail|c10/core/impl)/\w+\.h)"
            )
            archive.extractall(folder, [name for name in archive.namelist() if needed.fullmatch(name)])
            for wanted in TABLES:
                printed.add_row(wheel.stem, *read(Path(folder), wanted))
    Console(width=160).print(printed)


if __name__ == "__main__":
    main()
