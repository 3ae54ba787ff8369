"""Arrays that tiles are read from and written to: NumPy, torch, ``.npy`` files, zarr, or anything alike.

Four members are asked of an array: ``shape``, ``dtype``, ``array[slices]`` and, to be written to, ``array[slices] =
values``. What it gives for slices is anything that `numpy.asarray` takes, or a tensor.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from vramfit.arguments import shown
from vramfit.errors import UsageError, WriteError
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.writing import refused

Region: TypeAlias = tuple["slice[Any, Any, Any]", ...]
"""Where something lies along each spatial axis; starts and stops are set."""


def last_axes(region: Sequence[slice]) -> Any:
    """The key of a region along the last axes, whatever comes before."""
    return (..., *region)


class ArrayLike(Protocol):
    """An array that can be read by slices."""

    @property
    def shape(self) -> Sequence[int]:
        """Its lengths."""
        ...

    @property
    def dtype(self) -> Any:
        """A dtype of NumPy or torch, or its name."""
        ...

    def __getitem__(self, key: Any) -> Any:
        """What lies in some slices."""
        ...


class WritableArray(ArrayLike, Protocol):
    """An array that can be written to by slices."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write values into some slices."""
        ...


RESIDENT_BYTES = 32 << 20
"""Bytes of a mapped file that stay resident before its pages are given back to the system."""


class NpyFile:
    """A ``.npy`` file that is mapped, and whose pages do not pile up in memory.

    A mapped page counts as resident from its first use on, and the system keeps file pages as long as it has room: an
    image larger than memory would fill it. Here what was used is counted, and given back beyond `RESIDENT_BYTES`.

    Args:
        path: the file.
        writable: whether it may be written to.

    Raises:
        UsageError: it is no ``.npy`` file that can be mapped.
    """

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = False) -> None:
        self.path = Path(path)
        self._touched = 0
        try:
            with self.path.open("rb") as stream:
                version = np.lib.format.read_magic(stream)
                read = np.lib.format.read_array_header_1_0
                if version != (1, 0):
                    read = np.lib.format.read_array_header_2_0
                shape, fortran, dtype = read(stream)
                offset = stream.tell()
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            self._file = os.open(self.path, os.O_RDWR if writable else os.O_RDONLY)
            self._closing = weakref.finalize(self, os.close, self._file)  # at the latest with this object
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(self._file, 0, access=access)
            self.values: np.ndarray[Any, Any] = np.ndarray(
                shape, dtype, self._map, offset, order="F" if fortran else "C"
            )
        except FileNotFoundError:
            raise UsageError(f"there is no file {self.path}", "Check the path") from None
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self.path} is no .npy file that can be read: {error}", "Write it with numpy.save"
            ) from None
        self.shape: tuple[int, ...] = shape
        self.dtype: np.dtype[Any] = dtype

    @property
    def number(self) -> int:
        """The open file's."""
        return self._file

    @property
    def mapping(self) -> mmap.mmap:
        """The map, of the whole file."""
        return self._map

    def __getitem__(self, key: Any) -> Any:
        """A copy of some slices."""
        found = np.array(self.values[key])
        self._used(self.values[key])
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write into some slices."""
        self.values[key] = value
        self._used(self.values[key])

    def flush(self) -> None:
        """Bring what was written to the disk, and give its pages back to the system."""
        self._map.flush()
        os.fsync(self._file)
        self._give_back()
        _forget_pages(self._file)

    def close(self) -> None:
        """Give the map and the file back."""
        del self.values
        with contextlib.suppress(BufferError):  # somebody holds a view: the map goes with it
            self._map.close()
        self._closing()

    def identity(self) -> dict[str, Any]:
        """What tells this file's content from another's, without reading it."""
        found = self.path.stat()
        return {"path": str(self.path.resolve()), "bytes": found.st_size, "modified": found.st_mtime_ns}

    def _used(self, view: np.ndarray[Any, Any]) -> None:
        self._touched += touched_bytes(view)
        if self._touched > RESIDENT_BYTES:
            self._give_back()

    def _give_back(self) -> None:
        self._touched = 0
        release_pages(self._map)


def create_npy(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NpyFile:
    """A new ``.npy`` file of zeros with its whole space on the disk taken, open for writing.

    Raises:
        WriteError: there is no room, or no permission.
    """
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    try:
        with path.open("wb") as stream:
            np.lib.format.write_array_header_2_0(stream, header)
            start, size = stream.tell(), math.prod(shape) * dtype.itemsize
            stream.flush()
            _take_space(stream.fileno(), start, size)
            os.fsync(stream.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise refused(path, error) from error
    return NpyFile(path, writable=True)


def _take_space(file: int, start: int, size: int) -> None:
    """A mapped file on a full disk ends the process by a signal (SIGBUS): find out before."""
    if hasattr(os, "posix_fallocate") and size:
        try:
            os.posix_fallocate(file, start, size)
            return
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
    os.ftruncate(file, start + size)


_NO_FALLOCATE = {22, 38, 95}  # EINVAL, ENOSYS, EOPNOTSUPP: file systems that cannot


def release_pages(mapped: mmap.mmap) -> None:
    """Take a map's pages out of this process's resident memory; what was written stays in the file."""
    if hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def _forget_pages(file: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def touched_bytes(view: np.ndarray[Any, Any]) -> int:
    """An upper bound of the bytes of a file's pages that a view of it lies in."""
    page = mmap.PAGESIZE
    if view.size == 0:
        return 0
    run, runs = view.itemsize, list(zip(view.shape, view.strides, strict=True))
    runs.sort(key=lambda one: abs(one[1]))
    count = 1
    for length, step in runs:
        if count == 1 and abs(step) <= run + page:
            run += (length - 1) * abs(step)
        else:
            count *= length
    return count * (run + 2 * page)


