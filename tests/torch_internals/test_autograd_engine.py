"""Hooks of saved tensors beside selective checkpoints of the program."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from vramfit.torch_internals.autograd_engine import leave_checkpoints_alone


def keep_all(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def gradient(packed: list[torch.Size], *, alone: bool) -> torch.Tensor:
    """A gradient through a checkpoint that keeps results, inside of hooks that note what they pack."""
    x = torch.ones(3, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    if alone:
        leave_checkpoints_alone(pack)
    contexts = partial(create_selective_checkpoint_contexts, keep_all)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        checkpoint(lambda x: x.sin().exp(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert x.grad is not None
    return x.grad


def test_a_checkpoint_of_the_program_does_not_take_our_hooks_for_the_users() -> None:
    packed: list[torch.Size] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient(packed, alone=True)
    x = torch.ones(3)
    torch.testing.assert_close(found, x.cos() * x.sin().exp())


def test_torch_warns_of_hooks_that_are_the_users() -> None:
    if not hasattr(torch.utils.checkpoint, "_current_user_saved_tensors_hooks"):
        pytest.skip("torch looks for hooks around selective checkpoints from 2.14 on")
    with pytest.warns(FutureWarning, match="saved_tensors_hooks"):
        gradient([], alone=False)
