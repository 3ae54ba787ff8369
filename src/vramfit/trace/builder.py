"""TraceBuilder: writes a MemoryTrace event by event, cheaply enough for a dispatch mode."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vramfit.trace.events import Category, Frame, TraceDevice
from vramfit.trace.journal import Journal
from vramfit.trace.model import COLUMNS, MemoryTrace


class _Table:
    """Distinct strings in the order of their first use."""

    __slots__ = ("entries", "ids", "journal", "name")

    def __init__(self, name: str, journal: Journal | None) -> None:
        self.ids: dict[str, int] = {}
        self.entries: list[str] = []
        self.name = name
        self.journal = journal

    def intern(self, text: str) -> int:
        found = self.ids.get(text)
        if found is None:
            found = self.ids[text] = len(self.entries)
            self.entries.append(text)
            if self.journal is not None:
                self.journal.text(self.name, text)
        return found


class TraceBuilder:
    """Collects events in order. Not thread-safe: callers that share one hold a lock.

    Args:
        devices: the devices of the trace; `finish` can replace them when the final segments are known.
        meta: facts about the source: ``torch_version``, ``alloc_conf``, ``source``, ``program``.
        journal: written as the events come, for the case that the process is killed; None without.
    """

    def __init__(
        self,
        devices: Iterable[TraceDevice] = (),
        meta: Mapping[str, str | int | float] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Start without events."""
        self.devices = tuple(devices)
        self.meta: dict[str, str | int | float] = dict(meta or {})
        self._columns = {name: array(np.dtype(dtype).char) for name, dtype in COLUMNS.items()}
        self._appends = tuple(column.append for column in self._columns.values())
        self.journal = journal
        self._ops, self._modules = _Table("op", journal), _Table("module", journal)
        self._phases, self._tensors = _Table("phase", journal), _Table("tensor", journal)
        self.op = self._ops.intern
        """Index of an operator's name, entered into the table on first use."""
        self.module = self._modules.intern
        """Index of a module's dotted path."""
        self.phase = self._phases.intern
        """Index of a phase's name."""
        self.tensor = self._tensors.intern
        """Index of a tensor's description, such as ``bfloat16[4, 1024, 768]``."""
        self._frames: dict[Frame, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._stack_of: dict[tuple[Frame, ...], int] = {}
        self._frames_of: list[tuple[Frame, ...]] = []

    def __len__(self) -> int:
        """Number of events so far."""
        return len(self._columns["kind"])

    def stack(self, frames: tuple[Frame, ...]) -> int:
        """Index of a stack, innermost frame first."""
        found = self._stack_of.get(frames)
        if found is None:
            known, journal, before = self._frames, self.journal, len(self._frames)
            key = tuple([known.setdefault(frame, len(known)) for frame in frames])
            found = self._stack_of[frames] = self._stacks.setdefault(key, len(self._stacks))
            if found == len(self._frames_of):
                self._frames_of.append(frames)
                if journal is not None:
                    for frame in list(known)[before:] if len(known) > before else ():
                        journal.frame(frame)
                    journal.stack(key)
        return found

    def frames_of(self, stack: int) -> tuple[Frame, ...]:
        """The frames of a stack by its index; none for -1."""
        return () if stack < 0 else self._frames_of[stack]

    def append(
        self,
        kind: int,
        *,
        device: int,
        address: int = 0,
        size: int = 0,
        block: int = 0,
        stream: int = 0,
        time_us: int = 0,
        category: int = 0,
        op: int = -1,
        stack: int = -1,
        module: int = -1,
        phase: int = -1,
        tensor: int = -1,
    ) -> int:
        """Add an event; the arguments are the columns of `MemoryTrace`. Returns its row."""
        add = self._appends
        add[0](kind)
        add[1](device)
        add[2](stream)
        add[3](address)
        add[4](size)
        add[5](block)
        add[6](time_us)
        add[7](category)
        add[8](op)
        add[9](stack)
        add[10](module)
        add[11](phase)
        add[12](tensor)
        if self.journal is not None:
            self.journal.row(
                kind,
                device,
                stream,
                address,
                size,
                block,
                time_us,
                category,
                op,
                stack,
                module,
                phase,
                tensor,
            )
        return len(self._columns["kind"]) - 1

    def category(self, row: int) -> Category:
        """Category of an event."""
        return Category(self._columns["category"][row])

    def set_category(self, row: int, category: int) -> None:
        """Replace the category of an event."""
        self._columns["category"][row] = category
        if self.journal is not None:
            self.journal.change(row, "category", category)

    def set_module(self, row: int, module: int) -> None:
        """Replace the module of an event."""
        self._columns["module"][row] = module
        if self.journal is not None:
            self.journal.change(row, "module", module)

    def set_tensor(self, row: int, tensor: int) -> None:
        """Replace the tensor description of an event."""
        self._columns["tensor"][row] = tensor
        if self.journal is not None:
            self.journal.change(row, "tensor", tensor)

    def finish(self, devices: Iterable[TraceDevice] | None = None) -> MemoryTrace:
        """The trace so far; the builder can go on afterwards.

        Args:
            devices: the devices with their final segments; None keeps those given at the start.
        """
        columns: dict[str, Any] = {
            name: np.array(self._columns[name], dtype=dtype) for name, dtype in COLUMNS.items()
        }
        return MemoryTrace(
            **columns,
            ops=tuple(self._ops.entries),
            modules=tuple(self._modules.entries),
            phases=tuple(self._phases.entries),
            tensors=tuple(self._tensors.entries),
            frames=tuple(self._frames),
            stacks=tuple(self._stacks),
            devices=self.devices if devices is None else tuple(devices),
            meta=dict(self.meta),
        )
