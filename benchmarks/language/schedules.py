"""Random schedules of add, fork, extend, finish and failed allocations of a cache: nothing is lost, nothing leaks.

    python benchmarks/language/schedules.py [--schedules 10000]

The state machine is that of the tests (`tests/inference/kv_cache/schedules.py`), which run a part of these.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from rich.console import Console
from rich.table import Table
from tests.inference.kv_cache.schedules import Schedules

COUNTS: Counter[str] = Counter()


class Counted(Schedules):
    """The same, counted."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "rows"):
            COUNTS["schedules"] += 1
            COUNTS["tokens stored"] += self.stored
            COUNTS["allocations that failed"] += self.failed
            COUNTS["schedules with one that failed"] += self.failed > 0


def main(arguments: list[str] | None = None) -> int:
    """Run them, and print how much was done; a schedule that fails ends with its steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=20, help="most of a schedule")
    options = parser.parse_args(arguments)
    run_state_machine_as_test(
        Counted,
        settings=settings(
            max_examples=options.schedules,
            stateful_step_count=options.steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    table = Table(title="Random schedules of the block tables, all of them kept")
    table.add_column("")
    table.add_column("count", justify="right")
    for name, count in COUNTS.items():
        table.add_row(name, f"{count:,}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
