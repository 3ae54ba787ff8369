"""Compiled readers and writers that take a path: they are given the real path of what lies in the overlay.

Each is replaced as soon as its module is imported. A library that is not listed reads what is on disk, and Landlock
keeps it from writing where the kernel has it.
"""

from __future__ import annotations

import builtins
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from vramfit.files import real, sparse_files
from vramfit.files.calls import Calls
from vramfit.files.overlay import Where
from vramfit.files.patches import databases
from vramfit.patching import PatchStack, after_import

_REPLACED = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_KEPT = os.O_RDWR | os.O_CREAT

_Table = Mapping[str, tuple[tuple[str, int], ...]]

_READERS: _Table = {
    "torch": (("_C.PyTorchFileReader", 0), ("jit.load", 0)),
    "safetensors._safetensors_rust": (("safe_open", 0),),
    "tokenizers": (("Tokenizer.from_file", 0),),
    "cv2": (("imread", 0),),
    "soundfile": (("read", 0),),
    "pyarrow.parquet": (("read_table", 0), ("ParquetFile", 0)),
    "pyarrow.feather": (("read_table", 0), ("read_feather", 0)),
    "pyarrow.lib": (("input_stream", 0),),
    "pyarrow.ipc": (("open_file", 0), ("open_stream", 0)),
    "pyarrow.csv": (("read_csv", 0), ("open_csv", 0)),
    "pyarrow.json": (("read_json", 0), ("open_json", 0)),
    "sentencepiece": (("SentencePieceProcessor.Load", 1),),
}
"""Module to functions that read a file, each with the position of its path."""
_WRITERS: _Table = {
    "torch": (
        ("_C.ScriptModule.save", 1),
        ("_C.ScriptFunction.save", 1),
        ("_C._autograd._ProfilerResult.save", 1),
        ("_C._profiler._add_execution_trace_observer", 0),
    ),
    "safetensors._safetensors_rust": (("serialize_file", 1),),
    "tokenizers": (("Tokenizer.save", 1),),
    "cv2": (("imwrite", 0),),
    "soundfile": (("write", 0),),
    "pyarrow.parquet": (("ParquetWriter", 0),),
    "pyarrow.feather": (("write_feather", 1),),
    "pyarrow.lib": (("output_stream", 0),),
    "pyarrow.ipc": (("new_file", 0), ("new_stream", 0)),
    "pyarrow.csv": (("write_csv", 1), ("CSVWriter", 0)),
    "onnx": (("save", 1), ("save_model", 1)),
}
"""The same, for functions that write a file anew."""
_FOLDER_WRITERS: _Table = {"tokenizers": (("models.Model.save", 1),)}
"""The same, for functions that write files into a folder that is there."""


def install(calls: Calls, patches: PatchStack, *, guarded: bool) -> None:
    """Replace them, now or as soon as they are imported.

    `guarded` means that the kernel refuses what is not led away.
    """
    special: dict[str, Callable[[Calls, ModuleType, PatchStack], None]] = {
        "torch": _torch,
        "pyarrow.lib": _arrow,
        "h5py.h5f": _h5py,
        "_dbm": _dbm,
        "_gdbm": _dbm,
        "numpy.lib._datasource": _numpy,
    }

    def there(path: Any) -> Any:  # what does not exist, the reader says itself
        return path if calls.overlay.untouched() else calls.place(path).real

    kinds: tuple[tuple[_Table, Callable[[Any], Any]], ...] = (
        (_READERS, there),
        (_WRITERS, lambda path: calls.locate(path, _REPLACED)),
        (_FOLDER_WRITERS, calls.folder_to_fill),
    )

    def treat(name: str, module: ModuleType) -> None:
        table: list[tuple[object, object]] = []
        for functions, where in kinds:
            for path, position in functions.get(name, ()):
                _replace(module, path, partial(_changed, position=position, where=where), patches, table)
        if name in special:
            special[name](calls, module, patches)
        if table:
            patches.rebind(table)

    after_import({name: partial(treat, name) for name in {*_READERS, *_WRITERS, *special}}, patches)
    databases.install(calls, patches, guarded=guarded)


def _replace(
    module: ModuleType,
    path: str,
    make: Callable[[Any], Any],
    patches: PatchStack,
    table: list[tuple[object, object]],
) -> None:
    owner: Any = module
    *folders, name = path.split(".")
    for one in folders:
        owner = getattr(owner, one, None)
    old = getattr(owner, name, None)
    if old is None:
        return
    new = make(old)
    is_static = isinstance(owner, type) and isinstance(vars(owner).get(name), staticmethod)
    patches.set(owner, name, staticmethod(new) if is_static else new)
    if not isinstance(owner, type):
        table.append((old, new))


def _at(args: Sequence[Any], position: int, options: dict[str, Any], change: Callable[[Any], Any]) -> Any:
    """Arguments with the path at a position changed, or the one given by a usual name."""
    changed = list(args)
    if position < len(changed):
        if _is_path(changed[position]):
            changed[position] = change(changed[position])
        return changed, options
    for name in ("filename", "path", "file", "where", "dest", "f", "source"):
        if _is_path(options.get(name)):
            return changed, options | {name: change(options[name])}
    return changed, options


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, bytes, os.PathLike))


