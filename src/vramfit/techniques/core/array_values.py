"""Values of arrays that are no tensors: NumPy's, Python's, byte arrays and views of memory."""

from __future__ import annotations

import array
import sys
from typing import Any


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


def array_has(value: Any, values: Any) -> bool:
    """Whether an array still has the values that `copy_of_array` gave, bit for bit."""
    return bits_of_array(value) == bits_of_array(values)
