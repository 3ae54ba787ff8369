"""Fake tensors: torch's mode and class for them, how it describes an op by shape, and which tensors it lifts."""

from __future__ import annotations

import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException

from vramfit.torch_internals.names import Feature
from vramfit.torch_internals.releases import at_least

_FEATURE = Feature("carrying tensors without values")

decomposition_table: Any = _FEATURE.find("torch._decomp.decomposition_table")
device_constructors: Any = _FEATURE.find("torch.utils._device._device_constructors")
has_meta: Any = _FEATURE.find("torch._subclasses.fake_impls.has_meta")
in_kernel_invocation_manager: Any = _FEATURE.find(
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager"
)
# Until 2.10 without the second half of its name, which is another function since.
is_non_overlapping_and_dense: Any = _FEATURE.find(
    "torch._prims_common.is_non_overlapping_and_dense" + ("_or_false" if at_least(2, 11) else "")
)
meta_table: Any = _FEATURE.find("torch._decomp.meta_table")
only_lifts_cpu_tensors: Any = _FEATURE.find("torch._C._only_lift_cpu_tensors")
op_implementations_checks: Any = _FEATURE.find("torch._subclasses.fake_impls.op_implementations_checks")
set_only_lift_cpu_tensors: Any = _FEATURE.find("torch._C._set_only_lift_cpu_tensors")
set_throw_on_mutable_data_ptr: Any = _FEATURE.find("torch._C._set_throw_on_mutable_data_ptr")
stride_incorrect_op: Any = _FEATURE.find("torch._subclasses.fake_impls.stride_incorrect_op")
suggest_memory_format: Any = _FEATURE.find("torch._prims_common.suggest_memory_format")
torch_decomp_decompositions: Any = _FEATURE.find("torch._subclasses.fake_tensor.torch_decomp_decompositions")

# Until 2.11 an attribute; since 2.12 a property (`FakeTensor.fake_device`) that reads the attribute `_fake_device`.
_DEVICE = "_fake_device" if isinstance(getattr(FakeTensor, "fake_device", None), property) else "fake_device"

device_of: Callable[[FakeTensor], torch.device] = attrgetter(_DEVICE)
"""The device that a fake tensor is said to be on, without a call of Python's: asked some ten times per operation."""


def devices_apart(error: RuntimeError) -> str | None:
    """The error of torch's kernels about tensors of two devices, where it is that of a fake mode before 2.13."""
    found = re.search(
        r"FakeTensor Device Propagation .* found two different devices (\S+), (\S+)", str(error)
    )
    if found is None:
        return None
    one, other = found.groups()
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}!"
    )


def takes_symbols(func: OpOverload) -> bool:
    """Whether torch runs the meta kernel written in C++ of an op on symbolic sizes too.

    A method that reads the class alone (``FakeTensorMode.cpp_meta_supports_symint``): since 2.15 its list stands in
    torch/_meta_registrations.py.
    """
    return FakeTensorMode.cpp_meta_supports_symint(cast(Any, FakeTensorMode), func)
