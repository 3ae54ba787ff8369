"""A call in chunks along one dimension of its inputs, with the outputs joined: equal to the whole call.

NOTE [Memory of a call in chunks]: the first chunk's outputs say what the whole outputs look like; those are allocated
once and every chunk is written into its place, so that the peak is the outputs and the work of one chunk. Joining by
``torch.cat`` would hold all of them twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from vramfit.arguments import shown, whole_argument
from vramfit.errors import UsageError
from vramfit.inference.neighbours import Call, NeighbourReport, Probe, holds_values, probe_neighbours
from vramfit.workload.containers import mapped_leaves, named_tensors_in

TRIED_EXAMPLES = 4
"""Entries of a batch that the probe runs at most."""

TRIED_POSITIONS = 64
"""Positions of a sequence that it runs at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSettings:
    """How a call is cut, and where its parts go.

    Attributes:
        size: entries of the dimension in a chunk; the last may have fewer.
        dim: the dimension, of inputs and outputs: 0 for the batch, 1 for the sequence of most models.
        whole: arguments that are passed on as they are, by their names or their numbers (``"1"``), or by the path of an
            entry inside (``"features.mask"``).
        device: where chunks of inputs are moved to before each call; None leaves them where they are.
        output_device: where outputs are joined; None is where the calls leave them.
        check: whether a few entries are tried first (`probe_neighbours`), where there are values to compare.

    Raises:
        UsageError: the size or the dimension is no number.
    """

    size: int
    dim: int = 0
    whole: tuple[str, ...] = ()
    device: torch.device | None = None
    output_device: torch.device | None = None
    check: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        whole_argument("size", self.size, least=1)
        whole_argument("dim", self.dim, least=-8, most=8)

    def unchecked(self) -> ChunkSettings:
        """The same without the trial."""
        return replace(self, check=False)


@dataclass(frozen=True, slots=True)
class InputCut:
    """How the arguments of a call are cut.

    Attributes:
        extent: entries of the dimension.
        paths: the tensors that have them, each by its path.
    """

    dim: int
    extent: int
    paths: frozenset[str]

    def part(self, call: Call, start: int, stop: int) -> Call:
        """The entries from `start` to before `stop`: views, in the containers of the call."""

        def leaf(path: str, value: Any) -> Any:
            return value.narrow(self.dim, start, stop - start) if path in self.paths else value

        part: Call = mapped_leaves(call, leaf)
        return part

    def take(self, call: Call, numbers: torch.Tensor) -> Call:
        """Some entries, copied."""

        def leaf(path: str, value: Any) -> Any:
            if path not in self.paths:
                return value
            return value.index_select(self.dim, numbers.to(value.device))

        part: Call = mapped_leaves(call, leaf)
        return part

    def spans(self, size: int) -> Iterator[tuple[int, int]]:
        """Where chunks begin and end."""
        for start in range(0, self.extent, size):
            yield start, min(start + size, self.extent)


def find_input_cut(call: Call, settings: ChunkSettings) -> InputCut:
    """The tensors of a call that are cut: those of the size that most of them have along the dimension.

    Others, of size 1, of another size or without the dimension, are passed on whole.

    Raises:
        UsageError: no tensor has more than nothing along the dimension, or sequences are packed.
    """
    dim = settings.dim
    sizes: dict[str, int] = {}

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, PackedSequence):
            raise UsageError("a packed sequence cannot be cut", "Let the model pack the padded sequences")
        name = path.split(".", 1)[-1]  # without the number of "arguments" or "those by name"
        kept = any(name == one or name.startswith(f"{one}.") for one in settings.whole)
        if (
            isinstance(value, torch.Tensor)
            and not kept
            and (value.is_nested or value.layout is not torch.strided)
        ):
            raise UsageError(
                "a sparse or nested tensor cannot be cut", "Give a dense one, or name it in whole="
            )
        if isinstance(value, torch.Tensor) and not kept and -value.dim() <= dim < value.dim():
            sizes[path] = value.shape[dim]
        return value

    for group in (call[0], call[1]):
        for item in group.values() if isinstance(group, dict) else group:
            if isinstance(item, PackedSequence):
                leaf("", item)
    mapped_leaves(call, leaf)
    counts = Counter(size for size in sizes.values() if size != 1) or Counter(sizes.values())
    if not counts:
        raise UsageError(
            f"no argument is a tensor with a dimension {dim} to cut",
            "Give tensors that have it, or another dim",
        )
    extent = max(counts, key=lambda size: counts[size])  # of equally frequent ones the first that was met
    return InputCut(dim, extent, frozenset(path for path, size in sizes.items() if size == extent))


