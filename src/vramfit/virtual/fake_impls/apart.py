"""Ops that torch makes of other ops below autograd: each part is placed by itself, in torch's own order.

An op with a ``CompositeExplicitAutograd`` kernel has a gradient formula of its own, so it arrives whole; but on a card
that kernel calls others, and what it holds between them counts. Its C++ runs here with the mode switched on again:
the parts arrive one by one, and die as its variables do. Only ops that hold something worth counting are listed.
"""

from __future__ import annotations

from typing import Any

from vramfit.torch_internals import dispatch
from vramfit.torch_internals.dispatch import DispatchKey
from vramfit.virtual.fake_impls.registry import RULES, find_overload
from vramfit.virtual.kernels.linear import LINEAR, linear_below_autograd
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner

_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_OPS = (
    "_euclidean_dist.default",  # native/Distance.cpp
    "_safe_softmax.default",  # native/transformers/attention.cpp
    "_trilinear.default",  # native/Linear.cpp
    "_unsafe_masked_index.default",  # native/TensorAdvancedIndexing.cpp
    "_unsafe_masked_index_put_accumulate.default",
    "affine_grid_generator.default",  # native/AffineGridGenerator.cpp
    "binary_cross_entropy_with_logits.default",  # native/Loss.cpp
    "block_diag.default",  # native/TensorShape.cpp
    "dist.default",  # native/Distance.cpp
    "isinf.default",  # native/TensorCompare.cpp
    "ldexp.Tensor",  # native/BinaryOps.cpp
    "linalg_pinv.atol_rtol_tensor",  # native/LinearAlgebra.cpp
    "logcumsumexp.default",  # native/ReduceOps.cpp
    "logcumsumexp.out",
    "logsumexp.default",  # native/ReduceOps.cpp
    "logsumexp.out",
    "mvlgamma.default",  # native/UnaryOps.cpp
    "rot90.default",  # native/TensorTransformations.cpp
    "soft_margin_loss.default",  # native/Loss.cpp
    "soft_margin_loss.out",
    "soft_margin_loss_backward.default",
    "soft_margin_loss_backward.grad_input",
)


def _taken_apart(key: Any) -> Handler:
    def handler(mode: OpRunner, call: OpCall) -> Any:
        """Run an op's own C++ on the parts that it calls."""
        with mode:
            return call.func._op_dk(key, *call.args, **call.kwargs)

    return handler


def _linear(mode: OpRunner, call: OpCall) -> Any:
    """A linear layer that arrives whole, mostly in inference mode."""
    with mode:
        return linear_below_autograd(*call.args, **call.kwargs)


def _register() -> None:
    RULES.setdefault(LINEAR, _linear)
    has_kernel = dispatch.has_kernel
    for name in _OPS:
        func = find_overload(f"aten.{name}")
        # A kernel that is not there must not be asked for: the dispatcher would jump into nothing.
        keys = [] if func is None else [key for key in _KEYS if has_kernel(func.name(), key)]
        if keys:
            RULES.setdefault(func, _taken_apart(getattr(DispatchKey, keys[0])))


_register()
