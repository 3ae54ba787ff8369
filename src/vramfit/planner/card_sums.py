"""Sums that a card keeps in float32 and a CPU in half precision: what a comparison on the CPU has to do as the card.

NOTE [Norms in half precision on the CPU]
torch adds up the gradients of a layer norm's weight and bias over all rows. On a card that is done in float32, whatever
the dtype (ATen/native/cuda/layer_norm_kernel.cu, ``T_ACC`` of ``GammaBetaBackward``). On the CPU partial sums are kept
in bfloat16 (ATen/native/cpu/layer_norm_kernel.cpp, ``LayerNormBackwardKernelImplInternal``): with 16,384 rows of 32 the
gradient of the bias is off by a quarter of its norm, and by 0.0003 where its rows are added in float32. Judged by that,
a plan in bfloat16 would break a promise that it keeps on the card.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_HALVES = (torch.bfloat16, torch.float16)
_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


class CardSums(TorchDispatchMode):
    """Computes the backward pass of layer norms in half precision as a card does. See NOTE above."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation."""
        del types
        if func is not _LAYER_NORM_BACKWARD or args[1].dtype not in _HALVES:
            return func(*args, **(kwargs or {}))
        # grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
        found = func(*tree_map_only(torch.Tensor, torch.Tensor.float, tuple(args)), **(kwargs or {}))
        of = (args[1], args[5], args[6])
        return tuple(
            None if value is None else value.to(args[1].dtype if like is None else like.dtype)
            for value, like in zip(found, of, strict=True)
        )
