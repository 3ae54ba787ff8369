"""The files of a data set: a ``.npy`` file for each field, and a description that is written last.

They are written into a folder of another name, brought to the disk, and given their name: who opens a data set finds
all of it or none. A folder that a killed process left is removed when the next data set is written beside it.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from vramfit.arguments import shown
from vramfit.errors import UsageError
from vramfit.runtime.tiers.owned_folders import OwnedFolder
from vramfit.writing import StrPath, refused

FORMAT = "vramfit.dataset/1"
DESCRIPTION = "dataset.json"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z")
_AT_ONCE = 16 << 20
"""Bytes that are gathered before they are written."""

_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""How values are stored whose dtype NumPy has not (bfloat16, float8): by their bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldLayout:
    """One field of a data set.

    Attributes:
        dtype: of its values in torch.
        shape: of one sample.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of one sample."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetLayout:
    """What a data set holds: samples, and fields by their names."""

    length: int
    fields: dict[str, FieldLayout]


def field_path(folder: Path, name: str) -> Path:
    """The file of a field."""
    return folder / f"{name}.npy"


def read_layout(folder: Path) -> DatasetLayout:
    """The layout of a data set, its files checked for their sizes.

    Raises:
        UsageError: there is none, or it was not written to its end.
    """
    if not folder.is_dir():
        raise UsageError(
            f"there is no data set {folder}", "Check the path; write one with MappedDataset.write"
        )
    try:
        found = json.loads((folder / DESCRIPTION).read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {DESCRIPTION}: it is no data set, or one that was not written to its end",
            "Write it anew",
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / DESCRIPTION} cannot be read: {error}", "Write the data set anew"
        ) from None
    try:
        if found["format"] != FORMAT:
            raise UsageError(
                f"{folder} has the format {shown(found['format'])}, not {FORMAT}",
                "Write it with this version",
            )
        fields = {
            str(name): FieldLayout(
                dtype=_dtype(one["dtype"]), shape=tuple(int(size) for size in one["shape"])
            )
            for name, one in found["fields"].items()
        }
        layout = DatasetLayout(length=int(found["length"]), fields=fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder / DESCRIPTION} describes no data set: {type(error).__name__} {error}",
            "Write the data set anew",
        ) from None
    for name, field in layout.fields.items():
        _check_size(field_path(folder, name), _header(field, layout.length), field.nbytes * layout.length)
    return layout


