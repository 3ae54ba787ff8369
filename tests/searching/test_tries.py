"""Each candidate is run once, in view, and an error is an answer only where the caller says so."""

from __future__ import annotations

import pytest

from vramfit.searching.largest import LargestSearch, doubled_from
from vramfit.searching.tries import Tries


def test_a_candidate_is_run_once_and_reported_before() -> None:
    told: list[str] = []

    def run(candidate: int) -> int:
        told.append(f"run {candidate}")
        return candidate * candidate

    tries = Tries(run, progress=lambda candidate: told.append(f"try {candidate}"))
    assert [tries(candidate) for candidate in (3, 2, 3, 2)] == [9, 4, 9, 4]
    assert told == ["try 3", "run 3", "try 2", "run 2"]
    assert (list(tries.answers.items()), len(tries)) == ([(3, 9), (2, 4)], 2)


def test_what_checks_stops_before_anything_is_reported() -> None:
    told: list[int] = []

    def check() -> None:
        if len(told) == 2:
            raise TimeoutError

    tries = Tries(lambda value: value <= 5, progress=told.append, check=check)
    search = LargestSearch(tries, bool, doubled_from(4, 100))
    with pytest.raises(TimeoutError):
        search.run()
    assert told == [4, 8]
    assert (search.result.value, search.result.failing) == (4, 8)
    assert tries(4)  # what is known needs no further run


def test_a_workload_that_fails_above_a_size_does_not_fit_there() -> None:
    def run(size: int) -> str:
        if size > 128:
            raise IndexError(f"position {size} is out of range")
        if size == 13:
            raise ValueError("an unlucky size")
        return "fits"

    def failed(_size: int, error: Exception) -> str | None:
        return str(error) if isinstance(error, IndexError) else None

    tries = Tries(run, failed=failed)
    largest = LargestSearch(tries, lambda answer: answer == "fits", doubled_from(4, 1 << 20)).run()
    assert (largest.value, largest.failing) == (128, 129)
    assert tries(129) == "position 129 is out of range"
    with pytest.raises(ValueError, match="unlucky"):
        tries(13)
    assert 13 not in tries.answers
    with pytest.raises(IndexError):
        Tries(run)(129)
