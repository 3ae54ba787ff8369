"""Attention that arrives whole: as it does in inference mode, and for packed sequences."""

from __future__ import annotations

from typing import Any

import torch

from vramfit.virtual.fake_impls.registry import rule
from vramfit.virtual.kernels import sdpa
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner


@rule("aten.scaled_dot_product_attention.default")
def attention(mode: OpRunner, call: OpCall) -> Any:
    """Choose the backend as a card does; the ops of that backend come back to the mode."""
    given = call.by_name()
    context = mode.workspaces.context(given["query"].device.index or 0)
    with mode:
        return sdpa.scaled_dot_product_attention(ctx=context, **given)


@rule("aten._fused_sdp_choice.default")
def choice(mode: OpRunner, call: OpCall) -> int:
    """The number of the backend that attention would take (transformers/cuda/sdp_utils.cpp, ``select_sdp_backend``)."""
    given = call.by_name()
    context = mode.workspaces.context(given["query"].device.index or 0)
    del given["scale"]
    return int(sdpa.choose_backend(ctx=context, **given))


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
            scale=given["scale"],
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
    left, right = given["window_size"] or (-1, -1)
    with mode:
        unused = torch.empty(0, device=given["query"].device)
        return torch.ops.aten._flash_attention_backward(
            *(given[name] for name in first),
            0.0,
            given["is_causal"],
            given["rng_state"],
            unused,
            scale=given["scale"],
            window_size_left=left,
            window_size_right=right,
        )
