"""cuDNN's attention: its workspace by the structure of its kernels, or as an installed cuDNN gives it.

aten/src/ATen/native/cudnn/MHA.cpp: ``run_cudnn_SDP_fprop`` and ``run_cudnn_SDP_bprop`` allocate once, when the outputs
exist, what the graph of cudnn-frontend says (``get_workspace_size``), and free it when they return.

NOTE [What attention's backward pass keeps]
Its workspace has two parts. cudnn-frontend lays out the first (``SDPABackwardNode::get_fe_workspace_size_node`` in
node/scaled_dot_product_flash_attention.h): dQ in float32, to which blocks of keys add, and a sum for each row of the
softmax. torch has that code compiled in, so this part is exact. The second is what cuDNN's plan adds:

- dK and dV of all query heads where heads share keys: they are virtual tensors of the graph.
- Kernels of Ampere's kind have a float32 dQ of their own, in rows padded to eight. They run on Ampere, Ada and consumer
  Blackwell, and on data-centre Blackwell (10.x) where queries or keys fit one tile of 128. Kernels of Hopper's and
  Blackwell's own kind add to the one that the graph has.
- Data-centre Blackwell keeps the random bits of dropout in both passes, one for each weight of whole tiles, and then
  runs its own kernels at all lengths.

Counters and descriptors come on top: 256 bytes with Hopper's kernels, in the forward pass too, and 128 in the backward
pass of Ampere's kind. Every pass that was recorded on an H100 and an H200 has them (cuDNN 9.19), except forward passes
of single queries. They matter: with them the request no longer fills whole pages, and the allocator cuts elsewhere.

cuDNN 9.20.0 gave these sizes and at most 512 bytes more than without counters for 436 passes of random sizes on A100,
H100, B200 and RTX 5090, and 9.10.2 for 74 on H100. Which kind of kernel runs is for a release to decide, and the bar is
for that: on B200, 9.28.1 takes one of its own where only the queries fit a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.cudnn.questions import AttentionPass, AttentionQuestion, TensorShape
from vramfit.virtual.kernels.rules import ceil_div, nbytes, round_up
from vramfit.virtual.op_call import Extras, KernelContext, OpCall

_FLOAT = 4
_TILE = 128
_COUNTERS = 512
"""Bytes within which counters and descriptors of a plan stay: the smallest block of the allocator."""

_OF_HOPPER = 256
"""Bytes of them with kernels of Hopper's kind, in either pass."""

_OF_AMPERE = 128
"""Bytes of them in the backward pass of Ampere's kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWorkspace:
    """An estimate of a workspace.

    Attributes:
        size: in bytes.
        below, above: how far it may be off.
    """

    size: int
    below: int = 0
    above: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """Sizes of one attention.

    Attributes:
        batch, heads, key_heads, queries, keys: how many.
        size, value_size: of heads, in elements.
        element: bytes of an element.
        dropout: weights are dropped.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    element: int
    dropout: bool

    @classmethod
    def of(
        cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
    ) -> AttentionSizes:
        """Those of tensors of shape (batch, heads, length, head size)."""
        return cls(
            batch=query.shape[0],
            heads=query.shape[1],
            key_heads=key.shape[1],
            queries=query.shape[2],
            keys=key.shape[2],
            size=query.shape[3],
            value_size=value.shape[3],
            element=query.element_size(),
            dropout=dropout > 0,
        )

    @property
    def random_bits(self) -> int:
        """Bytes of one bit for each weight, in tiles of 128 queries and 128 keys."""
        if not self.dropout:
            return 0
        return self.batch * self.heads * round_up(self.queries, _TILE) * round_up(self.keys, _TILE) // 8


def forward_workspace(sizes: AttentionSizes, ctx: KernelContext) -> AttentionWorkspace:
    """Workspace of the forward pass.

    A single query is shared out among parts of the keys, of 128 at least, until two blocks run on each multiprocessor:
    each part has an output and two numbers of the softmax in float32. Whether that is done is not known.
    """
    bits = sizes.random_bits if ctx.capability[0] == 10 else 0
    if sizes.queries > 1:
        if ctx.capability[0] == 9:
            return AttentionWorkspace(size=_OF_HOPPER, above=_COUNTERS - _OF_HOPPER)
        return AttentionWorkspace(size=bits, below=bits, above=_COUNTERS)
    parts = sizes.keys // _TILE
    if ctx.capability[0] != 10:
        parts = min(parts, ceil_div(2 * ctx.spec.sm_count, sizes.batch * sizes.key_heads))
    part = sizes.batch * sizes.heads * (sizes.value_size + 2) * _FLOAT
    return AttentionWorkspace(size=bits, below=bits, above=(parts * part if parts > 1 else 0) + _COUNTERS)


