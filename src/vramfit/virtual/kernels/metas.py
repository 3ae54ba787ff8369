"""Outputs that torch's own descriptions get wrong for CUDA, corrected.

``METAS[op](fake_mode, *args, **kwargs)`` gives the op's results as the CUDA kernel allocates them. Each
entry names what differs and where the kernel says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from vramfit.torch_internals.releases import at_least
from vramfit.virtual import describe
from vramfit.virtual.kernels import matmul, rnn
from vramfit.virtual.kernels.rules import overloads

Meta = Callable[..., Any]


def _fake(
    mode: FakeTensorMode, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), device)


def _results(mode: FakeTensorMode, func: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    found = (
        describe.described(func, args, kwargs, describe.fakes_in(args, kwargs), mode)
        if _is_plain(func)
        else None
    )
    if found is None:
        results: Any = mode.dispatch(func, (), args, kwargs)
        return list(results)
    device, results = found
    return [FakeTensor(mode, item, device) if isinstance(item, torch.Tensor) else item for item in results]


@cache
def _is_plain(func: OpOverload) -> bool:
    return describe.is_plain(func)


def _efficient_attention(func: OpOverload, seed_at: int) -> Meta:
    """Memory-efficient attention keeps its RNG seed and offset on the host.

    transformers/cuda/attention.cu, ``_efficient_attention_forward``: two CPU scalars outside graph capture.
    """

    def meta(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        results = _results(mode, func, args, kwargs)
        host = torch.device("cpu")
        results[seed_at] = _fake(mode, (), torch.int64, host)
        results[seed_at + 1] = _fake(mode, (), torch.int64, host)
        return tuple(results)

    return meta


def _cudnn_attention(func: OpOverload) -> Meta:
    """cuDNN attention makes no logsumexp unless the call wants one (native/cudnn/MHA.cpp, ``run_cudnn_SDP_fprop``)."""

    def meta(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        results = _results(mode, func, args, kwargs)
        wanted = args[4] if len(args) > 4 else kwargs["compute_log_sumexp"]
        if not wanted:
            results[1] = None
        return tuple(results)

    return meta


def _reduced_in_place(func: OpOverload, reduction_at: int) -> Meta:
    """A loss whose scalar result keeps the storage of the unreduced loss.

    native/Loss.cpp, ``TORCH_META_FUNC(mse_loss)`` and ``smooth_l1_loss``, ``soft_margin_loss_out``: the
    output is built for the whole input and then resized to a scalar, which keeps the storage. native/cuda/Loss.cu,
    ``binary_cross_entropy_out_cuda`` resizes its full-size output in the same way.
    """

    def meta(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        out: Any = mode.dispatch(func, (), args, kwargs)
        reduction = args[reduction_at] if len(args) > reduction_at else kwargs.get("reduction", 1)
        if reduction == 0:
            return out
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        whole = torch.empty(shape, dtype=out.dtype, device="meta")
        return FakeTensor(mode, whole.as_strided((), ()), out.device)

    return meta


def _recurrent(func: OpOverload) -> Meta:
    """cuDNN's recurrent networks keep a reserve for backward, which torch describes as empty, and a buffer of
    weights where those do not share one (native/cudnn/RNN.cpp).

    Its size is an estimate, whose error the op's extras carry.
    """

    def meta(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        results = _results(mode, func, args, kwargs)
        size = rnn.forward_reserve(args, kwargs)
        results[3] = _fake(mode, (size,), torch.uint8, args[0].device)
        if results[4] is None:  # weights apart are copied into one buffer
            count = sum(weight.numel() for weight in args[1])
            results[4] = _fake(mode, (count,), args[0].dtype, args[0].device)
        return tuple(results)

    return meta


def _cudnn_convolution(names: str, first: int) -> Meta:
    """cuDNN's convolutions by name, which torch describes only as ``convolution`` (native/cudnn/ConvShared.cpp)."""
    order = names.split()

    def meta(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        given = {
            name: args[first + i] if len(args) > first + i else kwargs[name] for i, name in enumerate(order)
        }
        padded = given.get("output_padding", [0] * len(given["stride"]))
        call = (args[0], args[1], None, given["stride"], given["padding"], given["dilation"])
        transposed = "output_padding" in given
        return mode.dispatch(
            torch.ops.aten.convolution.default, (), (*call, transposed, padded, given["groups"]), {}
        )

    return meta


def _per_channel(mode: FakeTensorMode, source: torch.Tensor, dtype: torch.dtype) -> FakeTensor:
    return _fake(mode, (source.shape[1],), dtype, source.device)


def _channel_statistics(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
    """Mean and deviation of every channel, in the type that sums are taken in (native/cuda/Normalization.cu)."""
    del kwargs
    dtype = torch.float64 if args[0].dtype is torch.float64 else torch.float32
    return _per_channel(mode, args[0], dtype), _per_channel(mode, args[0], dtype)


def _like_batch(source_at: int) -> Meta:
    """A normalised batch, or its gradient."""

    def meta(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
        del kwargs
        return mode.dispatch(torch.ops.aten.empty_like.default, (), (args[source_at],), {})

    return meta


def _batch_norm_sums(mode: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
    """Two sums of every channel, and the gradients of weight and bias (``batch_norm_backward_reduce_cuda``)."""
    del kwargs
    _, source, mean, _, weight, input_g, weight_g, bias_g = args
    sums = [_per_channel(mode, source, mean.dtype) if input_g else None for _ in range(2)]
    dtype = mean.dtype if weight is None else weight.dtype
    return *sums, *(_per_channel(mode, source, dtype) if wanted else None for wanted in (weight_g, bias_g))


_BATCH_NORM: dict[str, Meta] = {
    "batch_norm_stats": _channel_statistics,
    "batch_norm_update_stats": _channel_statistics,
    "batch_norm_gather_stats": _channel_statistics,
    "batch_norm_gather_stats_with_counts": _channel_statistics,
    "batch_norm_elemt": _like_batch(0),
    "batch_norm_backward_elemt": _like_batch(1),
    "batch_norm_backward_reduce": _batch_norm_sums,
}

_CUDNN_CONVOLUTIONS = {
    "cudnn_convolution": ("padding stride dilation groups", 2),
    "cudnn_convolution_transpose": ("padding output_padding stride dilation groups", 2),
    "cudnn_convolution_relu": ("stride padding dilation groups", 3),
    "cudnn_convolution_add_relu": ("stride padding dilation groups", 5),
}


_EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def _compressed(mode: FakeTensorMode, source: FakeTensor) -> FakeTensor:
    """Two of four values and their places (sparse/cuda/cuSPARSELtOps.cpp, ``_cslt_compress``: ``compression_factor``).

    torch has no description of it; that of the product (``meta__cslt_sparse_mm``) reads the rows of two dimensions.
    """
    sixteenths = 10 if source.dtype in _EIGHT_BITS else 9
    rows = source.shape[0]
    return _fake(mode, (rows, source.numel() * sixteenths // 16 // rows), source.dtype, source.fake_device)


def _scattered(func: OpOverload) -> Meta:
    """Whole where it is made from an expanded tensor (``clone_preserve_strides`` of native/TensorShape.cpp): until 2.11
    torch describes it as expanded too, without memory."""

    def meta(mode: FakeTensorMode, source: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        if any(size > 1 and not stride for size, stride in zip(source.shape, source.stride(), strict=True)):
            return _fake(mode, tuple(source.shape), source.dtype, source.fake_device)
        return mode.dispatch(func, (), (source, *args), kwargs)

    return meta


def _build() -> dict[OpOverload, Meta]:
    metas: dict[OpOverload, Meta] = {}
    for func in overloads("_scaled_dot_product_efficient_attention", "_efficient_attention_forward"):
        metas[func] = _efficient_attention(func, 2)
    for func in overloads("_scaled_dot_product_cudnn_attention"):
        metas[func] = _cudnn_attention(func)
    for func in overloads("mse_loss", "smooth_l1_loss", "soft_margin_loss"):
        metas[func] = _reduced_in_place(func, 2)
    for func in overloads("_cudnn_rnn"):
        metas[func] = _recurrent(func)
    for name, meta in _BATCH_NORM.items():
        for func in overloads(name):
            metas[func] = meta
    for name, order in _CUDNN_CONVOLUTIONS.items():
        for func in overloads(name):
            metas[func] = _cudnn_convolution(*order)
    for func in overloads("_cslt_compress"):
        metas[func] = _compressed
    for func in overloads("_grouped_mm"):
        metas[func] = matmul.grouped_mm
    for func in overloads("binary_cross_entropy"):
        metas[func] = _reduced_in_place(func, 3)
    scattered = ["slice_scatter", "select_scatter"] if not at_least(2, 12) else []
    for func in overloads(*scattered, *(() if at_least(2, 13) else ("diagonal_scatter",))):
        metas[func] = _scattered(func)
    return metas


METAS: Mapping[OpOverload, Meta] = _build()
