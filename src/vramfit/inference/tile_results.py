"""Where the results of a tiled run go: new tensors, arrays of the caller's, or files that get their name at the end.

A file is written beside its name and renamed when it is complete. With a journal both outlive a crash, and the next run
goes on with them; without one nothing is left of a run that failed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vramfit.errors import UsageError
from vramfit.inference.arrays import (
    NpyFile,
    check_writable_array,
    create_npy,
    host_zeros,
    is_private,
    share_memory,
    torch_dtype,
)
from vramfit.inference.tile_journal import TileJournal
from vramfit.inference.tile_outputs import OutputPlan, Pack
from vramfit.inference.tile_stores import ResultShape, TileStore, make_store
from vramfit.writing import check_writable, refused


class TileResults:
    """The results of one run.

    Args:
        out: None for new tensors on the CPU; an array or the path of a ``.npy`` file; a tuple or dict of such where
            there are several results, in their order.
        journal: the journal's path; None without.
        facts: gives what the run depends on, for the journal.

    Raises:
        UsageError: something cannot be written to, or a journal is wanted for results that do not outlive the process.
        WriteError: a file cannot be written where it is to be.
    """

    def __init__(
        self, out: Any, journal: str | os.PathLike[str] | None, facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._out = out
        self._targets = list(_flat(out))
        for target in self._targets:
            if isinstance(target, str | os.PathLike):
                _check_path(Path(target))
            elif target is not None:
                check_writable_array(target)
        _check_apart(self._targets, journal)
        self._journal: TileJournal | None = None
        if journal is not None:
            if any(_is_volatile(target) for target in self._targets):
                raise UsageError(
                    "a journal needs results that outlive the process",
                    "Give out the path of a .npy file, a memmap or a zarr array; or leave journal out",
                )
            self._journal = TileJournal(journal, facts())
        self._files: list[tuple[Path, Path, NpyFile]] = []
        self._arrays: list[Any] = []
        self._pack: Pack = tuple

    @property
    def finished(self) -> bool:
        """Whether the run before had stored all, and given the results their names or nearly so."""
        if self._journal is None or not self._journal.complete:
            return False
        return all(
            self._partial(Path(target)).exists() or Path(target).exists()
            for target in self._targets
            if isinstance(target, str | os.PathLike)
        )

    def _partial(self, path: Path) -> Path:
        mark = "" if self._journal is not None else f".{secrets.token_hex(4)}"
        return path.with_name(f"{path.name}{mark}.partial")

    def check_apart(self, source: Any) -> None:
        """Make sure that no result is written over the input while tiles are still read from it.

        Raises:
            UsageError: one would be.
        """
        for target in self._targets:
            if (
                target is not None
                and not isinstance(target, str | os.PathLike)
                and share_memory(target, source)
            ):
                raise UsageError(
                    "out is the input's own memory, which later tiles read their surroundings from",
                    "Give another array, or a copy of the input",
                )

    def open(self, plans: list[OutputPlan], pack: Pack) -> None:
        """Open the stores of all results, now that their shapes are known.

        Raises:
            UsageError: a result does not fit what was given for it.
            WriteError: there is no room for a file.
        """
        shapes = [shape for plan in plans for shape in plan.results]
        self._pack = lambda found: _packed(found, plans, pack)
        targets = [None] * len(shapes)
        if self._out is not None:
            targets = list(_by_name(self._out, self._pack(list(range(len(shapes))))))
        if len(targets) != len(shapes):
            raise UsageError(
                f"out has {len(targets)} places for {len(shapes)} results",
                "Give one for each, in a tuple or dict",
            )
        journal = self._journal
        if journal is not None:
            journal.note_outputs([[list(shape.shape), str(shape.dtype)] for shape in shapes])
        self._arrays = [self._array(target, shape) for target, shape in zip(targets, shapes, strict=True)]
        waiting = iter(enumerate(zip(self._arrays, shapes, strict=True)))
        for plan in plans:
            plan.stores = [self._store(*next(waiting), plan) for _ in plan.results]

    def _store(self, number: int, pair: tuple[Any, ResultShape], plan: OutputPlan) -> TileStore:
        known = () if self._journal is None else self._journal.stored.get(number, ())
        return make_store(pair[0], pair[1], plan.geometry, known)

    def _array(self, target: Any, shape: ResultShape) -> Any:
        if target is None:
            with torch.inference_mode(False):
                return host_zeros(shape.shape, shape.dtype)
        if isinstance(target, str | os.PathLike):
            return self._file(Path(target), shape)
        if tuple(target.shape) != shape.shape:
            raise UsageError(
                f"out has the shape {list(target.shape)}, and the result {list(shape.shape)}",
                "Give an array of the result's shape",
            )
        wanted = torch_dtype(target.dtype)
        if wanted != shape.dtype and not torch.can_cast(shape.dtype, wanted):
            raise UsageError(
                f"out has the dtype {target.dtype}, which does not hold results of {shape.dtype}",
                "Give an array of the result's dtype",
            )
        return target

    def _file(self, path: Path, shape: ResultShape) -> NpyFile:
        if shape.dtype is torch.bfloat16:
            raise UsageError(
                "a .npy file has no bfloat16", "Convert it on the fly: reduce=lambda block: block.float()"
            )
        dtype = np.dtype(torch.empty(0, dtype=shape.dtype).numpy().dtype)
        partial = self._partial(path)
        resumed = self._journal is not None and any(self._journal.stored.values())
        if resumed and not partial.exists():
            raise UsageError(
                f"{partial}, which the journal goes on with, is gone", "Remove the journal to begin anew"
            )
        if resumed:
            found = NpyFile(partial, writable=True)
            if found.shape != shape.shape or found.dtype != dtype:
                raise UsageError(
                    f"{partial} is not what the journal was written for", "Remove both to begin anew"
                )
        else:
            found = create_npy(partial, shape.shape, dtype)
        self._files.append((path, partial, found))
        return found

    def note(self, stored: Mapping[int, set[int]]) -> None:
        """Note blocks whose values are on the disk."""
        if self._journal is not None:
            self._journal.note_stored(stored)

    def finish(self) -> Any:
        """Give the files their names; gives the results, files as arrays that are mapped for reading.

        Raises:
            WriteError: a file could not get its name.
        """
        if self._journal is not None and not self._journal.complete:
            self._journal.note_complete()
        for path, partial, file in self._files:
            file.close()
            _rename(partial, path)
        if self._journal is not None:
            self._journal.remove()
        named = {id(file): path for path, _, file in self._files}
        return self._pack([_reopened(named[id(one)]) if id(one) in named else one for one in self._arrays])

    def take_up(self) -> Any:
        """The end of a run that was killed when all was stored: what is left is the names."""
        for target in self._targets:
            if isinstance(target, str | os.PathLike) and self._partial(Path(target)).exists():
                _rename(self._partial(Path(target)), Path(target))
        if self._journal is not None:
            self._journal.remove()
        found = [
            _reopened(Path(target)) if isinstance(target, str | os.PathLike) else target
            for target in self._targets
        ]
        return _like(self._out, iter(found))

    def abandon(self) -> None:
        """After an error: nothing half-written stays, unless a journal lets the next run go on with it."""
        for _, partial, file in self._files:
            file.close()
            if self._journal is None:
                with contextlib.suppress(OSError):
                    partial.unlink()
        if self._journal is not None:
            self._journal.close()
            if self._journal.outputs is None:
                with contextlib.suppress(OSError):
                    self._journal.path.unlink()


def _packed(found: list[Any], plans: list[OutputPlan], pack: Pack) -> Any:
    waiting = iter(found)
    return pack([plan.pack([next(waiting) for _ in plan.results]) for plan in plans])


def _flat(out: Any) -> Iterator[Any]:
    if isinstance(out, Mapping):
        for one in out.values():
            yield from _flat(one)
    elif isinstance(out, tuple | list):
        for one in out:
            yield from _flat(one)
    else:
        yield out


def _by_name(out: Any, results: Any) -> Iterator[Any]:
    """The targets in the order of the results: by names where both have some, else as they come.

    Raises:
        UsageError: both have names, and they are others.
    """
    if isinstance(out, Mapping) and isinstance(results, Mapping):
        if set(out) != set(results):
            raise UsageError(
                f"out is for {', '.join(map(str, out))}, and the results are {', '.join(map(str, results))}",
                "Give one for each, by its name",
            )
        for name, part in results.items():
            yield from _by_name(out[name], part)
    elif isinstance(out, tuple | list) and isinstance(results, tuple | list) and len(out) == len(results):
        for one, part in zip(out, results, strict=True):
            yield from _by_name(one, part)
    else:
        yield from _flat(out)


def _like(out: Any, found: Iterator[Any]) -> Any:
    """As many values in the containers of `out`."""
    if isinstance(out, Mapping):
        return {name: _like(one, found) for name, one in out.items()}
    if isinstance(out, tuple | list):
        return tuple(_like(one, found) for one in out)
    return next(found)


def _check_apart(targets: Sequence[Any], journal: str | os.PathLike[str] | None) -> None:
    """Make sure that no result is written over another, or over the journal.

    Raises:
        UsageError: one would be.
    """
    paths = [os.path.realpath(one) for one in targets if isinstance(one, str | os.PathLike)]
    arrays = [one for one in targets if one is not None and not isinstance(one, str | os.PathLike)]
    if len(set(paths)) < len(paths) or any(
        share_memory(one, other) for one, other in itertools.combinations(arrays, 2)
    ):
        raise UsageError("out has the same place for two results", "Give one for each")
    if journal is not None and os.path.realpath(journal) in {*paths, *(f"{one}.partial" for one in paths)}:
        raise UsageError(f"the journal {journal} is the file of a result", "Give another path")


def _check_path(path: Path) -> None:
    if path.suffix != ".npy":
        raise UsageError(
            f"out={str(path)!r} is no path of a .npy file",
            "Let it end in .npy, or give an array (zarr, memmap)",
        )
    check_writable(path)


def _is_volatile(target: Any) -> bool:
    if isinstance(target, np.ndarray):
        return not isinstance(target, np.memmap) or is_private(target)
    return target is None or isinstance(target, torch.Tensor)


def _rename(partial: Path, path: Path) -> None:
    try:
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise refused(path, error) from error


def _reopened(path: Path) -> Any:
    return np.load(path, mmap_mode="r")
