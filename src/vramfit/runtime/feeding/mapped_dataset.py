"""A data set in memory-mapped files: any sample at once, and one copy of it in memory for all processes."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from vramfit.arguments import names_argument, path_argument, shown
from vramfit.errors import UsageError
from vramfit.inference.arrays import NpyFile
from vramfit.runtime.feeding.dataset_files import (
    DatasetLayout,
    FieldLayout,
    bits_of,
    field_path,
    is_in_numpy,
    read_layout,
    write_arrays,
    write_samples,
)
from vramfit.runtime.feeding.page_cache import CacheSource, PageCache, cached_pages, page_runs
from vramfit.torch_internals.tensor_objects import shared_storage
from vramfit.writing import StrPath

_STAYS_COLD = 64
"""Batches for which pages are asked for ahead after one that had to wait for the disk."""


class ReadOrder(Enum):
    """In which order samples are read, as the kernel is told (madvise(2))."""

    NORMAL = "normal"
    RANDOM = "random"
    SEQUENTIAL = "sequential"


_ADVICE = {ReadOrder.RANDOM: "MADV_RANDOM", ReadOrder.SEQUENTIAL: "MADV_SEQUENTIAL"}


class MappedDataset(Dataset[dict[str, torch.Tensor]]):
    """A data set whose samples are dicts of tensors of one shape each, in memory-mapped ``.npy`` files.

    >>> data = vramfit.MappedDataset.write(
    ...     "numbers", {"x": torch.arange(12.0).reshape(4, 3), "y": torch.arange(4)}
    ... )
    >>> len(data), data[2]
    (4, {'x': tensor([6., 7., 8.]), 'y': tensor(2)})
    >>> data[[3, 0]]["y"]
    tensor([3, 0])
    >>> loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    >>> sorted(label for batch in loader for label in batch["y"].tolist())
    [0, 1, 2, 3]
    >>> data.cached().hit_rate
    1.0

    The files are read as they are used, and stay in the kernel's page cache as long as there is room. All processes of
    the machine share these pages; to a worker goes the path alone. What is given out is a copy. A list of numbers
    gives a whole batch, which spares the collating: ``DataLoader(data, batch_size=None,
    sampler=BatchSampler(RandomSampler(data), 256, False))``. Each file is one of NumPy's, for ``numpy.load``; dtypes
    that NumPy has not are stored by their bits.

    Args:
        path: the folder.
        fields: those to read; None reads all.
        order: ``"random"`` stops the kernel from reading what lies beside, which is of use where samples are larger
            than a page and the data larger than memory; ``"sequential"`` lets it read more ahead.

    Attributes:
        path: the folder.
        layout: samples and fields.

    Raises:
        UsageError: there is no data set, or one that was not written to its end.
    """

    def __init__(self, path: StrPath, *, fields: Sequence[str] | None = None, order: str = "normal") -> None:
        self.path = Path(path_argument("path", path)).absolute()
        try:
            self._order = ReadOrder(order)
        except ValueError:
            names = ", ".join(repr(one.value) for one in ReadOrder)
            raise UsageError(f"order={shown(order)} is none of {names}", "Give one of them") from None
        whole = read_layout(self.path)
        chosen = tuple(whole.fields) if fields is None else names_argument("fields", fields)
        for name in chosen:
            if name not in whole.fields:
                raise UsageError(
                    f"{self.path} has no field {shown(name)}", f"It has {', '.join(whole.fields)}"
                )
        self.layout = DatasetLayout(length=whole.length, fields={name: whole.fields[name] for name in chosen})
        self._cold = 1
        self._fields = {
            name: _MappedField(field_path(self.path, name), field, whole.length, self._order)
            for name, field in self.layout.fields.items()
        }

    @classmethod
    def write(cls, path: StrPath, fields: Mapping[str, Any]) -> MappedDataset:
        """Write arrays or tensors with one entry a sample, and open the result.

        Args:
            path: a folder that is not there yet.
            fields: arrays, tensors or mapped files by their names; they are read piece by piece.

        Raises:
            UsageError: they are of different lengths, or the path is taken.
            WriteError: there is no room, or no permission. Nothing is left then.
        """
        given: object = fields
        if not isinstance(given, Mapping):
            raise UsageError(f"fields={shown(given)} has no names", "Give a mapping of names to arrays")
        write_arrays(path_argument("path", path), fields)
        return cls(path)

    @classmethod
    def write_samples(cls, path: StrPath, samples: Iterable[Mapping[str, Any]]) -> MappedDataset:
        """Write samples as they come, and open the result.

        Args:
            path: a folder that is not there yet.
            samples: dicts of tensors, arrays or numbers. All have the same fields, shapes and dtypes: samples of
                different sizes are refused. How many there are need not be known.

        Raises:
            UsageError: samples differ, or the path is taken.
            WriteError: there is no room, or no permission. Nothing is left then.
        """
        write_samples(path_argument("path", path), samples)
        return cls(path)

    def __len__(self) -> int:
        return self.layout.length

    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        """A sample by its number, or a batch by a slice, a list, an array or a tensor of numbers."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1:
                return {
                    name: field.values[start : max(start, stop)].clone()
                    for name, field in self._fields.items()
                }
            return self._gather(np.arange(start, stop, step))
        if isinstance(index, Sequence) or bool(getattr(index, "shape", None)):
            # Before what follows, as Python takes a tensor with one number for an index too.
            return self._gather(self._numbers(index))
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{number} is no sample of {len(self)}")
        return {name: field.sample(number) for name, field in self._fields.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Samples by their numbers, as a DataLoader asks for them: read together, in the order of the file."""
        batch = self._gather(self._numbers(indices), _own_memory)
        columns = [values.unbind() for values in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]

    def read_ahead(self, indices: Any) -> None:
        """Let the kernel begin to read these samples' pages, in the order of the file; nothing waits for it."""
        numbers = np.sort(self._numbers(indices))
        for field in self._fields.values():
            field.will_need(numbers)

    def cached(self, indices: Any = None, *, source: CacheSource | None = None) -> PageCache | None:
        """How much of the files, or of some samples, is in the page cache.

        Args:
            indices: the samples; None takes the whole files.
            source: who is asked; None takes cachestat(2) where the kernel has it (Linux 6.5), mincore(2) otherwise.

        Returns:
            None where neither answers: elsewhere than on Linux, and for files of somebody else.
        """
        numbers = None if indices is None else self._numbers(indices)
        found = [field.cached(numbers, source) for field in self._fields.values()]
        told = [one for one in found if one is not None]
        if not told or len(told) < len(found):
            return None
        dirty = [one.dirty for one in told if one.dirty is not None]
        return PageCache(
            pages=sum(one.pages for one in told),
            cached=sum(one.cached for one in told),
            dirty=sum(dirty) if len(dirty) == len(told) else None,
            source=told[0].source,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "layout": self.layout, "order": self._order.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], fields=list(state["layout"].fields), order=state["order"])  # type: ignore[misc]
        if self.layout != state["layout"]:
            raise UsageError(
                f"the data set {self.path} is another than it was when it was sent",
                "Leave it where it is as long as it is used",
            )

    def __repr__(self) -> str:
        return f"MappedDataset({str(self.path)!r}, {len(self)} samples of {', '.join(self._fields)})"

    def _numbers(self, indices: Any) -> np.ndarray[Any, Any]:
        found = np.asarray(indices)
        if found.size == 0:
            return np.empty(0, np.int64)
        if found.dtype.kind not in "iu" or found.ndim != 1:
            raise TypeError(f"{shown(indices)} names no samples: give a number, a slice or a list of numbers")
        if found.dtype == np.uint64 and int(found.max()) >= len(
            self
        ):  # as signed ones, large ones are negative
            raise IndexError(f"{shown(indices)} names one that is no sample of {len(self)}")
        found = found.astype(np.int64, copy=False)
        if found.view(np.uint64).max() < len(self):  # as such, negative ones are large
            return found
        found = np.where(found < 0, found + len(self), found)
        if found.view(np.uint64).max() >= len(self):
            raise IndexError(f"{shown(indices)} names one that is no sample of {len(self)}")
        return found

    def _gather(
        self, numbers: np.ndarray[Any, Any], memory: Callable[..., torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """A batch. Where the last ones had to wait for the disk, all its pages are asked for first, in order.

        A worker of a DataLoader fills memory that it shares with the process that the batch goes to, as torch's own
        collate function does: one copy less.
        """
        if memory is None:
            memory = _own_memory if get_worker_info() is None else _shared_memory
        if self._cold > 0:  # threads may count it down at once
            self._cold -= 1
            ordered = np.sort(numbers)
            for field in self._fields.values():
                field.will_need(ordered)
        waits = _disk_waits()
        batch = {}
        for name, field in self._fields.items():
            batch[name] = memory((len(numbers), *field.layout.shape), field.layout.dtype)
            field.gather(numbers, batch[name])
        if _disk_waits() > waits:
            self._cold = _STAYS_COLD
        return batch


class _MappedField:
    """The file of one field."""

    def __init__(self, path: Path, field: FieldLayout, length: int, order: ReadOrder) -> None:
        self._file = NpyFile(path)
        self._mapped, self.layout = self._file.mapping, field
        self._stored = stored = self._file.values
        self._start = path.stat().st_size - stored.nbytes
        if order in _ADVICE and hasattr(mmap, _ADVICE[order]):
            self._mapped.madvise(getattr(mmap, _ADVICE[order]))
        shape = (length, *field.shape)
        if not stored.nbytes:
            self.values = torch.empty(shape, dtype=field.dtype)
            return
        # torch has no tensors that cannot be written, and warns of memory that cannot. Nobody else gets this one.
        memory = (ctypes.c_uint8 * stored.nbytes).from_address(stored.ctypes.data)
        self.values = torch.frombuffer(memory, dtype=field.dtype).view(shape)

    def sample(self, number: int) -> torch.Tensor:
        """A copy of one; NumPy's is the faster one where there is more than a number."""
        if not self.layout.shape or not self._stored.size:
            return self.values[number].clone()
        return torch.from_numpy(self._stored[number].copy()).view(self.layout.dtype)

    def gather(self, numbers: np.ndarray[Any, Any], out: torch.Tensor) -> None:
        """Fill a tensor with samples; their numbers are right ones. NumPy is faster here as well."""
        if out.numel():
            filled = out.numpy() if is_in_numpy(out.dtype) else out.view(bits_of(out.dtype)).numpy()
            # With another mode it would fill a buffer of its own first.
            np.take(self._stored, numbers, axis=0, out=filled, mode="clip")

    def spans(self, numbers: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
        size = self.layout.nbytes
        starts = self._start + numbers * size
        return [(int(start), int(start) + size) for start in starts]

    def will_need(self, ordered: np.ndarray[Any, Any]) -> None:
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        for start, end in page_runs(self.spans(ordered)):
            with contextlib.suppress(OSError):  # it is advice
                self._mapped.madvise(mmap.MADV_WILLNEED, start, min(end, len(self._mapped)) - start)

    def cached(self, numbers: np.ndarray[Any, Any] | None, source: CacheSource | None) -> PageCache | None:
        spans = [(0, len(self._mapped))] if numbers is None else self.spans(numbers)
        return cached_pages(self._file.number, self._mapped, spans, source)


def _own_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _shared_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    storage = shared_storage(nbytes)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)  # type: ignore[call-overload,no-any-return,unused-ignore]


def _disk_waits() -> int:
    """How often this thread has had to wait for a page from the disk."""
    if sys.platform != "linux":
        return 0
    import resource  # which Windows has not

    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
