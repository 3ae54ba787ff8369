"""Ops with CUDA kernels that torch describes nowhere: what each returns, derived from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.describe import is_compressed_product
from vramfit.virtual.fake_impls.registry import RULES, find_overload, finish, rule
from vramfit.virtual.fake_impls.sparse import multiply_compressed
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner

_Describe = Callable[["OpRunner", tuple[Any, ...]], Any]


def _like(position: int) -> _Describe:
    """A tensor like one of the arguments, of its dense strides."""
    return lambda mode, args: mode.fake_like(args[position])


def _contiguous(position: int) -> _Describe:
    return lambda mode, args: mode.fake_empty(
        tuple(args[position].shape), args[position].dtype, args[position].device
    )


def _with_mask(mode: OpRunner, args: tuple[Any, ...]) -> Any:
    """A tensor like the first, and a mask of which of its elements were not clamped (cuda/FakeQuantizeCore.cu)."""
    source: torch.Tensor = args[0]
    mask = torch.empty_like(
        torch.empty_strided(source.shape, source.stride(), device="meta"), dtype=torch.bool
    )
    return mode.fake_like(source), mode.describer.factory.make(mask, source.device)


def _learnable_backward(mode: OpRunner, args: tuple[Any, ...]) -> Any:
    """Gradients of the tensor, of its scale and of its zero point (native/quantized/FakeQuantPer*Affine.cpp)."""
    return tuple(mode.fake_like(args[position]) for position in (1, 2, 3))


_OPS: dict[str, _Describe] = {
    "_logcumsumexp.default": _contiguous(0),  # cuda/LogcumsumexpKernel.cu, result like the input
    "_masked_softmax.default": _contiguous(0),  # cuda/SoftMax.cu, masked_softmax_cuda
    "_masked_softmax_backward.default": _contiguous(0),
    "_sample_dirichlet.default": _like(0),  # cuda/Distributions.cpp
    "_dirichlet_grad.default": _like(0),
    "_standard_gamma.default": _like(0),
    "_standard_gamma_grad.default": _like(0),
    "binomial.default": _like(0),
    "fake_quantize_per_tensor_affine_cachemask.default": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default": _with_mask,
    "fake_quantize_per_channel_affine_cachemask.default": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine.default": _like(0),
    "_fake_quantize_learnable_per_channel_affine.default": _like(0),
    "_fake_quantize_learnable_per_tensor_affine_backward.default": _learnable_backward,
    "_fake_quantize_learnable_per_channel_affine_backward.default": _learnable_backward,
}


@rule("aten._is_all_true.default")
def is_all_true(mode: OpRunner, call: OpCall) -> Any:
    """What ``torch.distributions`` asks of its arguments: yes, unless their true values say otherwise."""
    out = mode.fake_empty((), torch.bool, call.args[0].device)
    mode.settle(call, out)
    shadow = mode.shadows.find(out)
    if shadow is None or shadow.guessed:
        mode.shadows.set(out, torch.tensor(True, device="cpu"), guessed=True)
    return out


@rule("aten._scaled_mm.out")
def scaled_product_into(mode: OpRunner, call: OpCall) -> Any:
    """A scaled product into a tensor that is there: what Inductor writes. It returns that tensor."""
    return finish(mode, call, call.kwargs["out"])


def _handler(describe: _Describe) -> Handler:
    return lambda mode, call: finish(mode, call, describe(mode, call.args))


def _register() -> None:
    for name, describe in _OPS.items():
        func = find_overload(f"aten.{name}")
        if func is not None:
            RULES.setdefault(func, _handler(describe))


_register()


# -- Ops that torch has CUDA kernels for but no description by shape -----------------------------------------


_NO_REDUCTION = 0  # at::Reduction::None


@rule(
    "aten.multi_margin_loss_backward.default",
    "aten.multilabel_margin_loss_backward.default",
    "aten.fractional_max_pool3d_backward.default",
    "aten.adaptive_max_pool3d_backward.default",
    "aten._pdist_backward.default",
    "aten.glu_jvp.default",
)
def like_input(mode: OpRunner, call: OpCall) -> Any:
    """A gradient shaped like the op's input, which follows the incoming gradient among the arguments."""
    return finish(mode, call, mode.fake_like(call.args[1]))


@rule("aten.cudnn_grid_sampler.default")
def grid_sampler(mode: OpRunner, call: OpCall) -> Any:
    """cuDNN's grid sampler: the input's channels at the grid's places (native/cudnn/GridSampler.cpp)."""
    source, grid = call.args
    shape = (*source.shape[:2], *grid.shape[1:3])
    return finish(mode, call, mode.fake_empty(shape, source.dtype, source.device))


@rule("aten.cudnn_grid_sampler_backward.default")
def grid_sampler_backward(mode: OpRunner, call: OpCall) -> Any:
    """The gradients of its input and its grid."""
    out = tuple(mode.fake_empty(tuple(t.shape), t.dtype, t.device) for t in call.args[:2])
    return finish(mode, call, out)


