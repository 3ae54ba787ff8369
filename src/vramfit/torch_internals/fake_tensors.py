"""Fake tensors and their mode (torch/_subclasses/fake_tensor.py), whichever release they are of."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Until 2.11 an attribute; since 2.12 a property (`FakeTensor.fake_device`) that reads the attribute `_fake_device`.
_DEVICE = "_fake_device" if isinstance(getattr(FakeTensor, "fake_device", None), property) else "fake_device"

device_of: Callable[[FakeTensor], torch.device] = attrgetter(_DEVICE)
"""The device that a fake tensor is said to be on, without a call of Python's: asked some ten times per operation."""


def takes_symbols(func: torch._ops.OpOverload) -> bool:
    """Whether torch runs the meta kernel written in C++ of an op on symbolic sizes too.

    A method that reads the class alone (``FakeTensorMode.cpp_meta_supports_symint``): since 2.15 its list stands in
    torch/_meta_registrations.py.
    """
    return FakeTensorMode.cpp_meta_supports_symint(cast(Any, FakeTensorMode), func)
