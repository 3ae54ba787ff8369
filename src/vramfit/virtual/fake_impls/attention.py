"""Attention and encoder layers that arrive whole: in inference mode, for packed sequences, on torch's fast paths.

The fast paths of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` are whole layers in one op. Their kernels
call other ops one after the other, which come back to the mode here, so that each allocates what it does on a card:
aten/src/ATen/native/transformers/transformer.cpp, ``transformer_encoder_layer_forward``, and
transformers/cuda/attention.cu, ``native_multi_head_attention_cuda``.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.torch_internals.kernel_choice import addmm_activation, softmax
from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.kernels import SdpaBackend, choose_backend, sdpa
from vramfit.virtual.kernels.sdpa_refusals import math_fallback
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner


@rule("aten.scaled_dot_product_attention.default")
def attention(mode: OpRunner, call: OpCall) -> Any:
    """Choose the backend as a card does; the ops of that backend come back to the mode."""
    given = call.by_name()
    context = mode.workspaces.context(given["query"].device.index or 0)

    def fell_back() -> None:
        tensors = (given["query"], given["key"], given["value"], given["attn_mask"])
        at = mode.guesses.location()
        mode.machine.note_attention(
            math_fallback(*tensors, given["enable_gqa"], given["is_causal"], at, context)
        )

    with mode:
        return sdpa.scaled_dot_product_attention(ctx=context, fell_back=fell_back, **given)


@rule("aten._fused_sdp_choice.default")
def choice(mode: OpRunner, call: OpCall) -> int:
    """The number of the backend that attention would take (transformers/cuda/sdp_utils.cpp, ``select_sdp_backend``)."""
    given = call.by_name()
    context = mode.workspaces.context(given["query"].device.index or 0)
    del given["scale"]
    return int(choose_backend(ctx=context, **given))


_PACKED = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")


@rule("torch_attn._varlen_attn.default")
def packed_attention(mode: OpRunner, call: OpCall) -> Any:
    """Attention over packed sequences (torch/nn/attention/varlen.py): flash attention, and a state it never reads."""
    given = call.by_name()
    left, right = given.get("window_size") or (-1, -1)
    with mode:
        results = torch.ops.aten._flash_attention_forward(
            *(given[name] for name in _PACKED),
            0.0,
            given["is_causal"],
            False,
            scale=given.get("scale"),  # 2.10 takes neither this nor a window
            window_size_left=left,
            window_size_right=right,
            **{name: given[name] for name in ("seqused_k", "block_table", "num_splits") if name in given},
        )
        state = torch.zeros(2, dtype=torch.uint64, device=given["query"].device)
    return results[0], results[1], state


@rule("torch_attn._varlen_attn_backward.default")
def packed_attention_backward(mode: OpRunner, call: OpCall) -> Any:
    """Its gradients."""
    first = ("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    given = call.by_name()
    left, right = given.get("window_size") or (-1, -1)
    with mode:
        unused = torch.empty(0, device=given["query"].device)
        return torch.ops.aten._flash_attention_backward(
            *(given[name] for name in first),
            0.0,
            given["is_causal"],
            given["rng_state"],
            unused,
            scale=given.get("scale"),
            window_size_left=left,
            window_size_right=right,
        )


# -- torch's fast paths: whole layers in one op ------------------------------------------------------------------


_MASK_OF_KEYS = 1  # mask_type of src_key_padding_mask
_SHORT_ROW = 1024


@rule("aten._native_multi_head_attention.default")
def multi_head_attention(mode: OpRunner, call: OpCall) -> Any:
    """Attention with packed projections, and its weights where they are wanted."""
    with mode:
        return _attend(mode, **call.by_name())


@rule("aten._transformer_encoder_layer_fwd.default")
def encoder_layer(mode: OpRunner, call: OpCall) -> Any:
    """A whole layer: attention and two feed-forward products, each with its residual and its norm."""
    with mode:
        return _layer(mode, call.by_name())


def _layer(mode: OpRunner, given: dict[str, Any]) -> torch.Tensor:
    def norm(x: torch.Tensor, number: int) -> torch.Tensor:
        weight, bias = given[f"norm_weight_{number}"], given[f"norm_bias_{number}"]
        return torch.native_layer_norm(x, (given["embed_dim"],), weight, bias, given["eps"])[0]

    source = x = given["src"]
    if given["norm_first"]:
        x = norm(x, 1)
    projections = {name: given[name] for name in ("qkv_weight", "qkv_bias", "proj_weight", "proj_bias")}
    x = _attend(
        mode,
        *(x, x, x, given["embed_dim"], given["num_heads"]),
        **projections,
        mask=given["mask"],
        need_weights=False,
        average_attn_weights=True,
        mask_type=given["mask_type"],
    )[0]
    x.add_(source)
    if not given["norm_first"]:
        x = norm(x, 1)
    residual = x
    if given["norm_first"]:
        x = norm(x, 2)
    x = _feed_forward(x, given)
    x.add_(residual)
    return x if given["norm_first"] else norm(x, 2)


def _feed_forward(x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """``linear_for_ffn`` twice, the activation of the first in its epilogue."""
    shape = x.shape
    flat = x.view(-1, shape[-1])
    wide = addmm_activation(given["ffn_bias_1"], flat, given["ffn_weight_1"].t(), use_gelu=given["use_gelu"])
    return torch.addmm(given["ffn_bias_2"], wide, given["ffn_weight_2"].t()).view(*shape[:-1], -1)


def _attend(
    mode: OpRunner,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: torch.Tensor,
    qkv_bias: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    mask: torch.Tensor | None,
    need_weights: bool,
    average_attn_weights: bool,
    mask_type: int | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    size = embed_dim // num_head
    batch, length = query.shape[:2]
    if query is key is value and size % 8 == 0 and not need_weights and mask is None:
        context = mode.workspaces.context(query.device.index or 0)
        heads = query.view(batch, -1, num_head, size).transpose(1, 2)
        backend = choose_backend(heads, heads, heads, None, 0.0, False, False, context)
        if backend is not SdpaBackend.MATH:
            packed = _linear(query, qkv_weight, qkv_bias)
            parts = [part.view(batch, -1, num_head, size).transpose(1, 2) for part in packed.chunk(3, -1)]
            out = sdpa.scaled_dot_product_attention(
                parts[0], parts[1], parts[2], None, 0.0, False, None, False, context
            )
            mixed = out.transpose(1, 2).reshape(batch, -1, embed_dim)
            return _linear(mixed, proj_weight, proj_bias), None
    packed = _project(query, key, value, embed_dim, qkv_weight)
    # ``_transform_bias_rescale_qkv`` adds the bias and lays heads out; queries are overwritten by the result.
    heads_first = qkv_bias.new_empty(3, batch * num_head, length, size)
    del packed
    scores = torch.bmm(heads_first[0], heads_first[1].transpose(2, 1)).view(batch, num_head, length, length)
    if mask is None:
        weights = scores  # the softmax is taken in place
    else:
        weights = _masked_softmax(scores, mask.to(torch.bool), mask_type)
    del scores
    torch.bmm(weights.view(-1, length, length), heads_first[2], out=heads_first[0])
    kept = weights if need_weights else None
    del weights
    mixed = heads_first[0].view(batch, num_head, length, size).permute(0, 2, 1, 3).contiguous()
    out = _linear(mixed.view(batch, length, embed_dim), proj_weight, proj_bias)
    if kept is not None and average_attn_weights:
        kept = kept.sum(1).div_(num_head)
    return out, kept


def _masked_softmax(scores: torch.Tensor, mask: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """Softmax of what a mask leaves (native/cuda/SoftMax.cu, ``masked_softmax_cuda``).

    Rows of up to 4 KiB and 1,024 scores read a dense mask as it is. Else the scores are filled and their softmax is
    taken, while the result allocated first waits to be replaced.
    """
    weights = torch.empty_like(scores)
    row = scores.shape[-1]
    dense = mask_type == _MASK_OF_KEYS or mask.shape == scores.shape
    if dense and row <= _SHORT_ROW and row * scores.element_size() <= 4 * _SHORT_ROW:
        return weights
    filled = scores.clone()
    again: torch.Tensor = softmax(filled, -1, False)
    del filled
    return again


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """``at::linear`` of three dimensions with a bias: one product of a matrix."""
    return torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], -1)


def _project(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, embed_dim: int, weight: torch.Tensor
) -> torch.Tensor:
    """``qkv_projection``: one product where all three are one tensor, else two or three, concatenated."""
    if query is key is value:
        return _product(query, weight)
    if key is value:
        first, rest = weight.split([embed_dim, 2 * embed_dim], 0)
        return torch.cat([_product(query, first), _product(key, rest)], 2)
    inputs = zip((query, key, value), weight.chunk(3, 0), strict=True)
    return torch.cat([_product(tensor, part) for tensor, part in inputs], 2)