def _check_size(path: Path, header: bytes, nbytes: int) -> None:
    size = path.stat().st_size if path.is_file() else 0
    if size == len(header) + nbytes:
        with path.open("rb") as stream:
            if stream.read(len(header)) == header:
                return
    raise UsageError(
        f"{path} has {size} bytes and not the {len(header) + nbytes} of its field: it was cut off or replaced",
        "Write the data set anew",
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch has no dtype {name}", "Read the data set with a newer torch")
    return found


def stored_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype that a field's file has."""
    known = dtype if is_in_numpy(dtype) else bits_of(dtype)
    return torch.empty(0, dtype=known).numpy().dtype


def bits_of(dtype: torch.dtype) -> torch.dtype:
    """What a dtype is stored as that NumPy has not."""
    return _BITS[dtype.itemsize]


def _header(field: FieldLayout, length: int) -> bytes:
    """The beginning of a field's file; NumPy leaves room in it for a length that grows."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(stored_dtype(field.dtype))
    np.lib.format.write_array_header_1_0(
        stream, {"descr": descr, "fortran_order": False, "shape": (length, *field.shape)}
    )
    return stream.getvalue()


class _FieldFile:
    """A field's file while it is written."""

    def __init__(self, path: Path, field: FieldLayout) -> None:
        self.field, self._path = field, path
        with _explained(path):
            self._stream: BinaryIO = path.open("xb")
            self._stream.write(_header(field, 0))

    def write(self, values: torch.Tensor) -> None:
        plain = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if not is_in_numpy(plain.dtype):
            plain = plain.view(bits_of(plain.dtype))
        with _explained(self._path):
            self._stream.write(plain.numpy().reshape(-1).view(np.uint8).data)

    def end(self, length: int) -> None:
        with _explained(self._path):
            self._stream.seek(0)
            self._stream.write(_header(self.field, length))
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is left to write after an error is of no use
            self._stream.close()


@cache
def is_in_numpy(dtype: torch.dtype) -> bool:
    """Whether NumPy has the dtype."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return False
    return True


def write_arrays(path: StrPath, fields: Mapping[str, Any]) -> None:
    """Write fields that are there as arrays or tensors, piece by piece, so that they may be mapped files themselves.

    Raises:
        UsageError: they are of different lengths, or nothing that a field can be.
        WriteError: there is no room, or no permission.
    """
    arrays = {name: _array(name, values) for name, values in fields.items()}
    lengths = {name: len(values) for name, values in arrays.items()}
    if not lengths or len(set(lengths.values())) != 1:
        told = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "there are none"
        raise UsageError(f"fields need the same length: {told}", "Give arrays with one entry a sample")
    (length,) = set(lengths.values())
    with _new_folder(path) as folder, contextlib.ExitStack() as opened:
        layouts = {}
        for name, values in arrays.items():
            field = layouts[name] = _layout_of(_piece(values, 0, 0))
            file = _FieldFile(field_path(folder, name), field)
            opened.callback(file.close)
            step = max(1, _AT_ONCE // max(1, field.nbytes))
            for start in range(0, length, step):
                file.write(_piece(values, start, min(length, start + step)))
            file.end(length)
        _describe(folder, DatasetLayout(length=length, fields=layouts))


def write_samples(path: StrPath, samples: Iterable[Mapping[str, Any]]) -> None:
    """Write samples one after another; they need not be there at once.

    Raises:
        UsageError: they have not all the same fields, shapes and dtypes.
        WriteError: there is no room, or no permission.
    """
    with _new_folder(path) as folder, contextlib.ExitStack() as opened:
        files: dict[str, _FieldFile] = {}
        waiting: list[dict[str, torch.Tensor]] = []
        length, each = 0, 1
        for number, sample in enumerate(samples):
            given = _sample(number, sample)
            if not files:
                for name, values in given.items():
                    file = files[name] = _FieldFile(field_path(folder, name), _layout_of(values[None]))
                    opened.callback(file.close)
                each = max(1, sum(one.field.nbytes for one in files.values()))
            _check_alike(number, given, files)
            waiting.append(given)
            length += 1
            if len(waiting) * each >= _AT_ONCE:
                _write_waiting(files, waiting)
        if not files:
            raise UsageError(
                "there are no samples", "Give at least one: it tells the fields and their shapes"
            )
        _write_waiting(files, waiting)
        for file in files.values():
            file.end(length)
        _describe(
            folder, DatasetLayout(length=length, fields={name: one.field for name, one in files.items()})
        )


def _write_waiting(files: Mapping[str, _FieldFile], waiting: list[dict[str, torch.Tensor]]) -> None:
    if waiting:
        for name, file in files.items():
            file.write(torch.stack([sample[name] for sample in waiting]))
    waiting.clear()


def _sample(number: int, sample: Any) -> dict[str, torch.Tensor]:
    if not isinstance(sample, Mapping) or not sample:
        raise UsageError(
            f"sample {number} is {shown(sample)}, which has no names for its fields",
            "Give mappings such as {'image': tensor, 'label': 3}",
        )
    return {_checked_name(name): _sample_tensor(number, name, value) for name, value in sample.items()}


def _check_dense(name: str, values: torch.Tensor) -> None:
    """Make sure that a tensor has values in one piece of memory.

    Raises:
        UsageError: it has not.
    """
    if values.is_meta:
        raise UsageError(
            f"{name} is on the meta device, where tensors have no values", "Give it values first"
        )
    wraps = hasattr(values, "__tensor_flatten__")
    if values.layout is not torch.strided or values.is_quantized or values.is_nested or wraps:
        what = (
            "quantized" if values.is_quantized else "nested" if values.is_nested else str(values.layout)[6:]
        )
        raise UsageError(
            f"{name} is no plain tensor ({type(values).__name__ if wraps else what})",
            "Give the dense tensors that it is made of, each as a field",
        )


def _sample_tensor(number: int, name: str, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        _check_dense(f"{name} of sample {number}", value)
    try:
        found = _as_tensor(value if isinstance(value, torch.Tensor) else np.asarray(value))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} of sample {number} is no array of numbers: {error}",
            "Give tensors, arrays or numbers of one shape",
        ) from None
    return found.detach().cpu().clone()  # its maker may fill the same memory again


def _check_alike(number: int, given: Mapping[str, torch.Tensor], files: Mapping[str, _FieldFile]) -> None:
    if given.keys() != files.keys():
        raise UsageError(
            f"sample {number} has the fields {', '.join(given)}, those before {', '.join(files)}",
            "Give each sample the same fields",
        )
    for name, file in files.items():
        field, values = file.field, given[name]
        if tuple(values.shape) != field.shape or values.dtype != field.dtype:
            raise UsageError(
                f"{name} of sample {number} is {str(values.dtype)[6:]} of shape {tuple(values.shape)}, in those "
                f"before {str(field.dtype)[6:]} of shape {field.shape}: samples of different sizes have no place here",
                "Pad them to one shape, or write all values as one array and where each sample begins as another",
            )


def _array(name: Any, values: Any) -> Any:
    _checked_name(name)
    if isinstance(values, torch.Tensor):
        _check_dense(name, values)
    if isinstance(values, torch.Tensor | np.ndarray) and values.ndim:
        return values
    try:
        found = np.asarray(values)
        _as_tensor(found[:0])
    except (TypeError, ValueError, IndexError) as error:
        raise UsageError(
            f"{name} is no array of numbers with one entry a sample: {error}", "Give an array or a tensor"
        ) from None
    return found


def _piece(values: Any, start: int, end: int) -> torch.Tensor:
    try:
        return _as_tensor(values[start:end])
    except TypeError as error:
        raise UsageError(
            f"torch has no dtype for an array of {values.dtype}: {error}", "Convert it first"
        ) from None


def _as_tensor(values: torch.Tensor | np.ndarray[Any, Any]) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        return values
    native = values.astype(values.dtype.newbyteorder("="))  # a copy, which torch may hold and write to
    return torch.from_numpy(np.ascontiguousarray(native).reshape(native.shape))


def _layout_of(values: torch.Tensor) -> FieldLayout:
    return FieldLayout(dtype=values.dtype, shape=tuple(values.shape[1:]))


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.match(name) or f"{name}.npy" == DESCRIPTION:
        raise UsageError(
            f"{shown(name)} is no name for a field", "Use letters, digits, '_', '-' and '.': it names a file"
        )
    return name


def _describe(folder: Path, layout: DatasetLayout) -> None:
    found = {
        "format": FORMAT,
        "length": layout.length,
        "fields": {
            name: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape)}
            for name, one in layout.fields.items()
        },
    }
    path = folder / DESCRIPTION
    with _explained(path), path.open("x", encoding="utf-8") as stream:
        json.dump(found, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _new_folder(path: StrPath) -> Iterator[Path]:
    """A folder that is `path` when all went well, and nowhere otherwise."""
    target = Path(path).absolute()
    if target.exists() or target.is_symlink():
        raise UsageError(f"there is something at {path} already", "Remove it first, or choose another path")
    owned = OwnedFolder(target.parent)
    try:
        yield owned.path
        with _explained(path):
            owned.path.chmod(0o777 & ~_umask())
            _sync_folder(owned.path)
            owned.path.rename(target)
            _sync_folder(target.parent)
    finally:
        owned.close()


@contextlib.contextmanager
def _explained(path: StrPath) -> Iterator[None]:
    """Tell what could not be written; errors of where the samples come from are another matter."""
    try:
        yield
    except OSError as error:
        raise refused(path, error) from error


def _umask() -> int:
    """The process' own; where the kernel tells it (Linux 4.7), without setting another for a moment."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text("ascii", "replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    found = os.umask(0)
    os.umask(found)
    return found


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
