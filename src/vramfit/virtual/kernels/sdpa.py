"""Scaled dot-product attention: which backend a card chooses, and the ops that the choice leads to.

A CPU build answers "math" for every fake tensor. Here the choice follows
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (``select_sdp_backend`` and the ``can_use_*`` functions)
and sdp_utils_cpp.h, and the wrapper does what ``scaled_dot_product_attention`` in
aten/src/ATen/native/transformers/attention.cpp does, so that autograd saves what it saves on the card.
Nested tensors take other paths in torch and always get the math backend here.

NOTE [Attention by release]: since when a check is made was read from the headers of the wheels of 2.10 to 2.15
(sdp_utils_cpp.h), from the names and constants of the ``check_*`` functions in their libtorch_cuda, and from
sdp_utils.cpp as it was shortly before 2.15:

* 2.11: cuDNN takes heads of 192 with values of 128 on capability 10.x (``check_cudnn_tensor_shapes``).
* 2.12: cuDNN wants a probability of dropout in sixteenths (``check_cudnn_dropout``).
* 2.13: cuDNN is preferred on capability 9.x and 10.x whatever the minor number, on builds for CUDA 13
  (``check_prefer_cudnn_attention``); it takes 65,535 samples and heads at most; memory-efficient attention wants
  aligned tensors (``check_data_ptr_alignment_mem_efficient``).
* 2.14: three dimensions get a batch of one and so every backend (``normalize_unbatched_input``); one head of keys and
  values may serve all queries without ``enable_gqa`` (``supports_mqa``), and memory-efficient attention shares heads;
  cuDNN takes heads of up to 256, in training those of 128, 192 with 128, and 256
  (``check_cudnn_d256_bprop_head_dim``), and single queries not everywhere (``is_cudnn_attention_decode_disabled``).
* 2.15: flash attention takes 65,535 samples and heads at most (``check_flash_attention_grid_size``); cuDNN before
  9.26 is kept from trained queries over keys of which 64 remain after whole blocks of 128, on capability 9.x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.nn import functional

from vramfit.virtual.op_call import KernelContext

_aten = torch.ops.aten
_HALVES = frozenset({torch.float16, torch.bfloat16})
_MOST_BLOCKS = 65_535  # of one dimension of a launch


class SdpaBackend(IntEnum):
    """Backends, numbered as ``at::SDPBackend`` (ATen/SDPBackend.h)."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True, slots=True)
class _SdpaCall:
    """One call, as the checks see it (``sdp_params``)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    ctx: KernelContext

    @property
    def trains(self) -> bool:
        """``input_requires_grad``."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def choose_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    ctx: KernelContext,
) -> SdpaBackend:
    """The backend that ``F.scaled_dot_product_attention`` takes on a card.

    Args:
        query: shape (batch, heads, length, head size), since 2.14 also without a batch; other ranks always take
            the math backend.
        key: like the query; fewer heads only with ``enable_gqa``.
        value: like the key.
        attn_mask: boolean or additive, or None.
        dropout_p: probability of dropping a weight.
        is_causal: mask the future.
        enable_gqa: let several query heads share one key head.
        ctx: the card and torch's switches.

    Raises:
        RuntimeError: every backend that could run the call is switched off, as on a card.
    """
    if _is_unbatched(query, key, value, ctx):
        query, key, value, attn_mask = _with_batch(query, key, value, attn_mask)
    call = _SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, ctx)
    for backend in priority(ctx):
        if _USABLE[backend](call):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def can_use(
    backend: SdpaBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    ctx: KernelContext,
) -> bool:
    """Whether a backend could run a call on a card (``torch.backends.cuda.can_use_flash_attention`` and its kin)."""
    return _USABLE[backend](_SdpaCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, ctx))


def priority(ctx: KernelContext) -> tuple[SdpaBackend, ...]:
    """The order in which backends are tried.

    ``check_prefer_cudnn_attention`` puts cuDNN first on capability 9.x and 10.x where cuDNN is newer than
    9.15.0 (all default wheels since 2.11); before 2.13, and in builds for CUDA 12, only for minor versions 0 and
    3.
    """
    default = (SdpaBackend.FLASH, SdpaBackend.EFFICIENT, SdpaBackend.MATH, SdpaBackend.CUDNN)
    if ctx.sdp_priority is not None:
        known = tuple(SdpaBackend(number) for number in ctx.sdp_priority if number in _USABLE)
        if known != default:  # the user's own order; the default one is still to be adapted to the card
            return known
    major, minor = ctx.capability
    any_minor = ctx.torch_version >= (2, 13) and ctx.cuda_version >= (13, 0)
    preferred = (
        ctx.flag("TORCH_CUDNN_SDPA_DEPRIORITIZED") is not True
        and ctx.cudnn > 91500
        and major in (9, 10)
        and (any_minor or minor in (0, 3))
    )
    if preferred:
        return (SdpaBackend.CUDNN, SdpaBackend.FLASH, SdpaBackend.EFFICIENT, SdpaBackend.MATH)
    return default


