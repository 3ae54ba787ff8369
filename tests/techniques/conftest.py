"""Techniques on the CPU and on the virtual GPU, in the same process."""

from __future__ import annotations

from tests.virtual.conftest import fit_interpreter, gpu

__all__ = ["fit_interpreter", "gpu"]  # backward passes on the CPU before tests of the virtual GPU
