"""Check sums over values whose writes nobody counts: arrays, and tensors that are written by ``.data``.

NOTE [Writes without a count]: autograd counts the writes to a tensor, but not those to its ``.data``, and arrays count
none. A sum over the bits, taken now and then, tells after a shortage whether a value that nobody copied was written
since: then the step is not called again. Sums are not taken before every step, which would take as long as a copy.
"""

from __future__ import annotations

import array
import sys
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vramfit.torch_internals.fake_tensors import FakeTensor

_KINDS = (torch.Tensor, nn.Parameter)


def is_array(value: Any) -> bool:
    """Whether a value is an array that can be written: NumPy's, Python's, or a view of memory."""
    if isinstance(value, array.array):
        return True
    if isinstance(value, memoryview):
        return not value.readonly
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def bytes_of_array(value: Any) -> int:
    """What an array's values take."""
    return len(value) * value.itemsize if isinstance(value, array.array) else int(value.nbytes)


def copy_of_array(value: Any) -> Any:
    """An array's values, for `write_array`."""
    if isinstance(value, memoryview):
        return value.tobytes()
    return value[:] if isinstance(value, array.array) else value.copy()


def write_array(value: Any, values: Any) -> None:
    """Give an array the values that `copy_of_array` gave."""
    if isinstance(value, memoryview):
        value.cast("B")[:] = values
    elif isinstance(value, array.array):
        value[:] = values
    else:
        value[...] = values


def array_has(value: Any, values: Any) -> bool:
    """Whether an array still has the values that `copy_of_array` gave, bit for bit."""
    return bool(value.tobytes() == (values if isinstance(values, bytes) else values.tobytes()))


class CheckSums:
    """Of values at one moment. See NOTE [Writes without a count].

    Args:
        values: tensors and arrays.
    """

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._sums = [(value, _writes(value), check_sum(value)) for value in values]

    def written(self, *, counted: bool = False) -> list[Any]:
        """Values with other bits now.

        Args:
            counted: tensors of which autograd has counted writes too; others notice those, and know when they were.
        """
        return [
            value
            for value, writes, before in self._sums
            if (_writes(value) == writes and check_sum(value) != before)
            or (counted and _writes(value) != writes)
        ]


def _writes(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def check_sum(value: Any) -> int:
    """Over the bits of a tensor or an array; 0 where there are none to read, as of a fake tensor."""
    if not isinstance(value, torch.Tensor):
        return zlib.adler32(value.tobytes())
    if isinstance(value, FakeTensor) or type(value) not in _KINDS or not value.numel():
        return 0
    if not value.is_contiguous() or value.is_complex():
        return 0
    with torch.no_grad():
        bits = value.detach().view(-1).view(torch.uint8)
        if value.device.type == "cpu":
            return zlib.adler32(bits.numpy().data)
        words = bits.view(torch.int32) if bits.numel() % 4 == 0 and bits.storage_offset() % 4 == 0 else bits
        return int(words.sum(dtype=torch.int64))
