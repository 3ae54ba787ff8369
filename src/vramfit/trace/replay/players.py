"""Players, which serve the steps of a replay with an allocator: as recorded, or under other settings."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from vramfit.allocator import AllocatorConfig, CachingAllocator, Driver, OutOfMemory
from vramfit.allocator.restore import restore
from vramfit.allocator.versions import TorchVersion
from vramfit.trace.model import EventKind, Segment
from vramfit.trace.replay.steps import FREE, PoolId, RecordedDriver, ReplaySteps, Special, is_release
from vramfit.trace.segments import INACTIVE, PENDING

_COMMON: PoolId = (0, 0)
# A block that another stream uses is finished when the recording says so, whichever stream it was.
_OTHER_STREAM = -1
_STRETCH = 4096
"""Steps between two looks at whether a replay should go on."""


class Player(ABC):
    """One device's allocator and how far its replay has come.

    Attributes:
        allocator: serves the requests.
        matched: requests that got the recorded address.
        unknown_frees: frees of what is not allocated.
        first_difference: the first request with another address than recorded, in words.
    """

    def __init__(self, plan: ReplaySteps, allocator: CachingAllocator) -> None:
        """Stand before the first step."""
        self.plan = plan
        self.allocator = allocator
        self.matched = 0
        self.ooms = 0
        self.unknown_frees = 0
        self.first_difference: str | None = None
        self.moved: dict[int, int] = {}
        """Recorded address -> address in the replay, where they differ; 0 where there is none."""
        self._pools: set[PoolId] = set()

    @abstractmethod
    def begin(self, start: Sequence[Segment]) -> None:
        """Put the allocator into the state at the start of the trace."""

    @abstractmethod
    def run(self) -> None:
        """Serve all steps."""

    @abstractmethod
    def request(self, special: Special, address: int) -> None:
        """Serve a special step that is a request."""

    def special(self, special: Special, address: int) -> None:
        """Serve a step that is more than one call."""
        if special.kind == EventKind.ALLOC:
            self.request(special, address)
        elif special.kind == EventKind.OOM:
            # The program that was recorded did not get this block, so it did not keep it either.
            found = self.serve(special.size, special.stream)
            if found:
                self.allocator.free(found)
        elif special.kind == EventKind.FREE_REQUESTED:
            self.give_back(address)
        elif special.kind == EventKind.FREE_COMPLETED:
            self.finish(address)

    def _malloc(self) -> Callable[[int], int]:
        """The allocator's malloc on the stream of the plan."""
        malloc, stream = self.allocator.malloc, self.plan.stream
        return partial(malloc, stream=stream) if stream else malloc

    def serve(self, size: int, stream: int, pool: PoolId = _COMMON) -> int:
        """An address for a request; 0 if the card has no room."""
        allocator = self.allocator
        if pool != _COMMON:
            if pool not in self._pools:
                self._pools.add(pool)
                allocator.create_pool(pool)  # held to the end, as a graph holds it
            allocator.begin_pool(pool)
            if pool[0]:  # a graph's own, so the request is part of its capture
                allocator.mark_capture_begin()
        try:
            return allocator.malloc(size, stream)
        except OutOfMemory:
            self.ooms += 1
            return 0
        finally:
            if pool != _COMMON:
                if pool[0]:
                    allocator.mark_capture_end()
                allocator.end_pool(pool)
                allocator.release_pool(pool)

    def give_back(self, address: int) -> None:
        """Free what the recording has at ``address``; `finish` completes it."""
        address = self.moved.get(address, address)
        try:
            if address:
                self.allocator.record_stream(address, _OTHER_STREAM)
            self.allocator.free(address)
        except ValueError:
            self.unknown_frees += 1

    def finish(self, address: int) -> None:
        """Complete a free that `give_back` left waiting."""
        if not self.allocator.complete_free(self.moved.pop(address, address)):
            self.unknown_frees += 1


class ExactPlayer(Player):
    """Expects everything to come out as recorded."""

    def __init__(
        self, plan: ReplaySteps, config: AllocatorConfig, torch_version: TorchVersion, total_bytes: int
    ) -> None:
        """Stand before the first step, on a card that acts as the recorded one."""
        self.driver = RecordedDriver(total_bytes)
        allocator = CachingAllocator(
            self.driver, config=config, torch_version=torch_version, device=plan.device
        )
        super().__init__(plan, allocator)

    def begin(self, start: Sequence[Segment]) -> None:
        """Take over the recorded state, addresses and all."""
        possible = [
            segment for segment in start if self.driver.hold(segment["address"], segment["total_size"])
        ]
        restore(self.allocator, possible, self.plan.lowest_mappings)

    def run(self) -> None:
        """Serve all steps."""
        plan, moved = self.plan, self.moved
        malloc, free = self._malloc(), self.allocator.free
        specials = iter(plan.specials)
        differing = 0
        for address, size in zip(plan.addresses, plan.sizes, strict=True):
            if size > 0:
                try:
                    found = malloc(size)
                except OutOfMemory:
                    self.ooms += 1
                    found = 0
                if found != address:
                    differing += 1
                    self._note(address, found, size)
            elif size == FREE:
                try:
                    free(moved.pop(address, address) if moved else address)
                except ValueError:
                    self.unknown_frees += 1
            else:
                self.special(next(specials), address)
        self.matched += plan.plain_allocations - differing

    def special(self, special: Special, address: int) -> None:
        """Serve a step that is more than one call."""
        self.driver.expect(special.events)
        if self._empties_cache(special):
            self.allocator.empty_cache()
        super().special(special, address)
        self.driver.expect(())

    def request(self, special: Special, address: int) -> None:
        """Serve a request, and compare its address with the recorded one."""
        ooms = self.ooms
        found = self.serve(special.size, special.stream, special.pool)
        if not found:
            # The replay has gone another way than the recording; the request itself was served there.
            self.ooms = ooms
            self.driver.expect(())
            found = self.serve(special.size, special.stream, special.pool)
        if found == address:
            self.matched += 1
        else:
            self._note(address, found, special.size)

    def _empties_cache(self, special: Special) -> bool:
        """Whether the recording shows the whole cache released before anything else.

        The program may have done that, or the request that follows had failed: the outcome is the same, unless settings
        let a request release only a part of the cache.
        """
        released = {event[1] for event in itertools.takewhile(is_release, special.events)}
        config = self.allocator.config
        if special.kind == EventKind.SEGMENT_FREE or config.expandable_segments or not released:
            return bool(released)
        if config.max_split_size is None and not config.garbage_collection_threshold:
            return True
        whole = {
            segment["address"]
            for segment in self.allocator.segments()
            if segment["active_size"] == 0 and segment["segment_pool_id"] == _COMMON
        }
        return released == whole

    def _note(self, recorded: int, replayed: int, size: int) -> None:
        self.moved[recorded] = replayed
        if self.first_difference is None:
            where = f"{replayed:#x}" if replayed else "nowhere"
            self.first_difference = f"{size} bytes recorded at {recorded:#x}, replayed at {where}"


