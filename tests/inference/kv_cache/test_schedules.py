"""A cache's bookkeeping under random schedules; all 10,000 are in `benchmarks/language/schedules.py`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from tests.inference.kv_cache.schedules import Schedules

Schedules.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestSchedules = Schedules.TestCase