def call_in_chunks(
    function: Callable[..., Any],
    call: Call,
    settings: ChunkSettings,
    *,
    out: Any = None,
    model: nn.Module | None = None,
    first: int | None = None,
) -> Any:
    """What ``function(*args, **kwargs)`` gives, computed in chunks and without gradients.

    Args:
        function: the model, or any function of tensors.
        call: its arguments, and those by name; tensors may lie in dicts, lists, tuples and dataclasses. They may lie on
            the host, and are moved chunk by chunk where the settings name a device.
        out: tensors that outputs are written into, in the containers of the output; None allocates them.
        model: whose parts an error names, where `function` is not the model itself.
        first: how many chunks are computed, with the outputs allocated for all, to see what they take; None for all.

    Returns:
        the outputs of all entries, in the containers that a chunk's are in. Each tensor has the chunks joined along the
        dimension; what is one object for all chunks, as a parameter, stays it.

    Raises:
        UsageError: entries are coupled, outputs cannot be joined, or `out` does not have their shape.
    """
    cut = find_input_cut(call, settings)
    size = min(settings.size, max(1, cut.extent))
    known = model if model is not None else function if isinstance(function, nn.Module) else None
    with torch.no_grad():
        if settings.device is not None:
            call = moved(call, settings.device, cut.paths)
        if settings.check and size < cut.extent:
            neighbours_of(function, call, cut, settings, known).demand_none()
        joined = JoinedOutputs(cut, settings.output_device, out)
        for start, stop in islice(cut.spans(size) if cut.extent else ((0, 0),), first):
            part = cut.part(call, start, stop)
            args, kwargs = part if settings.device is None else moved(part, settings.device)
            del part
            held = [function(*args, **kwargs)]
            del args, kwargs
            joined.add(held, start, stop)
        return joined.value()


def neighbours_of(
    function: Callable[..., Any], call: Call, cut: InputCut, settings: ChunkSettings, model: nn.Module | None
) -> NeighbourReport:
    """What the probe says of a call, tried on no more entries than a chunk has, and on two at least.

    On the virtual GPU, where there are no values, only the structure of the model speaks.
    """
    tried = min(cut.extent, max(2, settings.size), TRIED_EXAMPLES if settings.dim == 0 else TRIED_POSITIONS)

    def run(some: Call) -> Any:
        args, kwargs = some if settings.device is None else moved(some, settings.device)
        return function(*args, **kwargs)

    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    if settings.device is not None:
        tensors.append(torch.empty(0, device=settings.device))  # a tensor as they are there
    entries = tried if holds_values((tuple(tensors), {"call": call})) else 0
    probe = Probe(dim=settings.dim, run=run, take=cut.take, entries=entries, extent=cut.extent, model=model)
    return probe_neighbours(probe, call)


