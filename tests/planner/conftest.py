"""The planner on the CPU and on the virtual GPU, in the same process."""

from tests.techniques.conftest import one_thread
from tests.virtual.conftest import fit_interpreter

__all__ = ["fit_interpreter", "one_thread"]
