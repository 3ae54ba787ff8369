"""State that a program names itself: what the walk cannot see, or cannot set back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.arguments import shown
from vramfit.errors import UsageError


class DeclaredState:
    """What ``state=[...]`` names.

    Args:
        given: objects with ``state_dict`` and ``load_state_dict``; modules, optimizers, tensors, generators,
            containers and objects, all of whose tensors are copied before each step.

    Attributes:
        walked: what is followed and noted like what the step's function reaches.

    Raises:
        UsageError: one is an iterator, which cannot be set back.
    """

    def __init__(self, given: Sequence[Any]) -> None:
        self._by_dict: list[Any] = []
        self.walked: list[Any] = []
        for one in given:
            stateful = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
            if stateful and not isinstance(one, nn.Module | torch.optim.Optimizer):
                self._by_dict.append(one)
            elif hasattr(one, "__next__"):
                raise UsageError(
                    f"state has {shown(one)}, an iterator, which cannot be set back",
                    "Draw from it before the step and pass what it gave, or give it state_dict and load_state_dict",
                )
            else:
                self.walked.append(one)

    @property
    def apart(self) -> Iterable[Any]:
        """What has ``state_dict``, and is neither followed nor looked at."""
        return self._by_dict

    def noted(self) -> list[tuple[Any, Any]]:
        """A copy of each ``state_dict``."""
        return [(one, copy.deepcopy(one.state_dict())) for one in self._by_dict]

    @staticmethod
    def restore(noted: list[tuple[Any, Any]]) -> None:
        """Load what was noted."""
        for one, state in noted:
            one.load_state_dict(copy.deepcopy(state))
