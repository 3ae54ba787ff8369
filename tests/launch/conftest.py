"""How interpreters are started is what these tests are about."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def warm_children() -> None:
    """Start them cold."""
