"""What stands between a program and its files is put there before torch is imported."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def warm_children() -> None:
    """Start interpreters cold."""