# -- can_use_cudnn_attention ---------------------------------------------------------------------------------


def _can_use_cudnn(call: _SdpaCall) -> bool:
    ctx, query = call.ctx, call.query
    if not (ctx.cudnn_sdp and ctx.cudnn and _is_dense_4d(call)) or ctx.deterministic:
        return False
    if call.dropout > 0 and 91100 < ctx.cudnn < 91400:
        return False
    if ctx.torch_version >= (2, 12) and not (call.dropout * 16).is_integer():  # check_cudnn_dropout
        return False
    return (
        _same_dtype(call, _HALVES)
        and _cudnn_mask_shape(call)
        and 80 <= ctx.sm <= 121
        and query.shape[2] > 0
        and call.key.shape[2] > 0
        and _last_strides_are_one(call, ignore_single=True)
        and _heads_fit(call, gqa=True, same_kv_heads=False)
        and _cudnn_shapes(call)
    )


def _cudnn_mask_shape(call: _SdpaCall) -> bool:
    """``check_attn_mask_shape``: 2-D or 4-D, each side whole or one, no gradient."""
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    whole = (*call.query.shape[:3], call.key.shape[2])[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, whole, strict=True))


def _cudnn_shapes(call: _SdpaCall) -> bool:
    """``check_cudnn_tensor_shapes`` and ``check_cudnn_d256_bprop_head_dim``."""
    ctx, queries, keys = call.ctx, call.query.shape[2], call.key.shape[2]
    if ctx.torch_version >= (2, 13) and max(call.query.shape[:2]) > _MOST_BLOCKS:
        return False
    if ctx.torch_version >= (2, 14) and queries == 1 and _cudnn_lacks_decoding(ctx):
        return False
    if (
        ctx.torch_version >= (2, 15)
        and (ctx.capability[0], keys % 128) == (9, 64)
        and ctx.cudnn < 92600
        and call.query.requires_grad
        and not call.causal
    ):
        return False
    size, value_size = call.query.shape[3], call.value.shape[3]
    if max(size, value_size) > _cudnn_head_limit(size, value_size, ctx):
        return False
    trained = (
        max(size, value_size) <= 128,
        (size, value_size) == (192, 128),
        (size, value_size) == (256, 256),
    )
    if ctx.torch_version >= (2, 14) and call.trains and _cudnn_takes_256(ctx) and not any(trained):
        return False
    return not (size % 8 or value_size % 8 or keys == 1 or (queries == 1 and call.dropout > 0))


def _cudnn_head_limit(size: int, value_size: int, ctx: KernelContext) -> int:
    """The widest head that cuDNN is given."""
    sm90, sm10x = ctx.capability == (9, 0), ctx.capability[0] == 10
    split = (size, value_size) == (192, 128) and ctx.cudnn >= 91100
    if ctx.torch_version >= (2, 14):
        return 256 if _cudnn_takes_256(ctx) else 192 if split and (sm90 or sm10x) else 128
    if sm90 and ctx.cudnn >= 91000:
        return 256
    return 192 if split and sm10x and ctx.torch_version >= (2, 11) else 128


def _cudnn_takes_256(ctx: KernelContext) -> bool:
    """Since 2.14, ``supports_d256``: the wheels are built with a cudnn-frontend that knows it."""
    unsupported = ctx.capability == (10, 7) and ctx.cudnn <= 92500
    return ctx.cudnn > 92200 and (ctx.capability == (9, 0) or ctx.capability[0] == 10) and not unsupported


def _cudnn_lacks_decoding(ctx: KernelContext) -> bool:
    """``is_cudnn_attention_decode_disabled``: cuDNN 9.19 to 9.25.0 but 9.24.1, on capability 10.x and 11.x."""
    return ctx.capability[0] in (10, 11) and 91900 <= ctx.cudnn <= 92500 and ctx.cudnn != 92401


# -- can_use_flash_attention ---------------------------------------------------------------------------------


