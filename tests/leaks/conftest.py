"""Leak checks on the virtual GPU and on the metered CPU in one process: autograd has to be prepared before either."""

from tests.virtual.conftest import fit_interpreter

__all__ = ["fit_interpreter"]
