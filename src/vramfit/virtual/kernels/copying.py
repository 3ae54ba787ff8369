"""Copies between host and card that need a dense or converted stand-in on the card.

aten/src/ATen/native/cuda/Copy.cu, ``copy_kernel_cuda`` and ``copy_requires_temporaries``: a copy across
devices moves dense memory of one type. Whatever is not, is made so first; on the card's side when the copy
comes from it without blocking, else on the host.
"""

from __future__ import annotations

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, table, workspace
from vramfit.virtual.op_call import Extras, OpCall


def _is_dense_like(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.shape == target.shape and (
        (source.is_contiguous() and target.is_contiguous()) or source.stride() == target.stride()
    )


def copy_temporaries(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> tuple[int, ...]:
    """Bytes allocated on the card by a copy between host and card, in order.

    Args:
        target: where to; shapes may differ by broadcasting.
    """
    count = target.numel()
    same_type = source.dtype == target.dtype
    if (
        source.device.type == target.device.type
        or not count
        or (same_type and _is_dense_like(source, target))
    ):
        return ()
    if target.device.type == "cuda":  # converted on the host; a strided target is filled from a dense one
        return () if target.is_contiguous() else (count * target.element_size(),)
    sizes = []
    element = source.element_size()
    if non_blocking and not same_type:
        element = target.element_size()
        sizes.append(source.numel() * element)
    if not (source.is_contiguous() and source.numel() == count):
        sizes.append(count * element)
    return tuple(sizes)


def _copy(call: OpCall) -> Extras | None:
    """``copy_(self, src, non_blocking)``."""
    source = call.argument(1, "src")
    return workspace(*copy_temporaries(source, call.args[0], bool(call.argument(2, "non_blocking", False))))


def _to_copy(call: OpCall) -> Extras | None:
    """``_to_copy``: a copy into an output of the wanted type and device."""
    if not isinstance(call.out, torch.Tensor):
        return None
    return workspace(*copy_temporaries(call.args[0], call.out, bool(call.kwargs.get("non_blocking", False))))


RULES: dict[OpOverload, Rule] = table({"copy_": _copy, "_to_copy": _to_copy})
