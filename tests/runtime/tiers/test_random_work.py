"""Random operations of four threads on a store, beside dictionaries, with late and lost copies; and kills.

`benchmarks/survive/tiers.py` does 10,000 operations for each of several seeds, and a hundred kills.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.runtime.tiers.trouble import (
    KEYS,
    OPERATIONS,
    SIZES,
    LateLane,
    Operation,
    Work,
    check_budgets,
    make_store,
    random_work,
)

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "survive" / "tiers.py"

operations = st.builds(
    Operation,
    name=st.sampled_from(OPERATIONS),
    key=st.integers(0, KEYS - 1),
    size=st.sampled_from(SIZES),
    value=st.integers(-1000, 1000).map(float),
)


class Together(RuleBasedStateMachine):
    """Up to four operations at once, each in a thread of its own, however often."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.workers = ThreadPoolExecutor(4)

    @initialize(pool=st.booleans(), seed=st.integers(0, 1000), ahead=st.integers(0, 3))
    def begin(self, pool: bool, seed: int, ahead: int) -> None:
        self.lane = LateLane(seed, latest=0.0005, failing=0.02)
        self.work = Work(make_store(Path(self.folder.name), self.lane, pool=pool, ahead=ahead))

    @rule(some=st.lists(operations, min_size=1, max_size=16))
    def operate(self, some: list[Operation]) -> None:
        for _ in self.workers.map(self.work.operate, some):
            pass

    @rule()
    def lose_all_copies(self) -> None:
        """Every wake fails, and changes nothing."""
        self.lane.failing = 1.0
        for key in list(self.work.truth):
            self.work.operate(Operation("get", key, 0, 0.0))
        self.lane.failing = 0.02

    @invariant()
    def budgets_hold(self) -> None:
        if hasattr(self, "work"):
            check_budgets(self.work.store)

    def teardown(self) -> None:
        self.lane.failing = 0.0
        for key, expected in self.work.truth.items():
            assert torch.equal(self.work.store[key], expected)
        assert set(self.work.store) == set(self.work.truth)
        self.work.store.close()
        self.workers.shutdown()
        assert not list(Path(self.folder.name).iterdir())
        self.folder.cleanup()


def test_any_operations_together_do_what_a_dictionary_does() -> None:
    run_state_machine_as_test(
        Together, settings=settings(max_examples=15, stateful_step_count=20, deadline=None, derandomize=True)
    )


@pytest.mark.parametrize("pool", [False, True])
def test_four_threads_find_what_they_left(tmp_path: Path, pool: bool) -> None:
    work = random_work(tmp_path, 0, 1000, pool=pool)
    assert work.done > 950
    assert work.lost > 3
    assert work.full < 5
    assert work.store.traffic.woken > 50


def test_nothing_is_left_of_processes_that_were_killed(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "3", "--seeds", "0", "--folder", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "3 kills" in found.stdout
    assert not list(tmp_path.iterdir())