@rule("aten.multi_margin_loss.default")
def multi_margin_loss(mode: OpRunner, call: OpCall) -> Any:
    """One loss per sample, or one for all."""
    bound = call.by_name()
    source: torch.Tensor = bound["self"]
    each = bound.get("reduction", 1) == _NO_REDUCTION and source.dim() > 1
    out = mode.fake_empty((source.shape[0],) if each else (), source.dtype, source.device)
    return finish(mode, call, out)


@rule("aten.multilabel_margin_loss_forward.default")
def multilabel_margin_loss(mode: OpRunner, call: OpCall) -> Any:
    """The loss and a mask of the targets."""
    source, _, reduction = call.args
    each = reduction == _NO_REDUCTION and source.dim() > 1
    loss = mode.fake_empty((source.shape[0],) if each else (), source.dtype, source.device)
    return finish(mode, call, (loss, mode.fake_like(source)))


@rule("aten._nested_tensor_from_mask_left_aligned.default")
def left_aligned(mode: OpRunner, call: OpCall) -> bool:
    """Whether a padding mask is left-aligned: no, so that an encoder keeps to dense tensors."""
    mode.machine.warn(
        "nested-tensors-avoided",
        "an encoder's fast path would use nested tensors on a card; dense ones are counted, which need no less memory",
    )
    return False


@rule("aten._use_miopen_ctc_loss.default", "aten._use_miopen_ctc_loss.Tensor")
def use_miopen(mode: OpRunner, call: OpCall) -> bool:
    """MIOpen is AMD's: never on a CUDA card."""
    return False


@rule("aten._sparse_addmm.default", "aten.sparse_sampled_addmm.default")
def sparse_addmm(mode: OpRunner, call: OpCall) -> Any:
    """A dense matrix plus a sparse one times a dense one: shaped like the first."""
    if is_compressed_product(call.func, call.args):
        return multiply_compressed(mode, call)
    out = mode.fake_empty(tuple(call.args[0].shape), call.args[0].dtype, call.args[0].device)
    return finish(mode, call, out)


@rule("aten._ctc_loss.default", "aten._ctc_loss.Tensor")
def ctc_loss(mode: OpRunner, call: OpCall) -> Any:
    """One loss per sequence, and log alphas over time and the extended target (native/cuda/LossCTC.cu)."""
    log_probs, targets, _, target_lengths, *_ = call.args
    lengths = target_lengths
    if isinstance(lengths, torch.Tensor):
        known = mode.shadows.view(lengths) if isinstance(lengths, FakeTensor) else lengths
        longest = int(known.max()) if known is not None and known.numel() else int(targets.shape[-1])
    else:
        longest = max(lengths, default=0)
    steps, batch = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    losses = mode.fake_empty((batch,), log_probs.dtype, log_probs.device)
    alphas = mode.fake_empty((batch, steps, 2 * longest + 1), log_probs.dtype, log_probs.device)
    return finish(mode, call, (losses, alphas))


@rule("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor")
def ctc_loss_backward(mode: OpRunner, call: OpCall) -> Any:
    """A contiguous gradient of the log probabilities (native/cuda/LossCTC.cu)."""
    log_probs = call.args[1]
    return finish(mode, call, mode.fake_empty(tuple(log_probs.shape), log_probs.dtype, log_probs.device))


@rule("aten._cudnn_ctc_loss.default", "aten._cudnn_ctc_loss.Tensor")
def cudnn_ctc_loss(mode: OpRunner, call: OpCall) -> Any:
    """One loss per sequence, and their gradient at once (native/cudnn/LossCTC.cpp ``_cudnn_ctc_loss``)."""
    log_probs = call.args[0]
    losses = mode.fake_empty((log_probs.shape[1],), log_probs.dtype, log_probs.device)
    gradient = mode.fake_empty(tuple(log_probs.shape), log_probs.dtype, log_probs.device)
    return finish(mode, call, (losses, gradient))


