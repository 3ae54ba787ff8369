"""Saved tensors that are away on the host: what leaves, what is there, and what has to come back next."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from vramfit.techniques.support.host_lane import Lane
from vramfit.techniques.support.saved import (
    Found,
    StoragePlace,
    StorageSpan,
    in_backward,
    span,
    written_in_place,
)

_TIDY_AFTER = 256


class Parcel:
    """A stretch of a storage: on the card, on the host, or on its way."""

    __slots__ = (
        *("__weakref__", "index", "nbytes", "start", "stop", "there"),
        *("_coming", "_end", "_host", "_lane", "_spoiled", "_version"),
    )

    def __init__(self, stretch: StorageSpan, lane: Lane) -> None:
        flat = stretch.flat
        self.start, self.stop, self.nbytes, self.index = stretch.start, stretch.stop, flat.nbytes, 0
        self.there: torch.Tensor | None = flat  # on the card
        self._lane, self._version, self._spoiled, self._coming = lane, flat._version, False, False
        self._host, self._end = lane.out(flat)

    def let_go(self) -> None:
        """Drop what is on the card; what is computed from now on waits until the copy with it is over."""
        if self.there is None:
            return
        self._settle()
        self._look(self.there)
        self.there = None

    def call_back(self) -> None:
        """Begin the copy back onto the card."""
        (self.there,), self._end = self._lane.back([self._host])
        self._coming = True

    def arrive(self) -> torch.Tensor:
        """The stretch, on the card, for what is computed from now on.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        if self.there is None:
            self.call_back()
        if self._coming:  # one that has not left yet is used as it is, while it is copied
            self._settle()
        assert self.there is not None
        self._look(self.there)
        if self._spoiled:
            raise written_in_place(self.there, self._version)
        return self.there

    def _look(self, flat: torch.Tensor) -> None:
        """A write to what was saved, before it was out, is the program's error; nobody else has what came back."""
        self._spoiled |= not self._coming and flat._version != self._version

    def _settle(self) -> None:
        if self._end is not None:
            self._lane.wait(self._end)
            self._end = None

    def __del__(self) -> None:
        """Memory that a copy is still to be written to must not serve another before."""
        if self._coming:
            self._settle()


class Ledger:
    """All parcels of a model. Copies and pickles of it are empty.

    Args:
        lane_of: the lane to the host of a device, None where tensors stay.
        window: most bytes on their way out, and most bytes back ahead of their use.
    """

    def __init__(self, lane_of: Callable[[torch.device], Lane | None], window: int) -> None:
        self._lane_of, self._window = lane_of, window
        self._lanes: dict[torch.device, Lane | None] = {}
        self._found: Found[Parcel] = Found()
        self._order: list[weakref.ref[Parcel]] = []
        self._leaving: list[weakref.ref[Parcel]] = []
        self._ahead: list[weakref.ref[Parcel]] = []
        self._task, self._tidy_at = -1, _TIDY_AFTER

    def __reduce__(self) -> tuple[Any, ...]:
        """Streams and tensors of a step under way belong to this object alone."""
        return Ledger, (self._lane_of, self._window)

    def lane(self, device: torch.device) -> Lane | None:
        """The lane to the host of a device; None where tensors stay."""
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]

    def send(self, tensor: torch.Tensor, lane: Lane) -> Away:
        """Send a saved tensor to the host, or find that its storage was sent already."""
        first, last = span(tensor)
        parcel = self._found.of(tensor, lambda known: known.start <= first and last <= known.stop)
        if parcel is None:
            parcel = Parcel(StorageSpan(tensor), lane)
            self._note(tensor, parcel)
        return Away(self, parcel, StoragePlace(tensor))

    def _note(self, tensor: torch.Tensor, parcel: Parcel) -> None:
        if len(self._order) >= self._tidy_at:
            self._tidy()
        self._found.add(tensor, parcel)
        parcel.index = len(self._order)
        reference = weakref.ref(parcel)
        self._order.append(reference)
        # The newest is in use in any case.
        leaving = deque(
            known for ref in self._leaving if (known := ref()) is not None and known.there is not None
        )
        under_way = sum(known.nbytes for known in leaving)
        while under_way > self._window:
            first = leaving.popleft()
            first.let_go()
            under_way -= first.nbytes
        self._leaving = [*map(weakref.ref, leaving), reference]

    def fetch(self, parcel: Parcel) -> torch.Tensor:
        """A stretch on the card, and the ones that are likely to be asked for next on their way."""
        if in_backward():
            self._expect_end()
        flat = parcel.arrive()
        self._ahead = [ref for ref in self._ahead if (known := ref()) is not None and known is not parcel]
        self._call_ahead(parcel.index)
        return flat

    def _call_ahead(self, index: int) -> None:
        """Call back what was saved before: a backward pass asks for it in the opposite order."""
        ahead = sum(known.nbytes for ref in self._ahead if (known := ref()) is not None)
        for position in range(index - 1, -1, -1):
            reference = self._order[position]
            parcel = reference()
            if parcel is None or parcel.there is not None:
                continue
            if ahead + parcel.nbytes > self._window and (ahead or not self._window):
                return
            parcel.call_back()
            ahead += parcel.nbytes
            self._ahead.append(reference)

    def _expect_end(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """What the backward pass did not release (it may come again) goes from the card."""
        for reference in self._order:
            if (parcel := reference()) is not None:
                parcel.let_go()
        self._tidy()

    def _tidy(self) -> None:
        """Forget what the graph has released."""
        alive = [parcel for ref in self._order if (parcel := ref()) is not None]
        for index, parcel in enumerate(alive):
            parcel.index = index
        self._order = [weakref.ref(parcel) for parcel in alive]
        self._tidy_at = 2 * len(alive) + _TIDY_AFTER
        self._leaving = [ref for ref in self._leaving if (p := ref()) is not None and p.there is not None]
        self._ahead = [ref for ref in self._ahead if (p := ref()) is not None and p.there is not None]
        self._found.tidy()


class Away:
    """What the graph holds of a tensor on the host."""

    __slots__ = ("_ledger", "_parcel", "_place")

    def __init__(self, ledger: Ledger, parcel: Parcel, place: StoragePlace) -> None:
        self._ledger, self._parcel, self._place = ledger, parcel, place

    def unpack(self) -> torch.Tensor:
        """The tensor, on its device.

        Raises:
            RuntimeError: it was written to after it was saved.
        """
        flat = self._ledger.fetch(self._parcel)
        return self._place.of(flat, self._parcel.start)
