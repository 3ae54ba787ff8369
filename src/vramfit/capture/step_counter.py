"""Counts the steps of a program, and notes when they ask for the same memory again and again.

With optimizers, a step is a round: see NOTE [What a step is] in optimizer_rounds.py.

Without any optimizer, a step is an outermost call of the largest module called so far: a batch of inference, a token
of generation.

A program is ended where the next step begins, in its first forward or backward pass: so the memory that an averaged
copy of the weights, a scheduler or the loading of the next batch takes is still seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any, Protocol

from torch import nn
from torch.nn.parameter import is_lazy

from vramfit.capture.attribution import ModuleStack, PhaseTracker, ProgramPhase
from vramfit.capture.storages import StorageMeter
from vramfit.launch.stopping import StepSink
from vramfit.patching import PatchStack
from vramfit.trace.outcome import End, Unit


class Demand(Protocol):
    """The memory that steps ask for."""

    def take(self) -> tuple[Hashable, Hashable]:
        """The requests since the last call, and the peaks so far, as values that can be compared."""


class MeteredDemand:
    """The requests that a meter has written to its trace."""

    def __init__(self, meter: StorageMeter[Any]) -> None:
        self._meter = meter
        self._row = 0

    def take(self) -> tuple[Hashable, Hashable]:
        """The requests since the last call, and the peaks so far."""
        meter = self._meter
        with meter.lock:
            meter.collect()
            asked = hash(meter.builder.requests(self._row))
            self._row = len(meter.builder)
        found = (meter.lifetime_peaks(device.index) for device in meter.machine.devices)
        return asked, tuple((peaks.allocated, peaks.reserved) for peaks in found)


class StepCounter:
    """Counts steps, and ends the program when there were enough. See the module's first lines."""

    def __init__(
        self, modules: ModuleStack, phases: PhaseTracker, demand: Demand, stopping: StepSink
    ) -> None:
        self._modules = modules
        self._phases = phases
        self._demand = demand
        self._stopping = stopping
        self._sizes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._largest: weakref.ref[nn.Module] | None = None
        self._passing = False  # the last call of the largest module has not been counted yet
        self._due = False  # a step has ended, the next has not begun
        self._name = ""
        self._unit: Unit | None = None
        self._steps = self._steady = 0
        self._before: tuple[Hashable, Hashable] | None = None

    def install(self, patches: PatchStack) -> None:
        """Follow the phases and the optimizers of this process until `patches` are undone."""
        patches.set(self._phases, "on_step", self._stepped)
        patches.set(self._phases, "before", self.begin)

    def begin(self, phase: ProgramPhase) -> None:
        """Act on a phase that is about to begin.

        Raises:
            SystemExit: there were enough steps; see NOTE [How a program is ended] in launch/stopping.py.
        """
        self._stopping.check()
        if phase is ProgramPhase.OPTIMIZER:
            return
        if phase is ProgramPhase.FORWARD and not self._phases.rounds:
            self._forward()
        if self._due:
            self._due = False
            if self._stopping.enough():
                self._phases.end()
                self._stopping.stop(End.STEPS)

    def close(self) -> None:
        """Count what the program did last, at its end, though nothing shows whether that asks for more."""
        passed, self._passing = self._passing, False
        if passed and not self._stopping.asked:
            self._steps += 1
            self._tell()

    def _count(self, unit: Unit) -> None:
        """Count a step that is complete."""
        found = self._demand.take()
        if unit is not self._unit:
            self._unit, self._steps, self._before = unit, 0, None
        self._steps += 1
        self._steady = self._steady + 1 if found == self._before else 1
        self._before = found
        self._due = True
        self._tell()

    def _tell(self) -> None:
        unit = self._unit or Unit.FORWARD
        name = self._name if unit is Unit.FORWARD else ""
        self._stopping.note(steps=self._steps, unit=unit, steady=self._steady, module=name)

    def _stepped(self, ends_round: bool) -> None:
        self._passing = False
        if ends_round:
            self._count(Unit.OPTIMIZER)

    def _forward(self) -> None:
        """Count an outermost call of a module that begins where there is no optimizer."""
        root = self._modules.root()
        if root is None:
            return
        largest = None if self._largest is None else self._largest()
        if root is largest:
            self._count(Unit.FORWARD)
        elif self._size(root) > (0 if largest is None else self._size(largest)):
            self._largest, self._name = weakref.ref(root), type(root).__name__
            self._unit, self._steps, self._steady = None, 0, 0
            self._passing = True

    def _size(self, module: nn.Module) -> int:
        size = self._sizes.get(module)
        if size is None:
            size = sum(p.numel() for p in module.parameters() if not is_lazy(p))
            self._sizes[module] = size
        return size


def count_steps(meter: StorageMeter[Any], stopping: StepSink, patches: PatchStack) -> StepCounter:
    """Count the steps of the program that a meter meters."""
    counter = StepCounter(meter.modules, meter.phases, MeteredDemand(meter), stopping)
    stopping.lock = meter.lock
    counter.install(patches)
    return counter
