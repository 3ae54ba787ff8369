"""Connectionist temporal classification: lengths on the card, log betas in backward, cuDNN's workspace.

aten/src/ATen/native/cuda/LossCTC.cu (``ctc_loss_gpu_template``, ``ctc_loss_backward_gpu_template``) and
native/cudnn/LossCTC.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.kernels.rules import Rule, Scratch, after_outputs, around_outputs, nbytes, table
from vramfit.virtual.op_call import OpCall


def _lengths(scratch: Scratch, lengths: Any) -> None:
    """Offsets of the targets, and both lists of lengths where the program gave numbers, as int64."""
    batch = len(lengths)
    given = isinstance(lengths, torch.Tensor) and lengths.device.type == "cuda"
    for _ in range(1 if given else 3):
        scratch.take(batch * 8)


@after_outputs
def _forward(call: OpCall, scratch: Scratch) -> None:
    """``_ctc_loss``: its log alphas are an output."""
    _lengths(scratch, call.args[2])


@around_outputs
def _backward(call: OpCall, before: Scratch, after: Scratch) -> None:
    """``_ctc_loss_backward``: log betas as large as the log alphas, before the gradient."""
    before.take(nbytes(call.args[6]))
    _lengths(after, call.args[3])


@after_outputs
def _cudnn(call: OpCall, scratch: Scratch) -> None:
    """``_cudnn_ctc_loss``: its workspace is estimated as alphas and betas of the extended targets in float32."""
    log_probs, lengths = call.args[0], call.args[3]
    longest = 0
    if not isinstance(lengths, torch.Tensor):
        longest = max(lengths, default=0)
    elif call.args[1].dim() == 1 and len(lengths):
        longest = call.args[1].shape[0] // len(lengths)
    states = log_probs.shape[0] * len(lengths) * (2 * longest + 1) * 4
    scratch.take(2 * states)
    scratch.doubt((2 * states + 4096, 2 * states))


RULES: dict[OpOverload, Rule] = table(
    {
        ("_ctc_loss", "_ctc_loss.Tensor"): _forward,
        ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"): _backward,
        ("_cudnn_ctc_loss", "_cudnn_ctc_loss.Tensor"): _cudnn,
    }
)
