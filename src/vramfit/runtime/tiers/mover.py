"""The books of a store, and the moves of its tensors between tiers.

NOTE [Moves]: one lock guards the books. A tier is called with the lock held, and only begins a copy; the wait for its
end is outside of the lock, and the tensor is marked as busy meanwhile. Room in the target is taken before a copy
begins, and the source is let go after it has ended, so that a copy that fails leaves everything as it was. Who needs
room sends others down, which may need room further down; nobody waits there for somebody further up, so that moves do
not wait for each other in a circle.

NOTE [Who holds]: a tensor that was given out is not sent down while somebody holds its memory: a view, or a graph that
saved it. torch counts that (`vramfit.runtime.tiers.memory_tiers.holders`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from vramfit.errors import StoreFull
from vramfit.runtime.tiers.entries import Entry, TierPlace, Traffic
from vramfit.runtime.tiers.tier import NoRoom, Tier
from vramfit.runtime.tiers.tier_lanes import TierLane
from vramfit.units import format_bytes

_LOOK_AGAIN = 0.05
"""Seconds after which a thread that waits for room looks who still holds what: nobody tells when a tensor is let go."""


class Mover:
    """Moves entries between tiers. See NOTE [Moves]; methods are called with the lock of `changed` held.

    Args:
        tiers: from the one where tensors are used down to the largest.
        lane: who copies.
        patience: seconds to wait for room that other threads hold.

    Attributes:
        entries: by key.
        used: bytes of each tier.
        peak: the most that was used of each.
        changed: its lock guards all of this; notified when something moved or was let go.
        traffic: what was done so far.
    """

    def __init__(self, tiers: Sequence[Tier], lane: TierLane, patience: float) -> None:
        self.tiers, self.lane, self._patience = tuple(tiers), lane, patience
        self.entries: dict[Hashable, Entry] = {}
        self.used, self.peak = [0] * len(self.tiers), [0] * len(self.tiers)
        self.changed = threading.Condition(threading.Lock())
        self.traffic = Traffic()
        self._movers: set[int] = set()
        self._pausing: set[int] = set()
        for number, tier in enumerate(self.tiers):
            tier.movable = lambda number=number: self._movable(number)  # type: ignore[misc]

    # -- entries -------------------------------------------------------------------------------------------------

    def settled(self, key: Hashable) -> Entry:
        """The entry, when nobody moves it.

        Raises:
            KeyError: there is none.
        """
        while (entry := self.entries[key]).busy is not None:
            self.changed.wait()
        return entry

    @contextlib.contextmanager
    def moving(self, entry: Entry) -> Iterator[None]:
        """Mark an entry that nobody moves as moved by this thread."""
        me = threading.get_ident()
        outermost = me not in self._movers
        self._movers.add(me)
        entry.busy = me
        try:
            yield
        finally:
            entry.busy = None
            if outermost:
                self._movers.discard(me)
            self.changed.notify_all()

    def await_movers(self) -> None:
        """Wait until no other thread moves anything."""
        while self._movers - {threading.get_ident()}:
            self.changed.wait(_LOOK_AGAIN)

    def wake(self, key: Hashable) -> Entry:
        """The entry, when its tensor is on the device and has come.

        Raises:
            KeyError: there is none.
            StoreFull: there is no room.
            Exception: a copy failed; the tensor is where it was.
        """
        while True:
            entry = self.settled(key)
            if entry.live == 0 and not entry.arriving:
                self.traffic.found += 1
                return entry
            with self.moving(entry):
                if not entry.arriving:
                    self._move(entry, 0, wait=True)
                    self.traffic.woken += 1
                    return entry
                if self._arrived(entry):
                    self.traffic.awaited += 1
                    return entry

    def bring(self, entry: Entry) -> bool:
        """Begin to bring an entry to the device; False where it cannot be done at the moment."""
        if entry.busy is not None or entry.live == 0 or entry.gone:
            return False
        with self.moving(entry):
            try:
                self._move(entry, 0, wait=False)
            except Exception:  # it is a hint: whoever asks for the tensor sees the error
                return False
        self.traffic.prefetched += 1
        return True

    def send_down(self, entry: Entry) -> None:
        """Send an idle entry to a tier below, without a copy where there is a current one.

        Raises:
            StoreFull: there is no room below.
            Exception: a copy failed; the tensor is where it was.
        """
        with self.moving(entry):
            above = entry.live
            if above == 0 and self._is_dirty(entry):
                for number in sorted(entry.places)[1:]:
                    self.release(number, entry.places.pop(number))
            if len(entry.places) > 1:
                self.release(above, entry.places.pop(above))
                entry.live, entry.arriving = min(entry.places), False
                self.traffic.spared += 1
                return
            for number in range(above + 1, len(self.tiers)):
                try:
                    self._move(entry, number, wait=True)
                    break
                except StoreFull:
                    continue
            else:
                raise StoreFull(
                    f"there is no room below the tier {self.tiers[above].name!r} for {entry.key!r}",
                    "Give a tier below a larger budget, or delete what is not needed",
                )
            self.release(above, entry.places.pop(above))
            self.traffic.sent_down += 1

    def forget(self, entry: Entry) -> None:
        """Let an entry's places go."""
        entry.gone = True
        for number in list(entry.places):
            self.release(number, entry.places.pop(number))

    def is_idle(self, entry: Entry) -> bool:
        """Whether nobody moves or uses an entry. See NOTE [Who holds]."""
        if not entry.free:
            return False
        return entry.arriving or not self.tiers[entry.live].held(entry.places[entry.live].handle)

    # -- places --------------------------------------------------------------------------------------------------

    def take(
        self,
        entry: Entry,
        number: int,
        source: Callable[[], torch.Tensor],
        *,
        patient: bool = True,
        adopting: bool = False,
    ) -> TierPlace:
        """A place in a tier, and the copy to it begun; others go down for it.

        Args:
            source: gives the values. No frame holds them: that of an error would, as long as somebody looks at it.
            patient: whether to wait for room that other threads hold.
            adopting: whether the source itself may become the place.

        Raises:
            StoreFull: there is no room.
            torch.OutOfMemoryError: the device has less than the budget, and nothing is left that could go down.
        """
        tier, nbytes = self.tiers[number], entry.layout.nbytes
        price = tier.price(nbytes)
        if price > tier.capacity:
            raise StoreFull(
                f"a tensor of {format_bytes(nbytes)} is larger than the tier {tier.name!r} "
                f"({format_bytes(tier.capacity)})",
                "Give the tier a larger budget, or cut the tensor",
            )
        until = time.monotonic() + (self._patience if patient else 0.0)
        while True:
            self.make_room(number, price, until)
            try:
                return self._begin(number, price, source(), adopting=adopting)
            except NoRoom as error:
                short = error.__cause__  # whose frames hold what is to go down
                if short is not None:
                    short.__traceback__ = None
            try:
                self._make_some_room(number, price, until)
            except StoreFull as full:
                raise (short or full) from None

    def make_room(self, number: int, price: int, until: float | None = None) -> None:
        """Send entries down until so much of a tier is free.

        Raises:
            StoreFull: what is there is in use.
        """
        if until is None:
            until = time.monotonic() + self._patience
        while self.used[number] + price > self.tiers[number].capacity:
            self._make_some_room(number, price, until)

    def release(self, number: int, place: TierPlace) -> None:
        """Drop a place, when the copies from and to it are over."""
        try:
            self._end(number, place)
        except Exception as error:  # one that failed has ended as well
            error.__traceback__ = None
        place.ends.clear()
        self.tiers[number].drop(place.handle)
        place.handle = None  # an error on its way holds the frames that hold the place
        self.used[number] -= place.price
        self.changed.notify_all()

    def wait(self, ends: Sequence[Any]) -> None:
        """Let what comes begin after these ends; the lock is free meanwhile. Raises what a copy failed with.

        An end has the error, whose frames would hold the end, and all that the callers have given out: until garbage
        is collected nobody could send that down. So no frame keeps an end.
        """
        pending = list(ends)
        if pending:
            self.changed.release()
            try:
                while pending:
                    self.lane.wait(pending.pop(0))
            finally:
                self.changed.acquire()

    # -- within --------------------------------------------------------------------------------------------------

    def _begin(self, number: int, price: int, source: torch.Tensor, *, adopting: bool) -> TierPlace:
        tier, ends = self.tiers[number], []

        def copy(given: torch.Tensor, target: torch.Tensor) -> None:
            ends.append(self.lane.begin(given, target))
            self.traffic.moved_bytes += given.nbytes

        handle = tier.adopt(source) if adopting else None
        if handle is None:
            handle = tier.put(source, copy)
        self.used[number] += price
        self.peak[number] = max(self.peak[number], self.used[number])
        assert self.used[number] <= tier.capacity
        return TierPlace(handle, price, ends)

    def commit(self, entry: Entry, number: int, place: TierPlace, *, wait: bool) -> None:
        """Let an entry have its values in a new place, when the copy is over or where nobody waits for it.

        Raises:
            Exception: the copy failed; the place is dropped.
        """
        if wait:
            try:
                self.wait(place.ends)
            except BaseException:
                self.release(number, place)
                raise
        entry.places[number] = place
        entry.live, entry.arriving = number, not wait
        if number == 0 and wait:
            entry.written, entry.version = False, self.tiers[0].version(place.handle)

    def _move(self, entry: Entry, number: int, *, wait: bool) -> None:
        before = entry.places[entry.live]
        self.wait(before.ends)
        tier = self.tiers[entry.live]
        place = self.take(entry, number, lambda: tier.get(before.handle), patient=wait)
        self.commit(entry, number, place, wait=wait)
        before.ends = list(place.ends)  # which come after its own

    def _arrived(self, entry: Entry) -> bool:
        """Wait for a prefetch; where it failed the tensor is where it was."""
        place = entry.places[0]
        try:
            self.wait(place.ends)
        except Exception as error:  # whoever asks brings it again, and sees that error
            error.__traceback__ = None
            del entry.places[0]
            entry.live, entry.arriving = min(entry.places), False
            self.release(0, place)
            entry.places[entry.live].ends.clear()
            return False
        entry.arriving = False
        entry.written, entry.version = False, self.tiers[0].version(place.handle)
        return True

    def _end(self, number: int, place: TierPlace) -> None:
        for end in place.ends:
            if number == 0:
                self.lane.wait(end)
            else:
                self.lane.finish(end)

    def _is_dirty(self, entry: Entry) -> bool:
        if entry.arriving:
            return False
        return entry.written or self.tiers[0].version(entry.places[0].handle) != entry.version

    def _movable(self, number: int) -> set[int]:
        found = set()
        for entry in self.entries.values():
            place = entry.places.get(number)
            if place is None or not entry.free or entry.arriving or self.tiers[number].held(place.handle):
                continue
            self._end(number, place)
            found.add(id(place.handle))
        return found

    def _make_some_room(self, number: int, price: int, until: float) -> None:
        """Let one tensor leave a tier, or wait for another thread to.

        Raises:
            StoreFull: neither can be.
        """
        spare = [
            entry
            for entry in self.entries.values()
            if number in entry.places and entry.live < number and entry.free and not entry.arriving
        ]
        if spare:
            entry = min(spare, key=lambda one: one.tick)
            self.release(number, entry.places.pop(number))
            return
        victims = (entry for entry in self.entries.values() if entry.live == number)
        for entry in sorted(victims, key=_turn):
            if self.is_idle(entry):
                self.send_down(entry)
                return
        if not self._pause(number, until):
            tier = self.tiers[number]
            raise StoreFull(
                f"{format_bytes(price)} do not fit beside what is in use of the tier {tier.name!r} "
                f"({format_bytes(self.used[number])} of {format_bytes(tier.capacity)})",
                "Let go of tensors that were given out (del, or leave the with block), or give it a larger budget",
            )

    def _pause(self, number: int, until: float) -> bool:
        """Wait a moment for other threads; False where none of them can make room, or time is over."""
        me = threading.get_ident()
        others = any(
            entry.live == number
            and (entry.leases.keys() - {me} or (entry.last_thread != me and not entry.leases))
            for entry in self.entries.values()
        )
        if time.monotonic() >= until or not (others or self._movers - self._pausing - {me}):
            return False
        self._pausing.add(me)
        try:
            self.changed.wait(_LOOK_AGAIN)
        finally:
            self._pausing.discard(me)
        return True


def _turn(entry: Entry) -> tuple[bool, bool, int]:
    """Who goes down first: what was said to be done, the last first; then what was asked for least recently."""
    return not entry.done, entry.arriving, -entry.done if entry.done else entry.tick
