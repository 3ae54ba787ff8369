"""Asks torch's kernels for the meta device, where FakeTensorMode would in the end ask nothing else.

``FakeTensorMode._dispatch_impl`` (torch/_subclasses/fake_tensor.py) looks at an op's arguments in a dozen ways, most of
which a program without symbolic sizes, constants and tensors of other kinds never needs. For most ops of aten on plain
tensors of one card it then runs the op's kernel for the meta device, and puts the results on that card. That takes a
tenth of the time when it is done at once. Which ops go that way follows from the op alone (`is_plain`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table, meta_table
from torch._library.simple_registry import singleton
from torch._subclasses.fake_impls import has_meta, op_implementations_checks, stride_incorrect_op
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    torch_decomp_decompositions,
)

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_VIEWS = {
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overloads in {
        "slice": "Tensor",
        "select": "int",
        "expand": "default",
        "transpose": "int",
        "permute": "default",
        "unsqueeze": "default",
        "squeeze": "default dim dims",
        "t": "default",
        "alias": "default",
        "detach": "default",
    }.items()
    for overload in overloads.split()
}
"""Views of which torch has descriptions in Python too, for symbolic sizes, and kernels that serve every device.

``view`` is not among them: the two give dimensions of size one different strides.
"""
_UNFIT = {
    torch.Tag.inplace_view,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}


def is_plain(func: torch._ops.OpOverload) -> bool:
    """Whether FakeTensorMode describes an op by its kernel for the meta device, whatever its (plain) arguments are."""
    if func in _VIEWS:
        return True
    if func.namespace != "aten" or not _UNFIT.isdisjoint(func.tags) or stride_incorrect_op(func):
        return False
    if any(argument.alias_info and argument.alias_info.is_write for argument in func._schema.arguments):
        return False
    if func not in meta_table and not _takes_symbols(func):
        if func in decomposition_table and torch_decomp_decompositions(func):
            return False
        name = func.name()
        if _COMPOSITE in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE):
            return False
    if singleton.find(func.name()).fake_impl.kernel is not None or not has_meta(func):
        return False
    return not any(check(func) for check, _ in op_implementations_checks)


def _takes_symbols(func: torch._ops.OpOverload) -> bool:
    """FakeTensorMode.cpp_meta_supports_symint."""
    return torch.Tag.view_copy in func.tags or func in FakeTensorMode._cpp_meta_supports_symint


def fakes_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[FakeTensor]:
    """The fake tensors among arguments; none if there is a list or another tensor."""
    fakes: list[FakeTensor] = []
    for value in (*args, *kwargs.values()):
        if type(value) is FakeTensor:
            fakes.append(value)
        elif isinstance(value, (torch.Tensor, list, tuple)):
            return []
    return fakes


def described(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[FakeTensor],
    mode: FakeTensorMode,
) -> tuple[torch.device, Any] | None:
    """What a plain op returns: the card of its results, and results on the meta device; None if another has to say it.

    Args:
        func: the op, for which `is_plain` holds.
        args, kwargs: its arguments (strided fake tensors).
        tensors: those among them.
        mode: of the fake tensors.
    """
    if not tensors or "device" in kwargs:
        return None
    device = tensors[0].fake_device
    if device.type != "cuda" or any(t.fake_device != device or t.constant is not None for t in tensors):
        return None
    try:
        with in_kernel_invocation_manager(mode):
            return device, func(*args, **kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
        return None  # it is asked again in full, for the error in its usual words
