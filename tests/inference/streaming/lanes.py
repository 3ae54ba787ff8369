"""Lanes for tests: copies that come late and in any order, and copies that are written down."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import torch

from vramfit.inference.host_lane import CopyLane


class DelayedLane(CopyLane):
    """Each copy is done by a thread of its own after a random time, and what is there before is no number.

    Stricter than a card, whose copies in one direction come in order.

    Args:
        waits: False leaves out the wait before the weights are used: what a program without events would do.
    """

    def __init__(self, seed: int, longest: float = 2e-3, *, waits: bool = True) -> None:
        self._random = random.Random(seed)
        self._longest, self._waits = longest, waits
        self.copies = 0

    def mark(self) -> threading.Event:
        """What the CPU was given is done."""
        done = threading.Event()
        done.set()
        return done

    def into(
        self, places: list[torch.Tensor], hosts: list[torch.Tensor], after: Sequence[threading.Event]
    ) -> threading.Event:
        """See `Lane`."""
        self.copies += 1
        end, before = threading.Event(), list(after)
        delays = [self._random.uniform(0, self._longest) for _ in range(len(places) + 1)]

        def copy() -> None:
            for one in before:
                one.wait()
            with torch.no_grad():
                for place in places:
                    place.fill_(float("nan"))
                for place, host, delay in zip(places, hosts, delays, strict=False):
                    time.sleep(delay)
                    place.copy_(host)
            time.sleep(delays[-1])
            end.set()

        threading.Thread(target=copy, daemon=True).start()
        return end

    def back(self, hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], threading.Event]:
        """See `Lane`."""
        made = [torch.empty_like(host) for host in hosts]
        return made, self.into(made, hosts, [])

    def wait(self, end: threading.Event) -> None:
        """See `Lane`."""
        if self._waits:
            assert end.wait(10)

    def finish(self, end: threading.Event) -> None:
        """See `Lane`."""
        assert end.wait(10)

    def ended(self, end: threading.Event) -> bool:
        """See `Lane`."""
        return end.is_set()


class WrittenLane(CopyLane):
    """Copies at once, and checks what is ordered before what: ends are times of one clock.

    Attributes:
        fills: the end of the last copy into each block of memory, by address.
        used: when something was last computed from it.
    """

    def __init__(self) -> None:
        self._clock = 0
        self.fills: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self._waited: set[int] = set()

    def compute_from(self, weight: torch.Tensor) -> None:
        """Something is computed from a weight in one of the blocks."""
        address = weight.untyped_storage().data_ptr()
        assert self.fills[address] in self._waited, "nobody waited for the copy"
        self.used[address] = self.mark()

    def mark(self) -> int:
        """See `Lane`."""
        self._clock += 1
        return self._clock

    def into(self, places: list[torch.Tensor], hosts: list[torch.Tensor], after: Sequence[int]) -> int:
        """See `Lane`."""
        super().into(places, hosts, after)
        address = places[0].untyped_storage().data_ptr()
        if address in self.used:
            assert max(after) > self.used[address], "the copy may overtake what is computed"
        if address in self.fills and self.fills[address] not in self._waited:
            assert self.fills[address] in after, "the copy may overtake the one before"
        self.fills[address] = self.mark()
        return self.fills[address]

    def wait(self, end: int) -> None:
        """See `Lane`."""
        self._waited.add(end)
