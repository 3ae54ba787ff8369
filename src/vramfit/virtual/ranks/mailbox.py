"""Python objects that ranks which run side by side hand one another, through files of a folder.

Each rank is a process of its own. What one sends is written beside and renamed, so that a reader finds it whole; who
receives it waits, and where nothing comes says for which rank it waits. Objects are pickled: the folder must belong to
one run alone.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vramfit.errors import PeerEnded, UsageError
from vramfit.virtual.ranks import rank_waits
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.writing import write_file

_PAUSE = 0.01  # seconds between two looks
_ALL = -1
"""In the place of a receiver: every rank that asks."""
_CIRCLE = 5.0  # seconds for which ranks must wait for one another: a letter may have come just now


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Something that another rank is to leave.

    Attributes:
        rank: the rank.
        path: the file in which it comes.
    """

    rank: int
    path: Path


class Mailbox:
    """The mailbox of one rank.

    Attributes:
        takes_numbers: small numbers of tensors that are sent are to be left here.

    Args:
        place: the rank, with the folder; without one nothing can be received.
    """

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._folder = None if place.mailbox is None else Path(place.mailbox)
        self._sent: Counter[tuple[str, int]] = Counter()
        self._received: Counter[tuple[str, int, int]] = Counter()
        self.takes_numbers = True

    @property
    def open(self) -> bool:
        """Whether other ranks run beside this one."""
        return self._folder is not None

    def send(self, group: str, rank: int, objects: list[Any]) -> None:
        """Leave objects for a rank of the world; without a folder nobody reads them, and nothing happens.

        Args:
            group: the name of the process group.
        """
        if self._folder is None:
            return
        self._leave(group, rank, objects)

    def publish(self, group: str, objects: list[Any]) -> None:
        """Leave objects for every rank that asks for what this one broadcasts; nothing happens without a folder."""
        if self._folder is not None:
            self._leave(group, _ALL, objects)

    @contextmanager
    def apart_from_numbers(self) -> Iterator[None]:
        """Tensors that are sent meanwhile carry an object that is left here as a whole: their numbers are nobody's."""
        before, self.takes_numbers = self.takes_numbers, False
        try:
            yield
        finally:
            self.takes_numbers = before

    def receive(self, group: str, rank: int) -> list[Any]:
        """The objects that a rank of the world leaves next; waits for them.

        Raises:
            UsageError: the rank does not run, or leaves none.
        """
        return self.take(self.expect(group, rank))

    def published(self, group: str, rank: int) -> list[Any]:
        """The objects that a rank of the world publishes next; waits for them.

        Raises:
            UsageError: the rank does not run, or publishes none.
        """
        return self.take(self._next(group, rank, _ALL))

    def expect(self, group: str, rank: int) -> Expected:
        """Note that this rank will take what another leaves for it next.

        Raises:
            UsageError: the rank does not run.
        """
        return self._next(group, rank, self._place.rank)

    def _next(self, group: str, rank: int, receiver: int) -> Expected:
        """What a rank leaves next, for this one or for all."""
        place = self._place
        if self._folder is None:
            raise UsageError(
                f"rank {place.rank} of {place.world_size} waits for an object from rank {rank}, which does not run",
                "Run the ranks that exchange objects, such as the stages of a pipeline, side by side with one mailbox: "
                "VirtualGPU(..., mailbox=FOLDER)",
            )
        number = self._received[group, rank, receiver]
        self._received[group, rank, receiver] += 1
        return Expected(rank=rank, path=self._path(group, rank, receiver, number))

    def _leave(self, group: str, receiver: int, objects: list[Any]) -> None:
        number = self._sent[group, receiver]
        self._sent[group, receiver] += 1
        content = pickle.dumps(objects)
        path = self._path(group, self._place.rank, receiver, number)
        write_file(path, lambda stream: stream.write(content))

    def take(self, expected: Expected) -> list[Any]:
        """The objects that were expected; waits for them as long as their sender may still send them.

        Raises:
            UsageError: they do not come.
        """
        assert self._folder is not None
        if not expected.path.exists():
            if rank_waits.are_told(self._folder):
                with rank_waits.waiting_for(self._folder, self._place.rank, expected.rank):
                    self._wait_for_the_living(expected)
            else:
                self._wait_patiently(expected)
        objects: list[Any] = pickle.loads(expected.path.read_bytes())
        return objects

    def _wait_patiently(self, expected: Expected) -> None:
        """Wait where nobody tells which ranks have ended."""
        place = self._place
        until = time.monotonic() + place.patience
        while not expected.path.exists():
            if time.monotonic() > until:
                raise UsageError(
                    f"{self._waiting_for(expected)}, for {place.patience:g} s now, which sent nothing",
                    f"See whether rank {expected.rank} runs, with the mailbox {self._folder}, and how far it got",
                )
            time.sleep(_PAUSE)

    def _wait_for_the_living(self, expected: Expected) -> None:
        """Wait until the sender has ended, or waits for this rank."""
        assert self._folder is not None
        since: float | None = None
        while not expected.path.exists():
            if rank_waits.has_ended(self._folder, expected.rank) and not expected.path.exists():
                raise PeerEnded(
                    f"{self._waiting_for(expected)}, which has ended without sending what it waits for",
                    f"See why rank {expected.rank} sent nothing: it may have failed, or taken another branch",
                )
            circle = rank_waits.in_circle(self._folder, self._place.rank)
            since = None if not circle else since or time.monotonic()
            if since is not None and time.monotonic() - since > _CIRCLE:
                told = ", ".join(f"rank {one}" for one in circle)
                raise UsageError(
                    f"{self._waiting_for(expected)}, and ranks wait in a circle: {told}: on cards the program would "
                    "hang here",
                    "Let one of them send before it receives",
                )
            time.sleep(_PAUSE)

    def _waiting_for(self, expected: Expected) -> str:
        return f"rank {self._place.rank} of {self._place.world_size} waits for rank {expected.rank}"

    def _path(self, group: str, sender: int, receiver: int, number: int) -> Path:
        assert self._folder is not None
        name = "".join(c if c.isalnum() else "-" for c in group)
        to = "all" if receiver == _ALL else receiver
        return self._folder / f"{name}.{sender}.{to}.{number}"
