"""What a step that may be called again cannot go with, said in one line before the training."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.training_state.reach import reached_from

_COLLECTIVES = frozenset(
    {
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
        "barrier", "broadcast_object_list", "gather_object", "monitored_barrier", "reduce_scatter",
        "reduce_scatter_tensor", "scatter_object_list", "all_gather_tensor", "gather_for_metrics",
    }
)  # fmt: skip
"""Functions of torch.distributed whose names nothing else has."""


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make sure that an optimizer's step can be taken without a closure.

    Raises:
        UsageError: it wants one.
    """
    if _wants_arguments(
        functools.partial(type(optimizer).step, optimizer)
    ):  # a schedule wraps the instance's own
        raise UsageError(
            f"{type(optimizer).__name__} wants a closure that goes forward and backward inside of its step: there is "
            "no moment at which the step is certain",
            "Train without survive, or with another optimizer",
        )


def check_scheduler(scheduler: Any) -> None:
    """Make sure that a schedule steps by itself.

    Raises:
        UsageError: it wants a metric, or it is no schedule.
    """
    step = getattr(scheduler, "step", None)
    if not callable(step):
        raise UsageError(
            f"scheduler={type(scheduler).__name__} has no step", "Pass a learning-rate schedule of torch"
        )
    inner = getattr(scheduler, "scheduler", scheduler)  # of Accelerate's wrapper
    if _wants_arguments(getattr(inner, "step", step)):
        raise UsageError(
            f"{type(inner).__name__} steps by a metric, which survive does not know",
            "Leave scheduler out, and call its step with the metric after survivor.step",
        )


def check_collectives(model: nn.Module, roots: Iterable[Any]) -> None:
    """Make sure that no rank waits inside of a pass for another that begins anew.

    Raises:
        UsageError: a pass has collectives of its own.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"{name} is a SyncBatchNorm, which waits for the other ranks inside of the forward pass: one that runs "
                "out of memory would leave them waiting",
                "Use batch norm of each rank, or train without survive",
            )
    named = sorted(reached_from([model, *roots]).code_names & _COLLECTIVES)
    if named:
        raise UsageError(
            f"the step calls {named[0]} itself: a rank that runs out of memory and begins anew would call it twice",
            "Call it after survivor.step, on what the step gave",
        )


def _wants_arguments(function: Any) -> bool:
    """Whether a function cannot be called without arguments."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    placed = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return any(one.kind in placed and one.default is one.empty for one in parameters)
