"""What a walk looks at: all that a whole step moves, or what a forward pass writes beside gradients."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.training_state.program_code import is_installed, root_of

_LOOPS = frozenset({"transformers", "accelerate", "lightning", "pytorch_lightning", "vramfit", "logging"})
"""Libraries whose objects (a Trainer, an Accelerator) are loops and not what a step moves, but for modules of torch."""

_LIBRARIES = _LOOPS | {"torch", "numpy", "diffusers", "timm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scope:
    """What a walk looks at.

    Attributes:
        trains: parameters that are trained, gradients, what hangs on tensors, and hooks on modules too: a forward pass
            writes none of them, and a note would hold what hooks have kept of the last pass.
        layers: attributes of torch's own layers too. A note of them holds what they keep from pass to pass, e.g. the
            normalised weight of ``weight_norm``.
        installed: whether the code of installed packages is read, but for `_LIBRARIES` and Python's own.
        foreign: packages of whose objects the attributes are not looked at, but for modules of torch.
        most: objects that are looked at.
        near: entries of a container from which on what they hold is data, and no state.
        far: whether what longer containers hold is looked at all the same, apart from the rest.
        largest: values of a tensor, or bytes of an array, outside of modules from which on it is data.
    """

    trains: bool
    layers: bool
    installed: bool
    foreign: frozenset[str]
    most: int
    near: int
    far: bool
    largest: int = sys.maxsize

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is looked at."""
        return self.trains or not (isinstance(tensor, nn.Parameter) and tensor.requires_grad)

    def reads(self, module: str | None) -> bool:
        """Whether the code of a module is read."""
        root = root_of(module)
        if self.installed:
            return root not in _LIBRARIES and root not in sys.stdlib_module_names
        return not is_installed(root)

    def enters(self, value: Any) -> bool:
        """Whether an object's attributes are looked at."""
        return root_of(type(value).__module__) not in self.foreign or (
            self.trains and isinstance(value, torch.optim.Optimizer)
        )


STEP = Scope(trains=True, layers=False, installed=False, foreign=_LOOPS, most=100_000, near=10_000, far=True)
"""What a whole step moves. It is noted before every step: of very long containers what they hold is looked at now and
then only."""

FORWARD = Scope(
    trains=False,
    layers=True,
    installed=True,
    foreign=_LIBRARIES,
    most=sys.maxsize,
    near=100_000,
    far=False,
    largest=1 << 24,
)
"""What a forward pass writes beside gradients."""
