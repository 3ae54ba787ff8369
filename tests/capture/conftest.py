"""Backward passes on the CPU before tests of the virtual GPU: autograd has to be prepared before either."""

from tests.virtual.conftest import fit_interpreter

__all__ = ["fit_interpreter"]
