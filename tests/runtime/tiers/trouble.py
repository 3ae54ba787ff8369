"""Trouble for a store of tiers: late and failing copies, random work of threads beside dictionaries, and kills."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vramfit.errors import StoreFull
from vramfit.runtime.tiers.file_tier import FileTier
from vramfit.runtime.tiers.memory_tiers import DeviceTier, PinnedTier
from vramfit.runtime.tiers.pool_tier import PoolTier
from vramfit.runtime.tiers.store import Store
from vramfit.runtime.tiers.tier import Copy, Tier

CPU = torch.device("cpu")
KIB = 1024
KEYS = 24
SIZES = (0, 1, 100, 127, 128, 129, 250, 400, 512)
"""Values of a tensor, four bytes each: at most a quarter of the device's budget."""


class CopyLost(RuntimeError):
    """What a copy fails with here."""


class LateLane:
    """Copies that come late, in any order, and of which some fail.

    Args:
        seed: of the chances.
        latest: seconds, at most.
        failing: share of the copies that fail.
    """

    def __init__(self, seed: int, latest: float, failing: float) -> None:
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._latest, self.failing = latest, failing
        self._workers = ThreadPoolExecutor(4)
        self.failed = 0

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        with self._lock:
            late = self._random.random() * self._latest
            fails = self._random.random() < self.failing
            self.failed += fails
        return self._workers.submit(_copy, [source, target], late, fails)

    def wait(self, end: Future[BaseException | None]) -> None:
        if (error := end.result()) is not None:
            try:
                raise error
            finally:
                del error, end

    finish = wait

    def handed_out(self, tensor: torch.Tensor) -> None: ...


def _copy(pair: list[torch.Tensor], late: float, fails: bool) -> BaseException | None:
    time.sleep(late)
    if fails:
        pair[1].fill_(float("nan"))
    else:
        pair[1].copy_(pair[0])
    pair.clear()  # the pool of threads holds its arguments a little longer than this lasts
    return CopyLost("a copy was lost") if fails else None


class CountedTier(DeviceTier):
    """A device that counts by itself what is alive of its tensors, and refuses to have more than its capacity."""

    def __init__(self, capacity: int) -> None:
        super().__init__("device", capacity, CPU)
        self.alive = 0

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        return self._count(super().put(source, copy))

    def adopt(self, tensor: torch.Tensor) -> Any | None:
        found = super().adopt(tensor)
        return None if found is None else self._count(found)

    def _count(self, handle: torch.Tensor) -> torch.Tensor:
        price = self.price(handle.nbytes)
        self.alive += price
        assert self.alive <= self.capacity, f"{self.alive} bytes of {self.capacity} are alive"
        weakref.finalize(handle, self._gone, price)
        return handle

    def _gone(self, price: int) -> None:
        self.alive -= price


def make_store(folder: Path, lane: Any, *, pool: bool = False, ahead: int = 1) -> Store:
    """A store of 8 KiB, 8 KiB and 256 KiB."""
    device: Tier = PoolTier("device", 8 * KIB, CPU) if pool else CountedTier(8 * KIB)
    tiers = [device, PinnedTier(8 * KIB, pinned=False), FileTier(256 * KIB, folder)]
    return Store(tiers, CPU, lane=lane, ahead=ahead)


def check_budgets(store: Store) -> None:
    """What the books say and what is really there, against the budgets."""
    for usage in store.usage().values():
        assert 0 <= usage.used <= usage.peak <= usage.capacity, usage
    for tier in store._mover.tiers:
        if isinstance(tier, PinnedTier):
            assert tier.reserved <= tier.capacity
        if isinstance(tier, FileTier):
            with store._changed:  # no file comes or goes meanwhile
                taken = sum(one.stat().st_blocks * 512 for one in tier.folder.path.iterdir())
            assert taken <= tier.capacity, f"{taken} bytes of files"


@dataclass(frozen=True)
class Operation:
    """What is done to a key: a name of `OPERATIONS`, with how many values of which number."""

    name: str
    key: int
    size: int
    value: float


