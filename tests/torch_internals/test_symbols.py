"""Names and sizes from symbol tables: of torch's own libraries, and of small ELF and Mach-O files made here."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from vramfit.torch_internals.symbols import SymbolTable, file_at
from vramfit.torch_internals.torch_libraries import library


def address_of(name: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library("torch_cpu"), name))


def test_what_torch_exports_is_found_under_its_name() -> None:
    name = "_ZN2at6detail12getCUDAHooksEv"
    address = address_of(name)
    found = file_at(address)
    assert found is not None and found.path.name.startswith("libtorch_cpu")
    table = SymbolTable(found.path)
    place = address - found.base + table.first_page
    names = table.names_at([place, place + 1])
    assert name in names[place] and names[place + 1] == ()
    assert table.size_at(place) > 0 and table.size_at(place + 1) == 0


def test_an_address_outside_of_libraries_has_no_file() -> None:
    assert file_at(8) is None


# -- files made here: three names at two addresses --------------------------------------------------------------------

FIRST, SECOND, LATER = 0x12340, 0x12380, 0x123A0
NAMES = b"\0_ZN1a1bEv\0_ZN1a1cEv\0_ZN1a1dEv\0file.cpp\0"
B, C, D, FILE = (NAMES.index(name) for name in (b"_ZN1a1bEv", b"_ZN1a1cEv", b"_ZN1a1dEv", b"file.cpp"))


def elf(lowest: int = 0, section_kind: int = 2) -> bytes:
    """An ELF file whose first segment begins at `lowest`, with one table of symbols."""
    function, file, section, undefined = 2, 4, 3, 0
    symbols = b"".join(
        struct.pack("<IBBHQQ", name, kind, 0, 1, value, size)
        for name, kind, value, size in (
            (0, undefined, 0, 0),
            (FILE, file, FIRST, 0),
            (0, section, FIRST, 0),
            (B, function, FIRST, 24),
            (C, function, FIRST, 24),
            (D, function, SECOND, 40),
        )
    )
    segments_at = 64
    symbols_at = segments_at + 56
    names_at = symbols_at + len(symbols)
    sections_at = names_at + len(NAMES)
    header = b"\x7fELF\x02\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, segments_at, sections_at, 0, 64, 56, 1, 64, 3, 0
    )
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, lowest, lowest, 4096, 4096, 4096)
    sections = [
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, size, 2, 0, 8, 24)
        for kind, at, size in ((0, 0, 0), (section_kind, symbols_at, len(symbols)), (3, names_at, len(NAMES)))
    ]
    return header + segment + symbols + NAMES + b"".join(sections)


def mach_o(lowest: int = 0) -> bytes:
    """A Mach-O library with the same symbols, whose names begin with an underscore and which have no sizes."""
    names = b"\0__ZN1a1bEv\0__ZN1a1cEv\0__ZN1a1dEv\0_later\0"
    defined, debugging, undefined = 0x0E, 0x24, 0x01
    symbols = b"".join(
        struct.pack("<IBBHQ", names.index(name) if name else 0, kind, 1, 0, value)
        for name, kind, value in (
            (b"", undefined, 0),
            (b"__ZN1a1bEv", debugging, FIRST),
            (b"__ZN1a1bEv", defined, FIRST),
            (b"__ZN1a1cEv", defined | 1, FIRST),
            (b"__ZN1a1dEv", defined, SECOND),
            (b"_later", defined, LATER),
        )
    )
    segment = struct.pack("<II16sQQQQIIII", 0x19, 72, b"__TEXT", lowest, 4096, 0, 4096, 5, 5, 0, 0)
    symbols_at = 32 + 72 + 24
    table = struct.pack(
        "<IIIIII", 2, 24, symbols_at, len(symbols) // 16, symbols_at + len(symbols), len(names)
    )
    header = struct.pack("<IIIIIIII", 0xFEEDFACF, 0x0100000C, 0, 6, 2, len(segment) + len(table), 0, 0)
    return header + segment + table + symbols + names


@pytest.mark.parametrize(
    ("content", "sizes"), [(elf(), (24, 40)), (mach_o(), (0x40, 0x20))], ids=["ELF", "Mach-O"]
)
def test_names_at_one_address_are_all_given(content: bytes, sizes: tuple[int, int], tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(content)
    table = SymbolTable(file)
    assert table.names_at([FIRST, SECOND, 0x1]) == {
        FIRST: ("_ZN1a1bEv", "_ZN1a1cEv"),
        SECOND: ("_ZN1a1dEv",),
        0x1: (),
    }
    assert (table.size_at(FIRST), table.size_at(SECOND), table.size_at(0x1)) == (*sizes, 0)
    assert (table.address_of("_ZN1a1cEv"), table.address_of("_ZN1a1dEv")) == (FIRST, SECOND)
    assert table.address_of("_ZN1a1") is None and table.address_of("file.cpp") is None


@pytest.mark.parametrize("content", [elf(0x400010), mach_o(0x400000)], ids=["ELF", "Mach-O"])
def test_the_first_page_may_have_an_address_of_its_own(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(content)
    assert SymbolTable(file).first_page == 0x400000


def test_a_stripped_library_still_has_what_it_exports(tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(elf(section_kind=11))
    assert SymbolTable(file).names_at([SECOND]) == {SECOND: ("_ZN1a1dEv",)}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GROUP ( libc.so.6 )",
        elf()[:100],
        elf()[:-70],
        mach_o()[:60],
        mach_o()[:130],
        elf(section_kind=1),
    ],
    ids=[
        "empty",
        "text",
        "ELF cut early",
        "ELF cut late",
        "Mach-O cut early",
        "Mach-O cut late",
        "no symbols",
    ],
)
def test_a_file_that_cannot_be_read_has_no_names(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "library"
    file.write_bytes(content)
    table = SymbolTable(file)
    assert len(table) == 0
    assert table.names_at([FIRST]) == {FIRST: ()} and table.size_at(FIRST) == 0
    assert table.address_of("_ZN1a1bEv") is None


def test_a_file_that_is_not_there_has_no_names(tmp_path: Path) -> None:
    assert len(SymbolTable(tmp_path / "none")) == 0