class WhatIfPlayer(Player):
    """Serves the requests on a fresh card, under other settings than recorded.

    Attributes:
        stop_above: break off as soon as more bytes than this are reserved; None never does.
        tick: called now and then with the share of the steps that is done.
        stopped: it was broken off.
    """

    def __init__(
        self,
        plan: ReplaySteps,
        config: AllocatorConfig,
        torch_version: TorchVersion,
        total_bytes: int,
        driver: Driver | None = None,
    ) -> None:
        """Stand before the first step, on an empty card: `driver`, or one of so many bytes."""
        driver = driver or Driver(total_bytes)
        super().__init__(
            plan, CachingAllocator(driver, config=config, torch_version=torch_version, device=plan.device)
        )
        self.stop_above: int | None = None
        self.tick: Callable[[float], None] | None = None
        self.stopped = False

    def begin(self, start: Sequence[Segment]) -> None:
        """Ask for the blocks that were there, in the order of their addresses."""
        for segment in start:
            for block in segment["blocks"]:
                if block["state"] != INACTIVE:
                    address = self.serve(
                        block["requested_size"], segment["stream"], segment["segment_pool_id"]
                    )
                    self.moved[block["address"]] = address
                    if block["state"] == PENDING:
                        self.give_back(block["address"])
        self.allocator.reset_peak_stats()
        self.allocator.reset_accumulated_stats()

    def counts(self) -> tuple[int, int, int]:
        """How often memory was taken from and given back to the driver since the start, and the whole cache released.

        The last is for want of memory.
        """
        stats = self.allocator.memory_stats_flat()
        return stats["num_device_alloc"], stats["num_device_free"], stats["num_alloc_retries"]

    def run(self) -> None:
        """Serve all steps."""
        plan = self.plan
        specials = iter(plan.specials)
        count = len(plan.sizes)
        if self.stop_above is None and self.tick is None:
            self._serve_steps(plan.addresses, plan.sizes, specials)
            return
        for begin in range(0, count, _STRETCH):
            end = begin + _STRETCH
            self._serve_steps(plan.addresses[begin:end], plan.sizes[begin:end], specials)
            if self.stop_above is not None and self.allocator.peak_reserved_bytes > self.stop_above:
                self.stopped = end < count
                return
            if self.tick is not None:
                self.tick(min(1.0, end / count))

    def _serve_steps(
        self, addresses: Sequence[int], sizes: Sequence[int], specials: Iterator[Special]
    ) -> None:
        moved = self.moved
        malloc, free = self._malloc(), self.allocator.free
        for address, size in zip(addresses, sizes, strict=True):
            if size > 0:
                try:
                    moved[address] = malloc(size)
                except OutOfMemory:
                    self.ooms += 1
                    moved[address] = 0
            elif size == FREE:
                try:
                    free(moved.pop(address, 0))
                except ValueError:
                    self.unknown_frees += 1
            else:
                self.special(next(specials), address)

    def special(self, special: Special, address: int) -> None:
        """Serve a step that is more than one call."""
        if special.kind == EventKind.SEGMENT_FREE:
            self.allocator.empty_cache()
        super().special(special, address)

    def request(self, special: Special, address: int) -> None:
        """Serve a request, with the cache emptied first where the program did that."""
        if special.empties:
            self.allocator.empty_cache()
        self.moved[address] = self.serve(special.size, special.stream, special.pool)


class OomPlayer(WhatIfPlayer):
    """A `WhatIfPlayer` that stops before the request of one recorded failure.

    Attributes:
        failed: that request, None if it was not reached.
    """

    def __init__(
        self,
        plan: ReplaySteps,
        config: AllocatorConfig,
        torch_version: TorchVersion,
        total_bytes: int,
        oom: int,
    ) -> None:
        """Stand before the first step; ``oom`` counts the failures from 0."""
        super().__init__(plan, config, torch_version, total_bytes)
        self.failed: Special | None = None
        self._before = oom

    def run(self) -> None:
        """Serve the steps up to that request."""
        with contextlib.suppress(_Reached):
            super().run()

    def special(self, special: Special, address: int) -> None:
        """Serve a step that is more than one call, unless it is the one."""
        if special.kind == EventKind.OOM:
            if not self._before:
                self.failed = special
                raise _Reached
            self._before -= 1
        super().special(special, address)


class _Reached(Exception):
    """The request was reached."""