def backward_workspace(sizes: AttentionSizes, ctx: KernelContext) -> AttentionWorkspace:
    """Workspace of the backward pass. See NOTE [What attention's backward pass keeps]."""
    rows = sizes.batch * sizes.heads * sizes.queries * _FLOAT
    own = sizes.batch * sizes.heads * round_up(sizes.queries, 8) * sizes.size * _FLOAT
    laid_out = rows + rows * sizes.size
    if sizes.key_heads != sizes.heads:
        head = sizes.keys * (sizes.size + sizes.value_size) * sizes.element
        laid_out += sizes.batch * sizes.heads * head
    major = ctx.capability[0]
    if major == 9:
        return AttentionWorkspace(size=laid_out + _OF_HOPPER, above=_COUNTERS - _OF_HOPPER)
    if major == 10 and (sizes.dropout or min(sizes.queries, sizes.keys) > _TILE):
        bits = sizes.random_bits
        return AttentionWorkspace(size=laid_out + bits, below=bits, above=own + _COUNTERS)
    return AttentionWorkspace(
        size=laid_out + own + _OF_AMPERE, below=own + _OF_AMPERE, above=_COUNTERS - _OF_AMPERE
    )


# -- the ops -------------------------------------------------------------------------------------------------


def cudnn_forward(call: OpCall) -> Extras | None:
    """``_scaled_dot_product_cudnn_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, ...)``."""
    query, key, value = call.args[:3]
    if not (query.numel() and key.numel() and value.numel()):
        return None
    dropout = call.argument(5, "dropout_p", 0.0)
    workspace = forward_workspace(AttentionSizes.of(query, key, value, dropout), call.context)
    if _may_ask(call.context):
        question = AttentionQuestion(
            kind=AttentionPass.FORWARD,
            stats=bool(call.argument(4, "compute_log_sumexp")),
            causal=bool(call.argument(6, "is_causal", False)),
            dropout=dropout,
            **_tensors(query, key, value, call.out[0], call.argument(3, "attn_bias")),
        )
        workspace = _asked(question, workspace, call.context)
    return _extras([workspace.size], workspace)


def cudnn_backward(call: OpCall) -> Extras | None:
    """``_scaled_dot_product_cudnn_attention_backward(grad_out, query, key, value, out, logsumexp, philox_seed,
    philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal)``.

    A gradient whose last stride is not 1 is copied first (``permute_to_matching_layout``).
    """
    grad, query, key, value, out = call.args[:5]
    if not (query.numel() and key.numel() and value.numel()):
        return None
    dropout = call.argument(13, "dropout_p", 0.0)
    workspace = backward_workspace(AttentionSizes.of(query, key, value, dropout), call.context)
    copied = grad.stride(-1) != 1
    if _may_ask(call.context):
        question = AttentionQuestion(
            kind=AttentionPass.BACKWARD,
            grad=_shape(out if copied else grad),
            causal=bool(call.argument(14, "is_causal", False)),
            dropout=dropout,
            **_tensors(query, key, value, out, call.argument(8, "attn_bias")),
        )
        workspace = _asked(question, workspace, call.context)
    return _extras([nbytes(grad) if copied else 0, workspace.size], workspace)


def _extras(after: list[int], workspace: AttentionWorkspace) -> Extras | None:
    if not any(after) and not workspace.above:
        return None
    return Extras(
        after=tuple(size for size in after if size),
        error_bytes=workspace.above,
        error_below_bytes=workspace.below,
    )


# -- asking --------------------------------------------------------------------------------------------------


def _may_ask(ctx: KernelContext) -> bool:
    """Whether the graph is the plain one: torch's experiment against recompiling pads it and makes it ragged."""
    return ctx.asker is not None and ctx.flag("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") is not True


def _asked(question: AttentionQuestion, rule: AttentionWorkspace, ctx: KernelContext) -> AttentionWorkspace:
    """The workspace as cuDNN gives it, that of the rule where it cannot say.

    The answer of the very version that this torch has is certain. Another one may choose otherwise: then the bar
    reaches as far as the rule's.
    """
    assert ctx.asker is not None
    size = ctx.asker.attention(question)
    if size is None:
        return rule
    if ctx.asker.version == ctx.cudnn:
        return AttentionWorkspace(size=size)
    least, most = min(size, rule.size - rule.below), max(size, rule.size + rule.above)
    return AttentionWorkspace(size=size, below=size - least, above=most - size)


def _tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None
) -> dict[str, Any]:
    """What both passes tell cuDNN of their tensors."""
    batch, _, queries, _ = query.shape
    return {
        "dtype": _name(query.dtype),
        "query": _shape(query),
        "key": _shape(key),
        "value": _shape(value),
        "out": _shape(out),
        "bias": None if bias is None else _expanded(bias, (batch, queries, key.shape[2])),
        "bias_dtype": "" if bias is None else _name(bias.dtype),
    }


def _shape(tensor: torch.Tensor) -> TensorShape:
    return TensorShape(dims=tuple(tensor.shape), strides=tuple(tensor.stride()))


def _expanded(bias: torch.Tensor, whole: Sequence[int]) -> TensorShape:
    """A mask as torch expands it: to (batch, 1 or its heads, queries, keys), with stride 0 where it repeats itself."""
    missing = 4 - bias.dim()
    dims = (whole[0], 1 if missing else bias.shape[1], *whole[1:])
    strides = [0] * 4
    for dim in reversed(range(4)):  # ``inferExpandGeometry``
        if dim < missing:
            have, step = 1, dims[dim + 1] * strides[dim + 1]
        else:
            have, step = bias.shape[dim - missing], bias.stride(dim - missing)
        strides[dim] = step if have == dims[dim] else 0
    return TensorShape(dims=dims, strides=tuple(strides))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