# -- Inputs ----------------------------------------------------------------------------------------------------------


def as_source(name: str, given: Any) -> ArrayLike:
    """What tiles are read from.

    Args:
        name: what it is called in errors.
        given: an array, or a path to a ``.npy`` file.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str | os.PathLike):
        return NpyFile(given)
    missing = [part for part in ("shape", "dtype", "__getitem__") if not hasattr(given, part)]
    if missing:
        raise UsageError(
            f"{name} is a {type(given).__name__} without {missing[0]}",
            "Give an array (NumPy, torch, zarr) or the path of a .npy file",
        )
    found: ArrayLike = given
    return found


def read_block(source: ArrayLike, key: tuple[Any, ...]) -> torch.Tensor:
    """Some slices of an array as a tensor, where they lie: on the CPU, or on the device of a tensor."""
    if isinstance(source, torch.Tensor):
        return source[key]
    found = source[key]
    if isinstance(found, torch.Tensor):
        return found
    values = np.asarray(found)
    if isinstance(source, np.memmap):
        values = np.array(values)
        _give_back_memmap(source)
    if not values.flags.writeable or any(step < 0 for step in values.strides):
        values = values.copy()
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    return torch.from_numpy(values)


def _give_back_memmap(array: np.memmap[Any, Any]) -> None:
    mapped = getattr(array, "_mmap", None)
    # What was written into a private map (mode "c") is in its pages alone.
    if isinstance(mapped, mmap.mmap) and not is_private(array):
        release_pages(mapped)


def is_private(array: Any) -> bool:
    """Whether an array maps a file and keeps what is written to it in memory (NumPy's mode "c")."""
    return isinstance(array, np.memmap) and getattr(array, "mode", None) == "c"


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of an array's dtype.

    Raises:
        UsageError: torch has none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    try:
        return torch.from_numpy(np.empty(0, np.dtype(dtype).newbyteorder("="))).dtype
    except TypeError:
        raise UsageError(f"torch has no dtype for {dtype}", "Convert the array first") from None


class Blank:
    """An array of zeros that takes no memory: a shape and a dtype to try a layout with.

    Args:
        shape: its lengths.
        dtype: of its values.
        device: where its slices are made.
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, torch.device(device)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Zeros of the slices' shape."""
        plain = torch.empty(1, device="meta").expand(self.shape)[key]
        return torch.zeros(plain.shape, dtype=self.dtype, device=self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget the values."""


# -- Results ---------------------------------------------------------------------------------------------------------


def check_writable_array(given: Any, name: str = "out") -> None:
    """Make sure that an array can be written to.

    Raises:
        UsageError: it cannot.
    """
    missing = [part for part in ("shape", "dtype", "__setitem__") if not hasattr(given, part)]
    if missing:
        raise UsageError(
            f"{name} is a {type(given).__name__} without {missing[0]}: it cannot be written",
            "Give an array that can, or the path of a .npy file to be made",
        )
    flags = getattr(given, "flags", None)
    locked = getattr(flags, "writeable", True) is False or getattr(given, "read_only", False) is True
    if locked:
        raise UsageError(
            f"{name} is an array that cannot be written: it is read-only",
            "Open it for writing (mode r+), or give the path of a .npy file to be made",
        )
    if isinstance(given, torch.Tensor) and given.requires_grad:
        raise UsageError(
            f"{name} is a tensor that requires gradients: it cannot be written", "Give out.detach()"
        )
    if isinstance(given, torch.Tensor) and any(
        step == 0 and size > 1 for step, size in zip(given.stride(), given.shape, strict=True)
    ):
        raise UsageError(
            f"{name} is an expanded tensor, several of whose places are one: it cannot be written",
            "Give out.clone()",
        )


def share_memory(one: Any, other: Any) -> bool:
    """Whether what is written into one array changes the other: the same memory, the same file, the same store."""
    if one is other:
        return True
    file, other_file = _mapped_file(one), _mapped_file(other)
    if file is not None and other_file is not None and file[0] == other_file[0]:
        return file[1] < other_file[2] and other_file[1] < file[2]
    stores = [getattr(array, "store_path", None) for array in (one, other)]
    if stores[0] is not None and str(stores[0]) == str(stores[1]):
        return True
    values = [_host_values(array) for array in (one, other)]
    if values[0] is None or values[1] is None:
        return _same_storage(one, other)
    try:
        return np.shares_memory(values[0], values[1], max_work=_MOST_WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        return True


_MOST_WORK = 100_000
"""Steps that NumPy may take to find out whether two arrays have a place in common."""


def _mapped_file(array: Any) -> tuple[str, int, int] | None:
    """The file that an array maps and writes to, and the bytes of it."""
    if isinstance(array, NpyFile):
        return os.path.realpath(array.path), 0, array.path.stat().st_size
    if not isinstance(array, np.memmap) or is_private(array) or array.filename is None:
        return None
    mapped = getattr(array, "_mmap", None)
    size = len(mapped) if isinstance(mapped, mmap.mmap) else array.nbytes
    return os.path.realpath(array.filename), array.offset, array.offset + size


def _host_values(array: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(array, np.ndarray):
        return array
    if isinstance(array, torch.Tensor) and array.device.type == "cpu" and has_values(array):
        with contextlib.suppress(TypeError, RuntimeError):  # a layout or a dtype that NumPy has not
            plain = array.detach()
            return (plain.view(torch.int16) if plain.dtype is torch.bfloat16 else plain).numpy()
    return None


def _same_storage(one: Any, other: Any) -> bool:
    """Whether two tensors begin in the same memory: for those of a card."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    with contextlib.suppress(RuntimeError, NotImplementedError):  # without storage
        same = one.untyped_storage()._cdata == other.untyped_storage()._cdata
        return same and one.storage_offset() == other.storage_offset()
    return False


def write_block(target: WritableArray, key: tuple[Any, ...], block: torch.Tensor) -> None:
    """Write a tensor into some slices of an array.

    Raises:
        WriteError: the array would not be written.
    """
    if isinstance(target, torch.Tensor):
        target[key].copy_(block)
        return
    values: Any = block.detach().to("cpu")
    if not isinstance(target, Blank):
        values = values.float().numpy() if values.dtype is torch.bfloat16 else values.numpy()
    try:
        target[key] = values
    except Exception as error:  # an array of any library, with errors of its own
        if isinstance(error, OSError):
            raise refused(type(target).__name__, error) from error
        raise WriteError(
            f"a block of shape {tuple(block.shape)} cannot be written into {type(target).__name__} "
            f"{shown(key)}: {error}",
            "Give an array that takes slices of this shape",
        ) from error
    if isinstance(target, np.memmap):
        _give_back_memmap(target)


def host_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU whose pages take memory only once they are written."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(dtype).view(tuple(shape))


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds values: those of the virtual GPU do not, and nothing has to be done with them."""
    return not isinstance(tensor, FakeTensor)
