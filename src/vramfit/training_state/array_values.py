"""Values of arrays that are no tensors: NumPy's, Python's, byte arrays and views of memory."""

from __future__ import annotations

import array
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class ArrayState:
    """The values of an array at one moment."""

    value: Any

    @classmethod
    def of(cls, values: Any) -> ArrayState:
        """The values now."""
        return cls(copy_of_array(values))

    def restore(self, values: Any) -> None:
        """Write them again."""
        write_array(values, self.value)

    def is_in(self, values: Any) -> bool:
        """Whether an array still has them, bit for bit."""
        return bits_of_array(values) == bits_of_array(self.value)

    def same(self, other: ArrayState) -> bool:
        """Whether another moment had them too."""
        return bits_of_array(self.value) == bits_of_array(other.value)


def is_array(value: Any) -> bool:
    """Whether a value is an array that can be written: neither a read-only file in memory nor a broadcast one."""
    if isinstance(value, array.array | bytearray):
        return True
    if isinstance(value, memoryview):
        return not value.readonly and value.c_contiguous and value.nbytes > 0
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and bool(value.flags.writeable)


def bits_of_array(value: Any) -> bytes:
    """An array's values as bytes; of objects, their addresses."""
    return bytes(value) if isinstance(value, bytes | bytearray) else bytes(value.tobytes())


def bytes_of_array(value: Any) -> int:
    """What an array's values take."""
    if isinstance(value, bytearray):
        return len(value)
    return len(value) * value.itemsize if isinstance(value, array.array) else int(value.nbytes)


def copy_of_array(value: Any) -> Any:
    """An array's values, for `write_array`."""
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return value[:] if isinstance(value, array.array) else value.copy()


def write_array(value: Any, values: Any) -> None:
    """Give an array the values that `copy_of_array` gave."""
    if isinstance(value, memoryview):
        value.cast("B")[:] = values
    elif isinstance(value, array.array | bytearray):
        value[:] = values
    else:
        value[...] = values
