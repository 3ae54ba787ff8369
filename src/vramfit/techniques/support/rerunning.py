"""Whether a module's forward pass can run a second time and give the same."""

from __future__ import annotations

import torch
from torch import nn

from vramfit.techniques.core.surround import plain_class


def reason_against_rerun(module: nn.Module) -> str | None:
    """Why a module's forward pass must not run a second time; None where nothing is seen that speaks against it."""
    first = _first_layer(module)
    if getattr(first, "inplace", False) is True:
        return f"its first layer, {plain_class(first).__name__}, changes the block's input in place"
    for path, inner in module.named_modules():
        reason = _reason_of_one(inner)
        if reason is not None:
            return f"{path or plain_class(inner).__name__} {reason}"
    return None


def _reason_of_one(module: nn.Module) -> str | None:
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted"
    if isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1:
        return "draws dropout from cuDNN's own random state, which cannot be restored"
    kind = plain_class(module)
    hooks = (*module._forward_pre_hooks.values(), module)
    if any(type(hook).__name__ in ("SpectralNorm", "_SpectralNorm") for hook in hooks):
        return "changes its buffers in each forward pass (spectral norm)"
    if kind.__module__.startswith(("torch.ao.quantization", "torch.quantization")):
        return "observes values in each forward pass (quantization)"
    if kind.__name__ == "CheckpointWrapper":
        return "is checkpointed already"
    for flag in ("gradient_checkpointing", "use_checkpoint"):
        if getattr(module, flag, False) is True:
            return f"is checkpointed already ({flag} is set)"
    return None


def _first_layer(module: nn.Module) -> nn.Module:
    while plain_class(module).forward is nn.Sequential.forward:
        first = next(module.children(), None)
        if first is None:
            return module
        module = first
    return module
