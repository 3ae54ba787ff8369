"""``torch.optim``: foreach functions, and which tensors take them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from vramfit.torch_internals.names import Feature

_CALIBRATION = Feature("calibrating foreach functions")
_MASTERS = Feature("optimizer steps in float32")
_FEATURE = Feature("following optimizers")

foreach_add: Any = _CALIBRATION.find("torch._foreach_add")
foreach_copy_: Any = _MASTERS.find("torch._foreach_copy_")
foreach_lerp_: Any = _CALIBRATION.find("torch._foreach_lerp_")
foreach_norm: Any = _CALIBRATION.find("torch._foreach_norm")
foreach_types: Any = _FEATURE.find("torch.optim.optimizer._foreach_supported_types")
foreach_utility_types: Any = _FEATURE.find("torch.utils._foreach_utils._foreach_supported_types")
unscale_foreach_: Any = _CALIBRATION.find("torch._amp_foreach_non_finite_check_and_unscale_")

SCALES_ITSELF = "_step_supports_amp_scaling"
"""Attribute of an optimizer whose step divides gradients by a scaler's scale (torch/amp/grad_scaler.py, ``step``)."""


class OwnStepHooks:
    """The step hooks of an optimizer, called around a step that another takes in its place.

    As ``Optimizer.profile_hook_step`` (torch/optim/optimizer.py) calls them; those of all optimizers are not called.

    Attributes:
        called: whether they are called from here now, and not by a step of the optimizer itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.called = False

    def around(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take a step."""
        optimizer = self._optimizer
        self.called = True
        try:
            for before in list(optimizer._optimizer_step_pre_hooks.values()):
                changed = before(optimizer, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            result = step(*args, **kwargs)
            for after in list(optimizer._optimizer_step_post_hooks.values()):
                after(optimizer, args, kwargs)
        finally:
            self.called = False
        return result


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note on an optimizer that it has stepped, as a learning-rate schedule wants to know.

    The schedule puts ``_opt_called`` on it, and warns where it is not there (torch/optim/lr_scheduler.py).
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def make_states(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Let one of torch's optimizers make the states that a group's parameters lack, as its step does first.

    ``Optimizer._init_group`` (torch/optim) takes the group and lists that it fills.

    Returns:
        whether this release has it; nothing was done if not.
    """
    make = getattr(optimizer, "_init_group", None)
    if make is None:
        return False
    lists: list[list[Any]] = [[] for _ in range(len(inspect.signature(make).parameters) - 1)]
    make(group, *lists)
    return True
