"""Keeps tensors in tiers of memory: what is asked for comes to the first, what is not goes down.

NOTE [Written]: a copy below is current as long as nobody wrote to the tensor. torch counts writes in place, but not
all: its fused optimizers do not count those to their states, nor does anyone who writes by ``.data``. So a tensor
counts as written once it was given out for writing, which ``store[key]`` does; ``reading`` trusts the count.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch

from vramfit.errors import StoreFull, UsageError
from vramfit.runtime.tiers.access_order import AccessOrder
from vramfit.runtime.tiers.entries import Entry, TierPlace, TierUsage, Traffic
from vramfit.runtime.tiers.file_tier import FileTier, SharedTensor
from vramfit.runtime.tiers.mover import Mover
from vramfit.runtime.tiers.tier import Layout, Tier, dense
from vramfit.runtime.tiers.tier_lanes import TierLane, lane_for


class Store:
    """Tensors by keys, in tiers of memory.

    Args:
        tiers: from the one where tensors are used down to the largest.
        device: of the first tier.
        lane: who copies; None takes streams of a card, or a thread.
        ahead: how many tensors are brought before they are asked for, in the order that was learnt.
        patience: seconds to wait for room that other threads hold.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        device: torch.device,
        *,
        lane: TierLane | None = None,
        ahead: int = 1,
        patience: float = 30.0,
    ) -> None:
        self.device, self._ahead = device, ahead
        self._mover = Mover(tiers, lane_for(device) if lane is None else lane, patience)
        self._changed = self._mover.changed
        self._shared: dict[Hashable, TierPlace] = {}
        self._order = AccessOrder()
        self._tick = 0
        self._owner: int | None = os.getpid()

    # -- what a mapping has --------------------------------------------------------------------------------------

    def __setitem__(self, key: Hashable, tensor: torch.Tensor) -> None:
        self.put(key, tensor)

    def __getitem__(self, key: Hashable) -> torch.Tensor:
        """The tensor on the device, for reading and writing; it stays there as long as anyone holds it."""
        with self._open():
            return self._give(key, writes=True)[1]

    def __delitem__(self, key: Hashable) -> None:
        with self._open():
            self._mover.forget(self._mover.settled(key))
            del self._mover.entries[key]
            self._order.forget(key)

    def __contains__(self, key: object) -> bool:
        return key in self._mover.entries

    def __len__(self) -> int:
        return len(self._mover.entries)

    def __iter__(self) -> Iterator[Hashable]:
        with self._changed:
            return iter(list(self._mover.entries))

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise UsageError(
            "a store holds memory of this process alone and cannot be pickled",
            "Send what share(key) gives to the other process",
        )

    # -- tensors in and out --------------------------------------------------------------------------------------

    def put(self, key: Hashable, tensor: torch.Tensor, *, tier: str | None = None) -> None:
        """Take a tensor, in the place of one that has the key.

        One that lies on the device, and is no view, is taken as it is and not copied: as in a dictionary, who still
        holds it writes to the same memory, and it cannot be sent down before they let go. Others are copied.

        Args:
            tier: where to; None is the first that has room, beginning with the device.

        Raises:
            StoreFull: there is no room, or it is larger than the device's budget; nothing has changed.
            UsageError: it is no dense tensor, or there is no such tier.
        """
        source = dense(tensor)
        with self._open():
            mover = self._mover
            if key in mover.entries and tier is None and self._is_same(mover.settled(key), source):
                mover.entries[key].written = True
                self._touch(mover.entries[key])
                return
            entry = Entry(key, Layout.of(source))
            with mover.moving(entry):
                self._place(entry, source, tier)
            while (old := mover.entries.get(key)) is not None:
                if old.busy is not None:
                    self._changed.wait()
                    continue
                mover.forget(old)
                del mover.entries[key]
            mover.entries[key] = entry
            self._touch(entry)

    def reading(self, *keys: Hashable) -> contextlib.AbstractContextManager[tuple[torch.Tensor, ...]]:
        """Tensors on the device that are not written to within the block; they stay there meanwhile.

        Raises:
            KeyError: there is no such tensor.
            StoreFull: they do not fit together with what else is in use.
        """
        return self._leased(keys, writes=False)

    def writing(self, *keys: Hashable) -> contextlib.AbstractContextManager[tuple[torch.Tensor, ...]]:
        """Tensors on the device that may be written to within the block; see `reading`."""
        return self._leased(keys, writes=True)

    def on_host(self, key: Hashable) -> torch.Tensor:
        """A copy on the CPU, from where the tensor is: it is moved nowhere.

        Raises:
            KeyError: there is no such tensor.
        """
        with self._open():
            mover = self._mover
            entry = mover.settled(key)
            with mover.moving(entry):
                layout, place = entry.layout, entry.places[entry.live]
                mover.wait(place.ends)
                target = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
                end = mover.lane.begin(mover.tiers[entry.live].get(place.handle), target)
                mover.wait([end])
                mover.lane.finish(end)
            return target

    # -- hints ---------------------------------------------------------------------------------------------------

    def prefetch(self, *keys: Hashable) -> None:
        """Begin to bring tensors to the device, as far as there is room that nobody uses.

        Raises:
            KeyError: there is no such tensor.
        """
        with self._open():
            entries = [self._mover.entries[key] for key in keys]
            self._bring(entries)

    def done(self, *keys: Hashable) -> None:
        """Say that tensors are not needed soon: they go down before others, those first of which it was said last.

        In a loop over more than fits, what was used last is needed last: this keeps a part of it on the device from
        one round to the next, where the least recently used would be the one that comes next.

        Raises:
            KeyError: there is no such tensor.
        """
        with self._open():
            for key in keys:
                self._tick += 1
                self._mover.entries[key].done = self._tick

    def evict(self, *keys: Hashable) -> None:
        """Send tensors down from the device now.

        Raises:
            KeyError: there is no such tensor.
            StoreFull: one is in use, or there is no room below.
        """
        with self._open():
            for key in keys:
                entry = self._mover.settled(key)
                if entry.live == 0:
                    if not self._mover.is_idle(entry):
                        raise StoreFull(f"the tensor {key!r} is in use", "Let go of it first")
                    self._mover.send_down(entry)

    def make_room(self, nbytes: int) -> None:
        """Send tensors down until so many bytes of the device's budget are free, for what is put there next.

        Raises:
            StoreFull: what is there is in use.
        """
        with self._open():
            self._mover.make_room(0, min(nbytes, self._mover.tiers[0].capacity))

    # -- sharing -------------------------------------------------------------------------------------------------

    def share(self, key: Hashable) -> SharedTensor:
        """A ticket for a copy of the tensor in a file, which another process can open. See `SharedTensor`.

        The copy is what the tensor is now; it counts in the file tier until `unshare` or `close`.

        Raises:
            KeyError: there is no such tensor.
            UsageError: there is no tier of files.
            StoreFull: it has no room.
        """
        number = self._files()
        source = self.on_host(key)
        with self._open():
            mover, entry = self._mover, Entry(key, Layout.of(source))
            with mover.moving(entry):
                mover.commit(entry, number, mover.take(entry, number, lambda: source), wait=True)
            place = entry.places.pop(number)
            for end in place.ends:
                mover.lane.finish(end)
            if (old := self._shared.pop(key, None)) is not None:
                mover.release(number, old)
            self._shared[key] = place
            files = mover.tiers[number]
            assert isinstance(files, FileTier)
            return files.ticket(place.handle)

    def unshare(self, key: Hashable) -> None:
        """Remove the file of `share`; who has opened it keeps the memory.

        Raises:
            KeyError: it is not shared.
        """
        number = self._files()
        with self._open():
            self._mover.release(number, self._shared.pop(key))

    # -- the books -----------------------------------------------------------------------------------------------

    @property
    def traffic(self) -> Traffic:
        """What was done so far."""
        return self._mover.traffic

    @property
    def capacity(self) -> int:
        """Bytes of the device's budget."""
        return self._mover.tiers[0].capacity

    def nbytes_of(self, key: Hashable) -> int:
        """Bytes of a tensor's values.

        Raises:
            KeyError: there is no such tensor.
        """
        return self._mover.entries[key].layout.nbytes

    def tier_of(self, key: Hashable) -> str:
        """The name of the tier that a tensor is in."""
        with self._changed:
            return self._mover.tiers[self._mover.entries[key].live].name

    def usage(self) -> dict[str, TierUsage]:
        """What each tier holds, by name."""
        with self._changed:
            mover = self._mover
            return {
                tier.name: TierUsage(
                    name=tier.name,
                    used=mover.used[number],
                    capacity=tier.capacity,
                    tensors=sum(number in one.places for one in mover.entries.values()),
                    peak=mover.peak[number],
                )
                for number, tier in enumerate(mover.tiers)
            }

    def close(self) -> None:
        """Let all tensors go, and remove the files. Tensors that were given out stay valid."""
        if self._owner != os.getpid():
            return
        with self._changed:
            self._owner = None
            self._mover.await_movers()
            for entry in self._mover.entries.values():
                self._mover.forget(entry)
            self._mover.entries.clear()
            for place in self._shared.values():
                self._mover.release(self._files(), place)
            self._shared.clear()
            for tier in self._mover.tiers:
                tier.close()

    # -- everything below is called with the lock held, but for `_open` --------------------------------------------

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        with self._changed:
            if self._owner is None:
                raise UsageError("the store is closed", "Make another")
            if self._owner != os.getpid():
                raise UsageError(
                    "a store belongs to the process that made it, and this is a forked child",
                    "Make one here, or open what share(key) gives",
                )
            yield

    def _files(self) -> int:
        for number, tier in enumerate(self._mover.tiers):
            if isinstance(tier, FileTier):
                return number
        raise UsageError("the store has no tier of files to share tensors in", 'Give file="1GiB"')

    def _number(self, name: str) -> int:
        for number, tier in enumerate(self._mover.tiers):
            if tier.name == name:
                return number
        names = ", ".join(repr(tier.name) for tier in self._mover.tiers)
        raise UsageError(f"the store has no tier {name!r}", f"It has {names}")

    def _touch(self, entry: Entry) -> None:
        self._tick += 1
        entry.tick, entry.last_thread, entry.done = self._tick, threading.get_ident(), 0

    def _is_same(self, entry: Entry, source: torch.Tensor) -> bool:
        """Whether a tensor is what the store gave out for that key: ``store[key] += 1`` puts it back."""
        if entry.live != 0 or entry.arriving or Layout.of(source) != entry.layout:
            return False
        known = self._mover.tiers[0].get(entry.places[0].handle)
        return bool(known.untyped_storage()._cdata == source.untyped_storage()._cdata)

    def _is_known(self, source: torch.Tensor) -> bool:
        """Whether the memory of a tensor is another entry's."""
        storage = source.untyped_storage()._cdata
        tier = self._mover.tiers[0]
        return any(
            0 in one.places and tier.get(one.places[0].handle).untyped_storage()._cdata == storage
            for one in self._mover.entries.values()
        )

    def _place(self, entry: Entry, source: torch.Tensor, tier: str | None) -> None:
        """Take a new entry's values into a tier, and wait until the source is free."""
        mover = self._mover
        price, top = mover.tiers[0].price(entry.layout.nbytes), mover.tiers[0]
        if price > top.capacity:
            tier = top.name  # which says so
        numbers = range(len(mover.tiers)) if tier is None else (self._number(tier),)
        for number in numbers:
            last = number == numbers[-1]
            adopting = number == 0 and not self._is_known(source)
            try:
                place = mover.take(entry, number, lambda: source, patient=last, adopting=adopting)
            except StoreFull:
                if last:
                    raise
                continue
            mover.commit(entry, number, place, wait=True)
            if source.device.type == "cpu":  # the host may write to it next, which no stream waits for
                for end in place.ends:
                    mover.lane.finish(end)
            if number == 0:
                entry.written = True
            return

    def _give(self, key: Hashable, *, writes: bool) -> tuple[Entry, torch.Tensor]:
        """The tensor on the device, for the calling thread."""
        entry = self._mover.wake(key)
        self._touch(entry)
        if writes:
            entry.written = True
        given = self._mover.tiers[0].get(entry.places[0].handle).detach()
        self._mover.lane.handed_out(given)
        if self._ahead:
            self._order.note(threading.get_ident(), key)
            expected = [self._mover.entries.get(one) for one in self._order.after(key, self._ahead)]
            self._bring([one for one in expected if one is not None])
        return entry, given

    def _bring(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.live != 0 and not self._mover.bring(entry):
                return
            self._touch(entry)

    @contextlib.contextmanager
    def _leased(self, keys: Sequence[Hashable], *, writes: bool) -> Iterator[tuple[torch.Tensor, ...]]:
        me = threading.get_ident()
        leased: list[Entry] = []
        given: list[torch.Tensor] = []
        try:
            with self._open():
                for key in keys:
                    entry, tensor = self._give(key, writes=writes)
                    entry.leases[me] += 1
                    leased.append(entry)
                    given.append(tensor)
                    del tensor
            tensors = tuple(given)
            given.clear()
            yield tensors
        finally:
            with self._changed:
                for entry in leased:
                    entry.leases[me] -= 1
                    if not entry.leases[me]:
                        del entry.leases[me]
                self._changed.notify_all()
