"""Fake tensors: torch's mode and class for them, how it describes an op by shape, and which tensors it lifts."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException

from vramfit.torch_internals.names import Feature

_FEATURE = Feature("carrying tensors without values")

decomposition_table: Any = _FEATURE.find("torch._decomp.decomposition_table")
device_constructors: Any = _FEATURE.find("torch.utils._device._device_constructors")
has_meta: Any = _FEATURE.find("torch._subclasses.fake_impls.has_meta")
in_kernel_invocation_manager: Any = _FEATURE.find(
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager"
)
is_non_overlapping_and_dense: Any = _FEATURE.find("torch._prims_common.is_non_overlapping_and_dense_or_false")
meta_table: Any = _FEATURE.find("torch._decomp.meta_table")
only_lifts_cpu_tensors: Any = _FEATURE.find("torch._C._only_lift_cpu_tensors")
op_implementations_checks: Any = _FEATURE.find("torch._subclasses.fake_impls.op_implementations_checks")
set_only_lift_cpu_tensors: Any = _FEATURE.find("torch._C._set_only_lift_cpu_tensors")
set_throw_on_mutable_data_ptr: Any = _FEATURE.find("torch._C._set_throw_on_mutable_data_ptr")
stride_incorrect_op: Any = _FEATURE.find("torch._subclasses.fake_impls.stride_incorrect_op")
suggest_memory_format: Any = _FEATURE.find("torch._prims_common.suggest_memory_format")
torch_decomp_decompositions: Any = _FEATURE.find("torch._subclasses.fake_tensor.torch_decomp_decompositions")

ops_with_symbols: Any = FakeTensorMode._cpp_meta_supports_symint
"""Ops whose kernel for the meta device takes symbolic sizes."""
