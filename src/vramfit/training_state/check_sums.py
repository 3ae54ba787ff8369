"""Check sums over values whose writes nobody counts: arrays, and tensors that are written by ``.data``.

NOTE [Writes without a count]: autograd counts the writes to a tensor, but not those to its ``.data``, and arrays count
none. A sum over the bits, taken now and then, tells after a shortage whether a value that nobody copied was written
since: then the step is not called again. Sums are not taken before every step, which would take as long as a copy.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.training_state.array_values import bits_of_array

_KINDS = (torch.Tensor, nn.Parameter)


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
    """Sum the bits of a tensor or an array; 0 for a tensor without readable bits, e.g. a fake tensor."""
    if not isinstance(value, torch.Tensor):
        return zlib.adler32(bits_of_array(value))
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