def _can_use_flash(call: _SdpaCall) -> bool:
    ctx, query, key = call.ctx, call.query, call.key
    if not (ctx.flash_sdp and _is_dense_4d(call)) or call.mask is not None:
        return False
    size = query.shape[3]
    if ctx.torch_version >= (2, 15) and max(query.shape[:2]) > _MOST_BLOCKS:
        return False
    return (
        size == key.shape[3] == call.value.shape[3]
        and size <= 256
        and 80 <= ctx.sm <= 121
        and _flash_backward_fits(call, size)
        and not (call.causal and query.shape[2] != key.shape[2])
        and _same_dtype(call, _HALVES)
        and _heads_fit(call, gqa=True, same_kv_heads=True)
        and query.shape[2] > 0
        and key.shape[2] > 0
        and _last_strides_are_one(call, ignore_single=True)
    )


def _flash_backward_fits(call: _SdpaCall, size: int) -> bool:
    """``check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120``."""
    if not (86 <= call.ctx.sm <= 89 or 120 <= call.ctx.sm <= 121) or not call.trains:
        return True
    return size <= 192 or (size > 224 and not call.dropout)


# -- can_use_mem_efficient_attention -------------------------------------------------------------------------


def _can_use_efficient(call: _SdpaCall) -> bool:
    ctx, query, key, value = call.ctx, call.query, call.key, call.value
    if not (ctx.mem_efficient_sdp and _is_dense_4d(call)) or not 50 <= ctx.sm <= 121:
        return False
    alignment = gemm_alignment(query.dtype, ctx)
    size, value_size = query.shape[3], value.shape[3]
    if size != key.shape[3] or size % alignment or value_size % alignment or not size or not value_size:
        return False
    if ctx.torch_version >= (2, 13) and ctx.capability[0] >= 8 and not _offsets_are_aligned(call, alignment):
        return False
    allowed = {torch.float16, torch.float32} | ({torch.bfloat16} if ctx.capability[0] >= 8 else set())
    return (
        query.shape[2] > 0
        and key.shape[2] > 0
        and _last_strides_are_one(call, ignore_single=False)
        and _heads_fit(call, gqa=ctx.torch_version >= (2, 14), same_kv_heads=True)
        and _same_dtype(call, frozenset(allowed))
    )


def gemm_alignment(dtype: torch.dtype, ctx: KernelContext) -> int:
    """Elements to which head sizes must align (``minimum_gemm_alignment``)."""
    half = dtype in _HALVES
    major = ctx.capability[0]
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major >= 7 and half):
        alignment = max(alignment, 8 if half else 4)
    return alignment


def _offsets_are_aligned(call: _SdpaCall, alignment: int) -> bool:
    """``check_data_ptr_alignment_mem_efficient``: the allocator aligns storages, so offsets decide."""
    tensors = (call.query, call.key, call.value)
    return all(not t.numel() or t.storage_offset() % alignment == 0 for t in tensors)


# -- inputs without a batch ----------------------------------------------------------------------------------


def _is_unbatched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ctx: KernelContext) -> bool:
    """Whether torch gives the three a batch of one (``normalize_unbatched_input`` of sdp_utils_cpp.h, since 2.14)."""
    return ctx.torch_version >= (2, 14) and all(
        tensor.dim() == 3 and not tensor.is_nested and tensor.layout is torch.strided
        for tensor in (query, key, value)
    )


def _with_batch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask


# -- checks shared by backends (sdp_utils_cpp.h) -------------------------------------------------------------


def _is_dense_4d(call: _SdpaCall) -> bool:
    tensors = (call.query, call.key, call.value)
    return all(t.dim() == 4 and not t.is_nested for t in tensors)


def _same_dtype(call: _SdpaCall, allowed: frozenset[torch.dtype]) -> bool:
    dtype = call.query.dtype
    if call.ctx.capability[0] < 8 and dtype is torch.bfloat16:
        return False
    return dtype == call.key.dtype == call.value.dtype and dtype in allowed


def _last_strides_are_one(call: _SdpaCall, *, ignore_single: bool) -> bool:
    """``check_last_dim_stride_equals_1_dense``, the mask's included."""
    fine = all(t.stride(-1) == 1 for t in (call.query, call.key, call.value))
    if ignore_single and call.query.shape[-1] == 1:
        fine = True
    return fine and (call.mask is None or call.mask.stride(-1) == 1)


def _heads_fit(call: _SdpaCall, *, gqa: bool, same_kv_heads: bool) -> bool:
    """``check_batch_size_and_num_heads_dense`` and ``check_grouped_query_attention``."""
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    if not query[0] == key[0] == value[0]:
        return False
    if not (call.gqa and gqa):
        return query[1] == key[1] == value[1] or (
            call.ctx.torch_version >= (2, 14) and query[1] > 0 and key[1] == value[1] == 1
        )
    if same_kv_heads and key[1] != value[1]:
        return False
    return query[1] % key[1] == 0 and (same_kv_heads or query[1] % value[1] == 0)


