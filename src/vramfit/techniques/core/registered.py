"""All techniques, by name."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from typing import Any

from vramfit.errors import UsageError
from vramfit.techniques.core.technique import Technique

# Module and class of each, in the order in which tables show them.
_HOMES: tuple[tuple[str, str], ...] = (
    ("mixed_precision", "MixedPrecision"),
    ("low_precision_training", "LowPrecisionTraining"),
    ("tf32", "Tf32"),
    ("in_place_activations", "InPlaceActivations"),
    ("micro_batching", "MicroBatching"),
    ("gradient_caching", "GradientCaching"),
    ("chunked_loss", "ChunkedLoss"),
    ("allocator_settings", "AllocatorSettings"),
    ("activation_checkpointing", "ActivationCheckpointing"),
    ("activation_offload", "ActivationOffload"),
    ("activation_compression", "ActivationCompression"),
    ("parameter_offload", "ParameterOffload"),
    ("fused_norms", "FusedNorms"),
    ("parameter_sharing", "ParameterSharing"),
    ("early_release", "EarlyRelease"),
    ("channels_last", "ChannelsLast"),
    ("attention_backend", "AttentionBackend"),
    ("optimizer_kernel", "OptimizerKernel"),
    ("step_in_backward", "StepInBackward"),
    ("low_bit_optimizer", "LowBitOptimizer"),
    ("optimizer_offload", "OptimizerOffload"),
    ("lean_optimizer", "LeanOptimizer"),
    ("gradient_projection", "GradientProjection"),
    ("compiled", "Compile"),
)


@cache
def all_techniques() -> tuple[Technique[Any], ...]:
    """One of each, in the order in which tables show them."""
    made = (getattr(import_module(f"vramfit.techniques.{module}"), kind)() for module, kind in _HOMES)
    return tuple(made)


def find_technique(name: str) -> Technique[Any]:
    """The technique of that name.

    Raises:
        UsageError: there is none.
    """
    known = {technique.name: technique for technique in all_techniques()}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}"
    raise UsageError(f"there is no technique {name!r}", hint)
