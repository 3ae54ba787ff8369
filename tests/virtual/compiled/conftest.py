"""The compiler, loaded once: parts of torch that it imports are deprecated by others of its parts."""

from __future__ import annotations

import importlib
import warnings

import pytest


@pytest.fixture(scope="package", autouse=True)
def compiler() -> None:
    """Load it before a test does, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.cudagraph_trees"):
            importlib.import_module(name)