_USABLE: dict[SdpaBackend, Callable[[_SdpaCall], bool]] = {
    SdpaBackend.CUDNN: _can_use_cudnn,
    SdpaBackend.FLASH: _can_use_flash,
    SdpaBackend.EFFICIENT: _can_use_efficient,
    SdpaBackend.MATH: lambda call: call.ctx.math_sdp,
}


# -- what the composite op does ------------------------------------------------------------------------------


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    ctx: KernelContext,
    fell_back: Callable[[], object] = lambda: None,
) -> torch.Tensor:
    """``F.scaled_dot_product_attention`` as a card runs it; shapes and errors as in torch.

    Differentiable: the ops are called through the dispatcher, with autograd recording.

    Args:
        fell_back: called where the math kernel runs.
    """
    if _is_unbatched(query, key, value, ctx):
        query, key, value, attn_mask = _with_batch(query, key, value, attn_mask)
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, ctx, fell_back
        ).squeeze(0)
    backend = choose_backend(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, ctx)
    if backend is SdpaBackend.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if backend is SdpaBackend.MATH:
        fell_back()
        mask = _additive_mask(attn_mask, query.dtype)
        return _math(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa, ctx)
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if backend is SdpaBackend.CUDNN:
        mask = _additive_mask(attn_mask, query.dtype, lowest=-65504.0)
        return _first(
            _aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, trains, dropout_p, is_causal, False, scale=scale
            )
        )
    mask = _additive_mask(attn_mask, query.dtype)
    if mask is not None:
        mask = _mask_for_efficient(mask, query, key)
    return _first(
        _aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, trains, dropout_p, is_causal, scale=scale
        )
    )


def _first(results: Any) -> torch.Tensor:
    out: torch.Tensor = results[0]
    return out


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Pad the head size to a multiple of 8 (``pad_last_dim<8, false>``), attend, cut the padding off."""
    size = query.shape[-1]
    out = _first(
        _aten._scaled_dot_product_flash_attention(
            _pad_last(query),
            _pad_last(key),
            _pad_last(value),
            dropout_p,
            is_causal,
            False,
            scale=1.0 / math.sqrt(size) if scale is None else scale,
        )
    )
    return out if out.shape[-1] == size else _cut_last(out, size)


def _pad_last(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % 8
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _cut_last(tensor: torch.Tensor, size: int) -> torch.Tensor:
    cut: torch.Tensor = _aten.slice.Tensor(tensor, -1, 0, size)
    return cut


def _additive_mask(
    mask: torch.Tensor | None, dtype: torch.dtype, *, lowest: float = -math.inf
) -> torch.Tensor | None:
    """Turn a boolean mask into an additive one (``convert_boolean_attn_mask``, and its ``_cudnn`` form)."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    kept, masked = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, lowest))
    return torch.where(mask, kept, masked)


def _mask_for_efficient(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Pad a mask whose rows are not aligned to 8 elements, then expand it (``preprocess_mask``)."""
    strides = mask.stride()
    if strides[-1] != 1 or any(stride % 8 for stride in strides[:-1]):
        length = mask.shape[-1]
        mask = _cut_last(functional.pad(mask, (0, 8 - length % 8)), length)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    ctx: KernelContext,
) -> torch.Tensor:
    """``_scaled_dot_product_attention_math``, with the mask added in place as for plain tensors on a card."""
    # As in C++, names keep tensors alive: float copies until the end, weights in the caller's type beside the product.
    dtype = query.dtype
    if dtype in _HALVES and not ctx.half_reduction_math_sdp:
        query, key, value = query.float(), key.float(), value.float()
    factor = math.sqrt(abs(scale) if scale is not None else 1.0 / math.sqrt(query.shape[-1]))
    scaled = query * (-factor if scale is not None and scale < 0 else factor)
    if is_causal:
        if mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive_mask(mask, query.dtype)
    if enable_gqa:
        key = _repeat_heads(key, query)
        value = _repeat_heads(value, query)
    weights = torch.matmul(scaled, key.transpose(-2, -1) * factor)
    if mask is not None:
        weights = weights.add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if dropout_p > 0.0:
        weights = functional.dropout(weights, dropout_p)
    also_returned = weights.to(dtype)
    out = torch.matmul(weights, value).to(dtype)
    del also_returned
    return out


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Copy each head for the query heads that share it (``pre_process_group_query_attention_input``)."""
    heads = query.shape[-3]
    if tensor.shape[-3] == heads:
        return tensor
    if heads % tensor.shape[-3]:
        raise RuntimeError("Number of heads in key and value must divide the number of heads in query")
    return tensor.repeat_interleave(heads // tensor.shape[-3], -3)
