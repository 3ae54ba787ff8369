"""Finds, while a program runs, what it holds beyond its use, and by which name.

NOTE [When it looks]
What is kept from before can only be named while it is alive, and a search passes over the whole heap. So the question
is asked in two parts. At outermost calls of modules (a *pass*) a cheap one: how many bytes are in no module's
parameters, no gradient, no optimizer's state, and were had by no operation for a whole step? It is asked at growing
distances, and where more is allocated than before. Only where those bytes are a large part of the peak, the expensive
one follows: who holds the oldest of the largest group? All that hangs on the name that is found is explained at once,
and blocks like it that come later are added to it without another search. The same is asked where a request fails, and
at the program's end. All of this together takes at most `_SHARE` of the run's processor time, or `_LEAST_SECONDS`, and
never more than `_MOST_SECONDS`.

NOTE [What counts as beyond its use]
A step that has begun and ended without any operation that had the block, or eight passes since the last backward
pass. Within such a stretch of passes also what the autograd graph of an earlier pass holds: a forward pass whose graph
is kept, with no backward pass to come. Whether one came is known later: `vramfit.analysis.held_memory` leaves out such
blocks that a backward pass may have used. Dead cycles, variables of caught errors, and the parameters of a module that
is gone count at any time.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.storages import StorageMeter, StorageRecord
from vramfit.holders.chains import Root, Through
from vramfit.holders.heap import Heap
from vramfit.holders.holds import NameHold, hold_in
from vramfit.patching import PatchStack
from vramfit.trace import Category
from vramfit.trace.holder_notes import (
    HOLDERS,
    LEAST_BYTES,
    Beyond,
    HolderNote,
    least_bytes,
    notes_text,
    spans,
)

_SHARE, _LEAST_SECONDS, _MOST_SECONDS = 0.1, 2.0, 10.0
_LOOK_SECONDS = 3.0
_AT_BOUNDARIES = 0.7
"""Part of that time that looks between passes may take; the rest is left for a failed request and the end."""
_SEARCHES = 6
"""Names that are searched for in one look."""
_OOMS = 3
"""Failed requests that are looked at."""
_COLLECTION = 3
"""Blocks that were last used at so many different times make a collection."""
_PASSES = 8
"""Passes without a backward pass after which what was not used counts as unused."""
_GROWTH = 1.05
"""How much more must be allocated than at the last look for another before its time."""

_NEVER = frozenset(
    {
        Category.WORKSPACES,
        Category.COMMUNICATION_BUFFERS,
        Category.UNSHARDED_PARAMETERS,
        Category.PREFETCH,
    }
)
_MODULES_OWN = frozenset({Category.PARAMETERS, Category.OPTIMIZER_STATE})
_OF_PASSES = frozenset({Category.ACTIVATIONS, Category.TEMPORARIES})
"""What modules make in a pass."""
_OF_MODELS = frozenset({Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE})


@dataclass(slots=True)
class _Kept:
    """A name and the rows of the blocks that it was found to hold."""

    hold: NameHold
    reason: Beyond
    device: int
    rows: dict[int, int] = field(default_factory=dict)  # with the row from which on each counts


class KeptWatch:
    """Watches a program for memory that it holds beyond its use. See NOTE [When it looks].

    Args:
        meter: of this process.
    """

    def __init__(self, meter: StorageMeter[Any]) -> None:
        self._meter = meter
        self._kept: list[_Kept] = []
        self._explained: dict[
            int, _Kept | None
        ] = {}  # row of a block -> what holds it; None where nothing is said
        self._alike: dict[int, _Kept] = {}
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._ran: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._began = [0]  # the row at which each pass began
        self._since_backward = 0
        self._trained = False  # there was a backward pass
        self._step = self._step_began = self._step_before = 0
        self._next = 3  # the pass at which to look
        self._highest = 0
        self._ooms = 0
        self._busy = False
        self._started = time.process_time()
        self.seconds = 0.0
        """Time taken so far."""

    def install(self, patches: PatchStack) -> None:
        """Follow the passes of this process until `patches` are undone."""
        meter = self._meter
        patches.set(meter.phases, "after", self._begun)
        patches.set(meter, "follows_use", True)
        patches.set(meter, "on_oom", self._ran_out)
        patches.call(register_optimizer_step_post_hook(lambda one, *_: self._optimizers.add(one)).remove)

    def end(self, error: BaseException | None) -> None:
        """Look a last time, and leave the notes in the trace's meta.

        Args:
            error: what ended the program; where an error did, its traceback holds what was in use.
        """
        if error is None:
            self._begin_pass()
            self._look(_End(self), self._left(_MOST_SECONDS))
        self.note()

    def note(self) -> None:
        """Leave the notes so far in the trace's meta."""
        if self._kept:
            self._meter.builder.meta[HOLDERS] = notes_text(map(_note, self._kept))

    # -- when ----------------------------------------------------------------------------------------------------

    def _begun(self, phase: ProgramPhase) -> None:
        """Follow the passes, and look where it is time."""
        meter = self._meter
        if phase is ProgramPhase.BACKWARD:
            self._trained, self._since_backward = True, 0
        if phase is not ProgramPhase.FORWARD:
            return
        self._begin_pass()
        self._since_backward += 1
        if (root := meter.modules.root()) is not None:
            self._ran[root] = meter.passes
        if meter.phases.step != self._step:
            self._step = meter.phases.step
            self._step_before, self._step_began = self._step_began, meter.passes
        if self._is_due():
            self._look(_Between(self), self._left(_MOST_SECONDS * _AT_BOUNDARIES))

    def _begin_pass(self) -> None:
        self._meter.passes += 1
        self._began.append(len(self._meter.builder))

    def _is_due(self) -> bool:
        """Whether it is time to look: at passes at growing distances, and where more is allocated than before."""
        allocated = sum(device.allocator.figures()[0] for device in self._devices())
        grown = allocated > self._highest * _GROWTH
        if self._meter.passes < self._next and not (grown and allocated >= LEAST_BYTES):
            return False
        self._next = max(self._next, self._meter.passes + max(1, self._meter.passes // 3))
        self._highest = max(self._highest, allocated)
        return True

    def _devices(self) -> Iterator[Any]:
        """The devices whose allocators are in use."""
        return (one for one in self._meter.machine.devices if getattr(one, "allocator_used", True))

    def _ran_out(self) -> None:
        """Look where a request has failed."""
        self._ooms += 1
        if self._ooms <= _OOMS:
            self._look(_RanOut(self), self._left(_MOST_SECONDS))
        self._begin_pass()  # what is alive now is from before whatever comes next

    def _left(self, most: float) -> float:
        """Seconds that a look may take now."""
        elapsed = time.process_time() - self._started
        return min(_LOOK_SECONDS, min(most, max(_LEAST_SECONDS, _SHARE * elapsed)) - self.seconds)

    # -- what ----------------------------------------------------------------------------------------------------

    def _look(self, moment: _Moment, seconds: float) -> None:
        """Find who holds what is beyond its use at this moment."""
        if seconds <= 0 or self._busy:
            return
        self._busy, began = True, time.thread_time()
        try:
            for device in self._devices():
                self._look_at(device.index, moment, began + seconds)
        finally:
            self._busy = False
            self.seconds += time.thread_time() - began

    def _look_at(self, device: int, moment: _Moment, deadline: float) -> None:
        records = [one for one in self._meter.records() if one.device == device]
        suspects = [one for one in records if moment.suspects(one) and one.row not in self._explained]
        least = least_bytes(self._meter.lifetime_peaks(device).allocated)
        if _bytes(suspects) < least:
            return
        ordinary = self._ordinary()
        suspects = [one for one in suspects if one.key not in ordinary]
        suspects = [one for one in suspects if not self._is_like_another(one)]
        left = deadline - time.thread_time()
        if _bytes(suspects) < least or left <= 0:
            return
        with Heap.now(left) as heap:
            for _ in range(_SEARCHES):
                suspects = self._explain(heap, suspects, moment)
                if _bytes(suspects) < least or time.thread_time() > deadline:
                    return

    def _is_like_another(self, record: StorageRecord) -> bool:
        """Whether blocks of the same stack were found to be held: this one then is by the same name."""
        kept = self._alike.get(self._meter.builder.stack_of(record.row))
        if kept is None or kept.device != record.device or kept.reason is Beyond.CYCLE:
            return False
        self._add(kept, record)
        return True

    def _explain(self, heap: Heap, suspects: list[StorageRecord], moment: _Moment) -> list[StorageRecord]:
        """Find who holds the oldest of the largest group; gives those that are not explained yet."""
        stack_of = self._meter.builder.stack_of
        groups: dict[int, list[StorageRecord]] = {}
        for record in suspects:
            groups.setdefault(stack_of(record.row), []).append(record)
        group = max(groups.values(), key=_bytes)
        sample = min(group, key=lambda record: record.row)
        hold = hold_in(heap, sample.key)
        reason = None if hold is None else moment.reason(hold, sample)
        if hold is None or reason is None:
            gone = {record.row for record in group}
            self._explained.update(dict.fromkeys(gone))
            return [record for record in suspects if record.row not in gone]
        kept = self._kept_by(hold, reason, sample.device)
        held = [one for one in suspects if one.key in hold.storages or one is sample]
        for record in held:
            self._add(kept, record)
            self._alike[stack_of(record.row)] = kept
        return [one for one in suspects if one.row not in kept.rows]

    def _add(self, kept: _Kept, record: StorageRecord) -> None:
        """Note that a name has a block, from the pass on that did not use it any more."""
        following = record.used + 1
        kept.rows[record.row] = (
            self._began[following] if following < len(self._began) else len(self._meter.builder)
        )
        self._explained[record.row] = kept

    def _kept_by(self, hold: NameHold, reason: Beyond, device: int) -> _Kept:
        """What is noted of a name already, or a new note."""
        for kept in self._kept:
            same = kept.hold.name == hold.name and kept.hold.chain.root is hold.chain.root
            if same and kept.device == device and kept.reason is reason:
                return kept
        kept = _Kept(hold, reason, device)
        self._kept.append(kept)
        return kept

    # -- what is in use ------------------------------------------------------------------------------------------

    def _ordinary(self) -> set[int]:
        """The storages of models, gradients and optimizers in use."""
        meter, keys = self._meter, set[int]()
        outdated = self._outdated()
        for module in meter.modules.known():
            if module in outdated:
                continue
            for part in (*module.__dict__["_parameters"].values(), *module.__dict__["_buffers"].values()):
                keys.update(self._keys(part))
        for record in meter.records():
            # Of a parameter without a module nothing says that its module is gone.
            if record.category == Category.PARAMETERS and record.module is None:
                keys.add(record.key)
        for parameter in meter.parameters():
            if keys.issuperset(self._keys(parameter)):
                keys.update(self._keys(parameter.grad))
        for optimizer in list(self._optimizers):
            for parameter, state in list(optimizer.state.items()):
                if isinstance(state, dict) and keys.issuperset(self._keys(parameter)):
                    for value in state.values():
                        keys.update(self._keys(value))
        return keys

    def _outdated(self) -> set[torch.nn.Module]:
        """Modules of models that ran for a while, and then gave way to another model of the same class."""
        newest: dict[type, int] = {}
        for module, ran in list(self._ran.items()):
            newest[type(module)] = max(ran, newest.get(type(module), 0))
        old = [
            module
            for module, ran in list(self._ran.items())
            if ran < min(self._step_before, newest[type(module)])
        ]
        return {part for module in old for part in module.modules()}

    def _keys(self, value: object) -> list[int]:
        """The storages of a tensor, or of those inside a wrapper; none for what is no tensor."""
        if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
            return []
        inside = self._meter._inside(value)
        if inside is not None:
            return [key for part in inside if part is not value for key in self._keys(part)]
        return [value.untyped_storage()._cdata] if value.layout is torch.strided else []

    @property
    def used_before(self) -> int:
        """The pass before which something must last have been used to count as unused now."""
        by_step = self._step_before if self._step >= 2 else 0
        by_pass = self._meter.passes - _PASSES + 1 if self._since_backward >= _PASSES else 0
        return max(by_step, by_pass)


# -- Moments at which it looks: what is suspected, and what counts --------------------------------------------------


class _Moment:
    """Between passes, and what all moments have in common."""

    graph_after = _PASSES
    """Passes since the last backward pass after which a graph counts as kept."""

    def __init__(self, watch: KeptWatch) -> None:
        self._builder = watch._meter.builder
        self._before = watch.used_before
        self._now = watch._meter.passes
        self._graphs = watch._since_backward >= self.graph_after

    def suspects(self, record: StorageRecord) -> bool:
        """Whether a block may be beyond its use."""
        if record.category in _NEVER:
            return False
        return record.used < self._before or (self._graphs and self._has_graph(record))

    def reason(self, hold: NameHold, record: StorageRecord) -> Beyond | None:
        """Why what was found counts; None where it does not."""
        if hold.chain.root in (Root.DEAD_CYCLE, Root.GRAPH_CYCLE):
            return Beyond.CYCLE
        if Through.TRACEBACK in hold.chain.through:
            return Beyond.ERROR
        if hold.chain.root in (Root.HIDDEN, Root.UNFINISHED):
            return None
        if self._graphs and Through.AUTOGRAD in hold.chain.through:
            return Beyond.GRAPH
        if record.category in _MODULES_OWN and record.module is not None:
            return Beyond.NO_MODULE
        return Beyond.UNUSED if record.used < self._before else None

    def _has_graph(self, record: StorageRecord) -> bool:
        old = record.graph and record.used < self._now and record.category in _OF_PASSES
        return old and self._builder.module_of(record.row) >= 0


class _Between(_Moment):
    """As a pass begins."""


class _RanOut(_Moment):
    """Where a request has failed: caught errors, cycles and modules that are gone count whatever their age."""

    def __init__(self, watch: KeptWatch) -> None:
        super().__init__(watch)
        self._graphs = watch._since_backward >= (_PASSES if watch._trained else 2)

    def suspects(self, record: StorageRecord) -> bool:
        """Whether a block is from before what failed."""
        return record.category not in _NEVER and (record.used < self._now or record.category in _OF_MODELS)


class _End(_Moment):
    """At the end of the program, where no step is at work: all counts that was not used last."""

    def __init__(self, watch: KeptWatch) -> None:
        super().__init__(watch)
        self._graphs = True
        # What is made ready for a pass is used before it begins.
        self._before = max(self._before, self._now - 2)

    def suspects(self, record: StorageRecord) -> bool:
        """Whether a block is left."""
        return record.category not in _NEVER


def _bytes(records: list[StorageRecord]) -> int:
    return sum(record.nbytes for record in records)


def _note(kept: _Kept) -> HolderNote:
    hold, chain, rows = kept.hold, kept.hold.chain, kept.rows
    if kept.reason is Beyond.UNUSED and len(set(rows.values())) >= _COLLECTION:
        rows = {row: row for row in rows}  # a collection that grew, and has each of them from the start
    return HolderNote(
        name=hold.name,
        where=hold.where,
        root=chain.root.value,
        through=tuple(sorted(part.value for part in chain.through)),
        chain=chain.text,
        kind=hold.kind,
        elements=hold.elements,
        reason=kept.reason,
        device=kept.device,
        rows=spans(rows),
    )


def watch_kept(meter: StorageMeter[Any], patches: PatchStack) -> KeptWatch:
    """Watch the program that a meter meters, until `patches` are undone."""
    watch = KeptWatch(meter)
    watch.install(patches)
    return watch
