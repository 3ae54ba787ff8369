"""Which entry of a C++ class' virtual table is which method: by the library's symbols, and by torch's headers.

NOTE [How an entry gets its name]
1. The *symbol table* of the library names the function that an entry points to. That is certain, unless the linker
   gave several methods one address because their code is the same: then the entry has several names.
2. The *headers* give the order of the methods. They decide between the names that an entry has, and stand in for
   symbols that somebody stripped.
3. Where the two contradict each other, symbols are right. A name that neither settles is refused when it is asked for,
   and so is one that several methods have (overloads).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from vramfit.errors import EnvironmentUnfitError
from vramfit.torch_internals.headers import Declared
from vramfit.torch_internals.symbols import SymbolTable, file_at

WORD = ctypes.sizeof(ctypes.c_void_p)
PREFIX = 2
"""Words before the first entry: offset-to-top and type information (Itanium C++ ABI, "Virtual Table Layout")."""
_METHOD = r"_ZN[VKRO]*(?:{})(\d+)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableNames:
    """The entries of one class' virtual table by name.

    Attributes:
        of: the class.
        symbols: the symbols of each entry's function that are methods of the class or its bases: mangled, with names.
        declared: what the headers say.
    """

    of: str
    symbols: Sequence[Mapping[str, str]]
    declared: Declared

    @property
    def length(self) -> int:
        """Number of entries."""
        return len(self.symbols)

    def has(self, name: str) -> bool:
        """Whether this torch has such a method at all, as far as symbols and headers say."""
        declared = name in self.declared.slots or name in self.declared.several
        return declared or any(name in entry.values() for entry in self.symbols)

    def slot(self, name: str) -> int:
        """The entry of a method.

        Raises:
            EnvironmentUnfitError: it has none, several methods have the name, or nothing says which entry it is.
        """
        mangled = {symbol for entry in self.symbols for symbol, found in entry.items() if found == name}
        if len(mangled) > 1:
            raise self._refusal(name, "has several entries (it is overloaded)")
        entries = self.by_symbol(name)
        by_header = self.declared.slots.get(name)
        if by_header is not None and by_header < self.length:
            if by_header in entries or not (entries or self.symbols[by_header]):
                return by_header
            if len(entries) == 1:
                return entries[0]
            raise self._refusal(name, "is named by neither the symbols of torch's library nor its headers")
        if len(entries) == 1:
            return entries[0]
        raise self._refusal(
            name,
            "has several entries"
            if entries or name in self.declared.several
            else "is named by nothing that torch ships",
        )

    def by_symbol(self, name: str) -> list[int]:
        """The entries whose function has this name."""
        return [slot for slot, entry in enumerate(self.symbols) if name in entry.values()]

    def _refusal(self, name: str, reason: str) -> EnvironmentUnfitError:
        return EnvironmentUnfitError(
            f"torch {torch.__version__}: the entry of {self.of}::{name} in the virtual table {reason}",
            "Use a PyTorch wheel from PyPI; or report this version.",
        )


def table_names(of: str, table: int, encodings: Sequence[str], declared: Declared) -> TableNames:
    """Name the entries of a virtual table.

    Args:
        of: the class, for messages.
        table: the address of its first entry.
        encodings: the class and its bases as mangled names have them ("2at18CUDAHooksInterface").
        declared: what the headers say.

    Raises:
        EnvironmentUnfitError: nothing says how long the table is.
    """
    found = file_at(table)
    symbols = None if found is None else SymbolTable(found.path)
    length = declared.length
    if found is not None and symbols is not None:
        size = symbols.size_at(table - PREFIX * WORD - found.base + symbols.first_page)
        length = size // WORD - PREFIX if size else length
    if length is None or length <= 0:
        raise EnvironmentUnfitError(
            f"torch {torch.__version__}: neither symbols nor headers say how long the virtual table of {of} is",
            "Use a PyTorch wheel from PyPI; or report this version.",
        )
    entries = entries_of(table, length)
    if found is None or symbols is None:
        return TableNames(of=of, symbols=[{}] * length, declared=declared)
    shift = symbols.first_page - found.base
    names = symbols.names_at(entry + shift for entry in entries)
    return TableNames(
        of=of, symbols=[methods_of(names[entry + shift], encodings) for entry in entries], declared=declared
    )


def entries_of(table: int, length: int) -> tuple[int, ...]:
    """The addresses in a table."""
    return tuple(entry or 0 for entry in (ctypes.c_void_p * length).from_address(table))


def methods_of(mangled: Sequence[str], encodings: Sequence[str]) -> dict[str, str]:
    """Those of some symbols that are methods of the given classes, with the names of the methods."""
    method = re.compile(_METHOD.format("|".join(map(re.escape, encodings))))
    found = {}
    for symbol in mangled:
        if match := method.match(symbol):
            found[symbol] = symbol[match.end() : match.end() + int(match[1])]
    return found
