"""Names for addresses inside loaded libraries, read from the symbol tables of their files (ELF and Mach-O).

``dladdr`` names what a library exports. torch's virtual methods are local symbols: they stand in the full table, which
the wheels of PyTorch keep and a distribution may strip. A file without one, or of another format, has no names here.

Layouts: elf.h (``Elf64_Ehdr``, ``Elf64_Phdr``, ``Elf64_Shdr``, ``Elf64_Sym``); mach-o/loader.h and mach-o/nlist.h
(``mach_header_64``, ``segment_command_64``, ``symtab_command``, ``nlist_64``).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ELF_64_LITTLE = b"\x7fELF\x02\x01"
_ELF_SEGMENT = np.dtype("<u4, <u4, <u8, <u8, <u8, <u8, <u8, <u8")
_ELF_SECTION = np.dtype("<u4, <u4, <u8, <u8, <u8, <u8, <u4, <u4, <u8, <u8")
_ELF_SYMBOL = np.dtype(
    {
        "names": ["name", "kind", "value", "size"],
        "formats": ["<u4", "u1", "<u8", "<u8"],
        "offsets": [0, 4, 8, 16],
    }
)
_PT_LOAD = 1
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_STT_OBJECT, _STT_FUNC = 1, 2

_MACH_64_LITTLE = b"\xcf\xfa\xed\xfe"
_MACH_SYMBOL = np.dtype(
    {
        "names": ["name", "kind", "value"],
        "formats": ["<u4", "u1", "<u8"],
        "offsets": [0, 4, 8],
        "itemsize": 16,
    }
)
_LC_SYMTAB, _LC_SEGMENT_64 = 2, 0x19
_N_STAB, _N_TYPE, _N_SECT = 0xE0, 0x0E, 0x0E


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFile:
    """The file that is mapped at an address, and where.

    Attributes:
        path: the file.
        base: the address of its first mapped page.
    """

    path: Path
    base: int


def file_at(address: int) -> LoadedFile | None:
    """The library that holds an address of this process; None where it is in none."""
    try:
        find = ctypes.CDLL(None).dladdr
    except (OSError, AttributeError, TypeError):
        return None  # Windows
    find.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    if not find(address, ctypes.byref(info)) or not info.file or info.base is None:
        return None
    return LoadedFile(path=Path(info.file.decode()), base=info.base)


def _is_elf_definition(kind: int) -> bool:
    return kind & 0xF in (_STT_OBJECT, _STT_FUNC)


def _is_mach_definition(kind: int) -> bool:
    return not kind & _N_STAB and kind & _N_TYPE == _N_SECT


class SymbolTable:
    """The functions and objects of one library's file, by their addresses in the file.

    Args:
        path: the file; one that cannot be read has no symbols.
    """

    def __init__(self, path: Path) -> None:
        self._data: mmap.mmap | bytes = b""
        self._entries: NDArray[Any] = np.empty(0, _ELF_SYMBOL)
        self._strings = 0
        self._prefix = b""
        self._is_named = _is_elf_definition
        self.first_page = 0
        """The address in the file that the first mapped page has."""
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            start = self._data[:8]
            if start.startswith(_ELF_64_LITTLE):
                self._read_elf()
            elif start.startswith(_MACH_64_LITTLE):
                self._read_mach()
        except (OSError, ValueError, struct.error):
            self._entries = self._entries[:0]

    def __len__(self) -> int:
        """Number of symbols."""
        return len(self._entries)

    def names_at(self, addresses: Iterable[int]) -> dict[int, tuple[str, ...]]:
        """The mangled names of what stands at each address: several where code is shared, none where it has no name."""
        names: dict[int, tuple[str, ...]] = dict.fromkeys(addresses, ())
        wanted = np.fromiter(names, np.uint64, len(names))
        # By sorting: with its table of positions numpy would take four times as long for half a million symbols. What
        # else has the value (sections, files, what is defined elsewhere) goes out afterwards: copies cost more still.
        for entry in self._entries[np.isin(self._entries["value"], wanted, kind="sort")]:
            if self._is_named(int(entry["kind"])):
                names[int(entry["value"])] += (self._name(int(entry["name"])),)
        return {address: tuple(dict.fromkeys(found)) for address, found in names.items()}

    def size_at(self, address: int) -> int:
        """Bytes of what stands at an address; 0 where that is not known.

        Mach-O keeps no sizes: there it is the distance to the next symbol, with what lies between them.
        """
        values = self._entries["value"]
        if "size" in (self._entries.dtype.names or ()):
            return int(self._entries["size"][values == address].max(initial=0))
        if not (values == address).any() or not (later := values[values > address]).size:
            return 0
        return int(later.min()) - address

    def address_of(self, name: str) -> int | None:
        """The address of a mangled name; None where the table does not have it."""
        text = b"\0" + self._prefix + name.encode() + b"\0"
        position = self._data.find(text, self._strings)
        if position < 0:
            return None
        for entry in self._entries[self._entries["name"] == position + 1 - self._strings]:
            if self._is_named(int(entry["kind"])):
                return int(entry["value"])
        return None

    def _read_elf(self) -> None:
        segments_at, sections_at = struct.unpack_from("<QQ", self._data, 32)
        segments, sections = struct.unpack_from("<2xH2xH", self._data, 54)
        loaded = self._array(_ELF_SEGMENT, segments_at, segments)
        first = min((int(one[3]) for one in loaded if one[0] == _PT_LOAD), default=0)
        self.first_page = first - first % mmap.PAGESIZE
        headers = self._array(_ELF_SECTION, sections_at, sections)
        for wanted in (_SHT_SYMTAB, _SHT_DYNSYM):
            for header in headers:
                if header[1] == wanted:
                    count = int(header[5]) // _ELF_SYMBOL.itemsize
                    self._entries = self._array(_ELF_SYMBOL, int(header[4]), count)
                    self._strings = int(headers[int(header[6])][4])
                    self._is_named = _is_elf_definition
                    return

    def _read_mach(self) -> None:
        commands = struct.unpack_from("<I", self._data, 16)[0]
        position = 32
        self._prefix = b"_"  # each name of C has one there
        for _ in range(commands):
            command, size = struct.unpack_from("<II", self._data, position)
            if command == _LC_SEGMENT_64 and self._data[position + 8 : position + 15] == b"__TEXT\0":
                self.first_page = struct.unpack_from("<Q", self._data, position + 24)[0]
            elif command == _LC_SYMTAB:
                at, count, self._strings = struct.unpack_from("<III", self._data, position + 8)
                self._entries = self._array(_MACH_SYMBOL, at, count)
                self._is_named = _is_mach_definition
            position += size

    def _array(self, kind: np.dtype[Any], start: int, count: int) -> NDArray[Any]:
        return np.frombuffer(self._data, kind, count, start)

    def _name(self, position: int) -> str:
        start = self._strings + position
        end, length = start, 256
        while True:
            text = self._data[start : end + length]
            if b"\0" in text or end + length >= len(self._data):
                return text.split(b"\0", 1)[0].removeprefix(self._prefix).decode(errors="replace")
            length *= 2
