"""Passes on the CPU run before those on a virtual card in the same process."""

from tests.virtual.conftest import fit_interpreter  # noqa: F401  # autograd is prepared before any backward pass