def _column_major(mode: OpRunner, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A matrix, or a batch of them, as LAPACK and cuSOLVER want it."""
    return mode.fake_empty((*shape[:-2], shape[-1], shape[-2]), like.dtype, like.device).mT


@rule("aten.geqrf.default")
def geqrf(mode: OpRunner, call: OpCall) -> Any:
    """Householder reflectors below R, and their factors (native/BatchLinearAlgebra.cpp ``geqrf``)."""
    source: torch.Tensor = call.args[0]
    shape = tuple(source.shape)
    factors = mode.fake_empty((*shape[:-2], min(shape[-2:])), source.dtype, source.device)
    return finish(mode, call, (_column_major(mode, shape, source), factors))


@rule("aten.ormqr.default")
def ormqr(mode: OpRunner, call: OpCall) -> Any:
    """A matrix times an orthogonal one: shaped like the matrix (native/BatchLinearAlgebra.cpp ``ormqr``)."""
    other: torch.Tensor = call.args[2]
    return finish(mode, call, _column_major(mode, tuple(other.shape), other))


@rule("aten.linalg_lstsq.default")
def lstsq(mode: OpRunner, call: OpCall) -> Any:
    """Least squares on a card (driver ``gels``): solution and residuals, no rank and no singular values.

    As native/BatchLinearAlgebra.cpp ``linalg_lstsq_out_info`` does it, the solution is cut from the right-hand side's
    copy and keeps its storage; a copy of the matrix lives meanwhile, and for residuals their unsummed form.
    """
    left, right = call.args[:2]
    rows, columns = left.shape[-2:]
    vector = right.dim() == 1 or right.shape == left.shape[:-1]
    count = 1 if vector else right.shape[-1]
    batch = tuple(left.shape[:-2])
    whole = mode.fake_empty((*batch, count, max(rows, columns)), right.dtype, right.device)
    real = left.real.dtype if left.is_complex() else left.dtype
    residuals = mode.fake_empty((*batch, count) if rows > columns else (0,), real, left.device)
    rest = (mode.fake_empty((0,), torch.int64, left.device), mode.fake_empty((0,), real, left.device))
    name, device = call.info.name, left.device.index or 0
    sizes = [left.nbytes, right.nbytes if rows > columns else 0]
    held = mode.meter.temporary([size for size in sizes if size], device, name)
    mode.settle(call, (whole, residuals, *rest))
    mode.meter.give_back(held, device)
    for tensor in (whole, residuals):
        mode.shadows.forget(tensor)  # the host's default driver answers in another form
    solution = torch.ops.aten.slice.Tensor(whole, -1, 0, columns).mT
    return (solution.squeeze(-1) if vector else solution, residuals, *rest)


# -- cuDNN's recurrent op and its backward -------------------------------------------------------------------


@rule("aten._cudnn_rnn_backward.default")
def cudnn_rnn_backward(mode: OpRunner, call: OpCall) -> Any:
    """Gradients shaped like the inputs; the weights' gradients are views of one buffer, as in cudnn/RNN.cpp."""
    bound = call.by_name()
    wanted = bound["output_mask"]
    data, hx, cx, weights, buffer = (bound[k] for k in ("input", "hx", "cx", "weight", "weight_buf"))
    grad_input = mode.fake_like(data) if wanted[0] else None
    grad_hx = mode.fake_like(hx) if wanted[1] else None
    grad_cx = mode.fake_like(cx) if wanted[2] and cx is not None else None
    grads: list[torch.Tensor] = []
    flat = None
    if wanted[3]:
        count = buffer.numel() if buffer is not None and buffer.numel() else sum(w.numel() for w in weights)
        flat = mode.fake_empty((count,), weights[0].dtype, data.device)
    out = (grad_input, grad_hx, grad_cx, flat)
    mode.settle(call, out)
    if flat is not None:
        offset = 0
        for weight in weights:
            piece = torch.ops.aten.slice.Tensor(flat, 0, offset, offset + weight.numel())
            grads.append(torch.ops.aten.view.default(piece, list(weight.shape)))
            offset += weight.numel()
    return (grad_input, grad_hx, grad_cx, grads)


@rule("aten._thnn_fused_gru_cell.default")
def gru_cell(mode: OpRunner, call: OpCall) -> Any:
    """The new state, and a workspace for backward (native/cuda/RNN.cu, GRU_WORKSPACE_MULTIPLIER)."""
    hx: torch.Tensor = call.args[2]
    out = (mode.fake_like(hx), mode.fake_empty((hx.shape[0], 5 * hx.shape[1]), hx.dtype, hx.device))
    return finish(mode, call, out)


@rule("aten._thnn_fused_gru_cell_backward.default")
def gru_cell_backward(mode: OpRunner, call: OpCall) -> Any:
    """Gradients of both gate products, of the state, and of the biases (native/cuda/RNN.cu)."""
    grad, workspace, has_bias = call.args
    batch, size = workspace.shape[0], workspace.shape[1] // 5

    def empty(*shape: int) -> torch.Tensor:
        return mode.fake_empty(shape, workspace.dtype, workspace.device)

    biases = (empty(3 * size), empty(3 * size)) if has_bias else (None, None)
    return finish(mode, call, (empty(batch, 3 * size), empty(batch, 3 * size), mode.fake_like(grad), *biases))


# -- In-place random ops: FakeTensorMode's decompositions want a CUDA generator that does not exist here -----


@rule(
    "aten.uniform_.default",
    "aten.normal_.default",
    "aten.bernoulli_.float",
    "aten.bernoulli_.Tensor",
    "aten.random_.default",
    "aten.random_.from",
    "aten.random_.to",
    "aten.exponential_.default",
    "aten.cauchy_.default",
    "aten.geometric_.default",
    "aten.log_normal_.default",
)
def fill_random_(mode: OpRunner, call: OpCall) -> Any:
    """Fill in place: the tensor itself comes back, and its shadow is drawn from a generator of our own."""
    mode.settle(call, call.args[0])
    return call.args[0]