class JoinedOutputs:
    """Outputs of chunks in their places among those of all entries. See NOTE [Memory of a call in chunks].

    Args:
        cut: how the inputs are cut.
        device: where outputs are joined; None is where the first chunk leaves them.
        out: tensors to write into; None allocates them.
    """

    def __init__(self, cut: InputCut, device: torch.device | None, out: Any) -> None:
        self._cut, self._device = cut, device
        self._given = None if out is None else dict(named_tensors_in(out))
        self._slots: dict[str, torch.Tensor] = {}
        self._others: dict[str, Any] = {}
        self._made: Any = None
        self._first = True

    def add(self, held: list[Any], start: int, stop: int) -> None:
        """Write the outputs of a chunk, which `held` gives away.

        Raises:
            UsageError: they cannot be joined, or the room that was given does not fit.
        """
        value = held.pop()
        if self._first and stop - start == self._cut.extent and self._given is None:
            self._made, self._first = _moved_output(value, self._device), False
            return
        if self._first:
            seen: dict[int, torch.Tensor] = {}
            self._made = mapped_leaves(value, lambda path, leaf: self._opened(path, leaf, stop - start, seen))
            if self._given is not None and (left := sorted(self._given.keys() - self._slots.keys())):
                raise UsageError(f"out has {left[0] or 'a tensor'}, which is no output", "Leave it out")
            self._first = False
        written: set[int] = set()
        mapped_leaves(value, lambda path, leaf: self._write(path, leaf, (start, stop), written))

    def value(self) -> Any:
        """All outputs."""
        return self._made

    def _opened(self, path: str, leaf: Any, entries: int, seen: dict[int, torch.Tensor]) -> Any:
        """Room for all entries of an output; two outputs that are one tensor share it."""
        if not isinstance(leaf, torch.Tensor):
            self._others[path] = leaf
            return leaf
        if not self._has_entries(leaf, entries):
            self._others[path] = leaf
            return leaf
        if id(leaf) in seen and self._given is None:
            self._slots[path] = seen[id(leaf)]
            return seen[id(leaf)]
        shape = list(leaf.shape)
        shape[self._cut.dim] = self._cut.extent
        room = self._room(path, leaf, shape)
        self._slots[path] = seen[id(leaf)] = room
        return room

    def _room(self, path: str, leaf: torch.Tensor, shape: list[int]) -> torch.Tensor:
        if self._given is None:
            return _empty_like(leaf, shape, self._device or leaf.device)
        room = self._given.get(path)
        if room is None:
            raise UsageError(f"out has no tensor for output {path!r}", "Give one for each output")
        if any(step == 0 and size > 1 for step, size in zip(room.stride(), room.shape, strict=True)):
            raise UsageError(
                f"out{path and '.'}{path} is expanded: several of its places are one", "Give out.clone()"
            )
        if list(room.shape) != shape or room.dtype != leaf.dtype:
            raise UsageError(
                f"out{path and '.'}{path} is {room.dtype} of shape {list(room.shape)}, the output {leaf.dtype} of "
                f"shape {shape}",
                "Give a tensor like the output",
            )
        return room

    def _has_entries(self, leaf: torch.Tensor, entries: int) -> bool:
        dim = self._cut.dim
        return -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == entries

    def _write(self, path: str, leaf: Any, span: tuple[int, int], written: set[int]) -> Any:
        start, stop = span
        if path in self._slots:
            slot = self._slots[path]
            if not isinstance(leaf, torch.Tensor) or not self._has_entries(leaf, stop - start):
                raise UsageError(*_unjoinable(path, leaf, self._cut.dim))
            if id(slot) not in written:
                slot.narrow(self._cut.dim, start, stop - start).copy_(leaf)
                written.add(id(slot))
        elif not self._same(path, leaf):
            raise UsageError(*_unjoinable(path, leaf, self._cut.dim))
        return leaf

    def _same(self, path: str, leaf: Any) -> bool:
        if path not in self._others:
            return False
        known = self._others[path]
        if known is leaf:
            # A fresh tensor of the first chunk is compared with itself here; only a second chunk tells.
            return True
        if isinstance(leaf, torch.Tensor) or type(known) is not type(leaf):
            return False
        if isinstance(leaf, np.ndarray):
            return bool(np.array_equal(known, leaf))
        # nan is no equal of itself
        return bool(known == leaf) or (known != known and leaf != leaf)


def _unjoinable(path: str, leaf: Any, dim: int) -> tuple[str, str]:
    name = f"output {path}" if path else "the output"
    kind = f"of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"{shown(leaf)}"
    return (
        f"{name} ({kind}) has no entry for each of the chunk's along dimension {dim}, so chunks cannot be joined",
        "Let the function return one entry for each of the input's, and sum up afterwards",
    )


def _empty_like(leaf: torch.Tensor, shape: list[int], device: torch.device) -> torch.Tensor:
    """An empty tensor of another size with the order of dimensions that `leaf` has in memory."""
    strides = leaf.stride()
    order = sorted(range(leaf.dim()), key=lambda dim: (-strides[dim], dim))
    back = sorted(range(leaf.dim()), key=order.__getitem__)
    return torch.empty([shape[dim] for dim in order], dtype=leaf.dtype, device=device).permute(back)


def moved(call: Call, device: torch.device, stay: frozenset[str] = frozenset()) -> Call:
    """The call with its tensors on a device, but for those whose paths are to stay."""

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and path not in stay:
            return value.to(device, non_blocking=value.device.type == "cpu" and value.is_pinned())
        return value

    found: Call = mapped_leaves(call, leaf)
    return found


def _moved_output(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    return mapped_leaves(value, lambda _, leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
