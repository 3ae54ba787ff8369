"""``one_hot`` on the card: zeros, then a scatter. Tensor subclasses are given another form (ATen/native/Onehot.cpp)."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Take the form that a card takes, whose temporaries differ."""
    original = torch.nn.functional.one_hot

    def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        # Empty tensors and wrong types are left to torch, with its errors.
        known = type(tensor) is FakeTensor and tensor.dtype is torch.int64 and tensor.numel() > 0
        if not known or tensor.device.type != "cuda":
            return original(tensor, num_classes)
        if num_classes == -1:
            num_classes = int(tensor.max().item()) + 1
        if num_classes < 1:
            return original(tensor, num_classes)
        out = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
        return out.scatter_(-1, tensor.unsqueeze(-1), 1)

    patches.set(torch.nn.functional, "one_hot", one_hot)
    patches.set(torch._C._nn, "one_hot", one_hot)