def _changed(old: Any, position: int, where: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function that is given the real path in place of the one at a position."""

    def change(path: Any) -> Any:
        return _like(path, where(path))

    @functools.wraps(old, updated=())
    def write(*args: Any, **options: Any) -> Any:
        given, named = _at(args, position, options, change)
        return old(*given, **named)

    return write


def _like(path: Any, where: str) -> Any:
    return os.fsencode(where) if isinstance(path, bytes) else where


def _torch(calls: Calls, module: ModuleType, patches: PatchStack) -> None:
    """Files that torch writes and maps in C++; those that it opens in Python need nothing."""
    torch: Any = module

    class PyTorchFileWriter(torch._C.PyTorchFileWriter):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self, file: Any, *args: Any, **options: Any) -> None:
            self._where: str | None = None
            if _is_path(file):
                file = self._where = calls.locate(file, _REPLACED)
            super().__init__(file, *args, **options)

        def write_end_of_file(self) -> None:
            super().write_end_of_file()
            if self._where is not None and self._where.startswith(calls.overlay.upper):
                sparse_files.settle_path(calls.overlay.disk, self._where, calls.overlay.seen_as(self._where))

    def from_file(old: Any, position: int) -> Callable[..., Any]:
        def change(path: Any, shared: bool) -> str:
            return calls.locate(path, _KEPT) if shared else calls.place(path).real

        @functools.wraps(old, updated=())
        def made(*args: Any, **options: Any) -> Any:
            rest = args[position + 1 :]
            shared = bool(options.get("shared", rest[0] if rest else False))
            given, named = _at(args, position, options, lambda path: change(path, shared))
            return old(*given, **named)

        return made

    patches.set(torch._C, "PyTorchFileWriter", PyTorchFileWriter)
    patches.set(torch, "from_file", from_file(torch.from_file, 0))
    patches.set(torch.UntypedStorage, "from_file", staticmethod(from_file(torch.UntypedStorage.from_file, 0)))


def _arrow(calls: Calls, module: ModuleType, patches: PatchStack) -> None:
    """Lead away files of Arrow: data sets of Hugging Face are written through Python, and mapped here."""
    lib: Any = module

    def flags_of(mode: str) -> int:
        return _REPLACED if mode.startswith("w") else _KEPT

    class OSFile(lib.OSFile):  # type: ignore[misc,name-defined,unused-ignore]
        def __new__(cls, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            where = calls.place(path).real if mode.startswith("r") else calls.locate(path, flags_of(mode))
            return super().__new__(cls, where, mode, *args, **options)

    def memory_map(path: Any, mode: str = "r") -> Any:
        where = calls.place(path).real if mode in ("r", "rb") else calls.locate(path, _KEPT)
        return mapped(where, mode)

    mapped = lib.memory_map
    created = _changed(lib.create_memory_map, 0, lambda path: calls.locate(path, _REPLACED))
    table = (("OSFile", OSFile), ("memory_map", memory_map), ("create_memory_map", created))
    for name, new in table:
        old = getattr(lib, name)
        patches.set(lib, name, new)
        patches.rebind([(old, new)])


def _numpy(calls: Calls, module: ModuleType, patches: PatchStack) -> None:
    """`numpy.savetxt` and `genfromtxt` keep ``io.open`` in a table (numpy/lib/_datasource.py: _FileOpeners)."""
    table = getattr(getattr(module, "_file_openers", None), "_file_openers", None)
    if isinstance(table, dict) and table.get(None) is real.open_file:
        patches.item(table, None, builtins.open)


def _h5py(calls: Calls, module: ModuleType, patches: PatchStack) -> None:
    """HDF5 opens files in C (h5py/h5f.pyx: create and open)."""
    h5f: Any = module
    create, opened = h5f.create, h5f.open

    def create_there(name: Any, flags: int = 2, *args: Any, **options: Any) -> Any:
        only_new = os.O_EXCL if flags & h5f.ACC_EXCL else os.O_TRUNC
        where = calls.locate(name, os.O_RDWR | os.O_CREAT | only_new)
        return create(os.fsencode(where), flags, *args, **options)

    def open_there(name: Any, flags: int = 0, *args: Any, **options: Any) -> Any:
        where = calls.locate(name, os.O_RDWR) if flags & h5f.ACC_RDWR else calls.reading(name)
        return opened(os.fsencode(where), flags, *args, **options)

    patches.set(h5f, "create", create_there)
    patches.set(h5f, "open", open_there)


def _dbm(calls: Calls, module: ModuleType, patches: PatchStack) -> None:
    """Lead away files of dbm; ndbm makes several, each with an ending."""
    dbm: Any = module
    opened = dbm.open

    def open_there(filename: Any, flags: str = "r", mode: int = 0o666) -> Any:
        name = os.fsdecode(filename)
        endings = ("", ".db", ".pag", ".dir")
        writing = flags[:1] in ("w", "c", "n")
        place = calls.place(name)
        where = place.real
        if writing and place.where is not Where.THROUGH:
            with calls.overlay.changing():
                for ending in endings:
                    beside = calls.place(name + ending)
                    if beside.found is not None:
                        calls.overlay.copy_up(beside)
                where = calls.overlay.prepare(calls.place(name))
        else:
            found = next(
                (one for one in map(calls.place, (name + end for end in endings)) if one.found), None
            )
            if found is not None and place.found is None:
                where = found.real[: len(found.real) - len(found.name) + len(place.name)]
        return opened(where, flags, mode)

    patches.set(dbm, "open", open_there)