@dataclass
class Work:
    """Random operations on a store, beside a dictionary.

    Attributes:
        store: under test.
        truth: what each key should have.
        locks: one a key: threads that write to one tensor at once are no store's matter.
        done: operations that went through.
        lost: that failed by a lost copy, and had no effect.
        full: that found no room, and had no effect.
    """

    store: Store
    truth: dict[int, torch.Tensor] = field(default_factory=dict)
    locks: list[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in range(KEYS)])
    done: int = 0
    lost: int = 0
    full: int = 0

    def operate(self, one: Operation) -> None:
        """One operation, and its check."""
        with self.locks[one.key]:
            try:
                getattr(self, f"_{one.name}")(one)
                self.done += 1
            except CopyLost as error:
                self.lost += 1
                traceback.clear_frames(error.__traceback__)
            except StoreFull as error:
                self.full += 1
                traceback.clear_frames(error.__traceback__)
        check_budgets(self.store)

    def _put(self, one: Operation) -> None:
        tensor = torch.full((one.size,), one.value)
        expected = tensor.clone()
        self.store[one.key] = tensor
        self.truth[one.key] = expected

    def _get(self, one: Operation) -> None:
        if one.key not in self.truth:
            assert one.key not in self.store
            return
        assert torch.equal(self.store[one.key], self.truth[one.key])

    def _add(self, one: Operation) -> None:
        if one.key in self.truth:
            self.store[one.key] += one.value
            self.truth[one.key] += one.value

    def _read(self, one: Operation) -> None:
        if one.key in self.truth:
            with self.store.reading(one.key) as (found,):
                assert torch.equal(found, self.truth[one.key])
                time.sleep(0)
                assert torch.equal(found, self.truth[one.key])

    def _fill(self, one: Operation) -> None:
        if one.key in self.truth:
            with self.store.writing(one.key) as (found,):
                found.data.fill_(one.value)  # which no version counts
            self.truth[one.key].fill_(one.value)

    def _delete(self, one: Operation) -> None:
        if one.key in self.truth:
            del self.store[one.key]
            del self.truth[one.key]

    def _prefetch(self, one: Operation) -> None:
        if one.key in self.truth:
            self.store.prefetch(one.key)

    def _done(self, one: Operation) -> None:
        if one.key in self.truth:
            self.store.done(one.key)

    def _evict(self, one: Operation) -> None:
        if one.key in self.truth:
            self.store.evict(one.key)

    def _host(self, one: Operation) -> None:
        if one.key in self.truth:
            assert torch.equal(self.store.on_host(one.key), self.truth[one.key])


OPERATIONS = (
    "put",
    "put",
    "get",
    "get",
    "add",
    "read",
    "read",
    "fill",
    "delete",
    "prefetch",
    "done",
    "evict",
    "host",
)


def drawn(chance: random.Random) -> Operation:
    """A random operation."""
    return Operation(
        chance.choice(OPERATIONS), chance.randrange(KEYS), chance.choice(SIZES), float(chance.randrange(1000))
    )


def random_work(
    folder: Path, seed: int, count: int, *, threads: int = 4, failing: float = 0.02, pool: bool = False
) -> Work:
    """So many operations from so many threads; everything is compared once more at the end."""
    lane = LateLane(seed, latest=0.0005, failing=failing)
    store = make_store(folder, lane, pool=pool)
    work, errors = Work(store), []

    def run(number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        try:
            for _ in range(count // threads):
                work.operate(drawn(chance))
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    lane.failing = 0.0
    assert set(store) == set(work.truth)
    for key, expected in work.truth.items():
        assert torch.equal(store[key], expected), key
    check_budgets(store)
    store.close()
    assert not list(folder.iterdir())
    return work


# -- kills -----------------------------------------------------------------------------------------------------------


def _busy(folder: Path, ready: int) -> None:
    """Work on a store until killed."""
    store = make_store(folder, None)
    told = False
    while True:
        for number in range(100):
            store[number % 30] = torch.full((400,), float(number))
            if number == 60 and not told:
                os.write(ready, b".")
                told = True


def kill_both(folder: Path, chance: random.Random) -> int:
    """Let a process and its child work on stores, kill both, start anew; gives the files that the dead left.

    Raises:
        AssertionError: something is left behind, or the next store does not work.
    """
    reading, writing = os.pipe()
    parent = os.fork()
    if not parent:
        child = os.fork()
        if child:
            os.write(writing, f"{child:08d}".encode())
        try:
            _busy(folder, writing)
        finally:
            os._exit(1)
    text = b""
    while text.count(b".") < 2 or len(text) < 10:
        text += os.read(reading, 64)
    child = int(bytes(one for one in text if one != ord(".")))
    time.sleep(chance.random() * 0.02)
    for process in chance.sample([parent, child], 2):
        os.kill(process, signal.SIGKILL)
        time.sleep(chance.random() * 0.005)
    os.waitpid(parent, 0)
    os.close(reading)
    os.close(writing)
    until = time.monotonic() + 10
    while _alive(child) and time.monotonic() < until:  # it is the child of init now
        time.sleep(0.001)
    left = sum(1 for _ in folder.rglob("*") if _.is_file())
    with make_store(folder, None) as store:
        mine = [one.name for one in folder.iterdir()]
        assert len(mine) == 1, mine
        for number in range(30):
            store[number] = torch.full((400,), float(number))
        for number in range(30):
            assert torch.equal(store[number], torch.full((400,), float(number)))
    assert not list(folder.iterdir())
    return left


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
