"""The store where processes meet, for one rank of several: what nobody else can write is never waited for.

torch reads and writes keys there while it makes groups. With one rank running, a key that another would write never
comes: a real store would block until its timeout, minutes later. This one says at once which key is missing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from vramfit.errors import UsageError
from vramfit.torch_internals.distributed import Store
from vramfit.virtual.ranks.rank_place import RankPlace


class RankStore(Store):  # type: ignore[misc]  # torch's, looked up by its path
    """A store in this process alone.

    Raises:
        UsageError: from `get` and `wait`, where a key is asked for that this rank has not written.
    """

    def __init__(self, place: RankPlace) -> None:
        super().__init__()
        self._place = place
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(minutes=5)

    @property
    def timeout(self) -> timedelta:
        """How long a real store would wait."""
        return self._timeout

    def clone(self) -> RankStore:
        """The same store: others share what it holds."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Note how long a real store would wait."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Read a value."""
        if key not in self._values:
            place = self._place
            raise UsageError(
                f"rank {place.rank} of {place.world_size} waits for the key {key!r} in the store, which another rank "
                "writes: this rank runs alone",
                "Leave out what the ranks agree on through the store, or let this rank write the key itself",
            )
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Count up, and give the sum."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Make sure that keys are there."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether keys are there."""
        return all(key in self._values for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Write a value in place of an expected one, or where none is expected."""
        known = self._values.get(key)
        wanted = expected.encode() if isinstance(expected, str) else bytes(expected)
        if known == wanted or (known is None and not wanted):
            self.set(key, desired)
        return self._values.get(key, wanted)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """How many keys there are."""
        return len(self._values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Read several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def append(self, key: str, value: Any) -> None:
        """Write at the end of a value."""
        more = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = self._values.get(key, b"") + more

    def has_extended_api(self) -> bool:
        """Whether it can read and write several keys at once."""
        return True
