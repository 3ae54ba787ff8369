"""Batches on the CPU and on virtual cards, in the same process."""

from __future__ import annotations

from tests.virtual.conftest import fit_interpreter

__all__ = ["fit_interpreter"]  # backward passes on the CPU before tests of the virtual GPU
