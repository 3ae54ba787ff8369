"""Where the allocators of torch 2.10, 2.11, 2.12, 2.13 and newer differ, in one place.

Everything not named here is the same in all of them. The facts come from c10/core/AllocatorConfig.{h,cpp},
c10/cuda/CUDAAllocatorConfig.{h,cpp}, c10/core/CachingDeviceAllocator.h and c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TorchVersion = tuple[int, int]

REFERENCE_VERSION: TorchVersion = (2, 13)
"""The version that vramfit is developed on."""

ALLOC_CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with allocator settings, the winning one first: the same in all releases.

Source: ``CUDAAllocatorConfig::instance`` (c10/cuda/CUDAAllocatorConfig.h); tried on the wheels of 2.10 to 2.15, with an
unknown setting in one variable or the other.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRules:
    """What one torch version does that another does not."""

    large_segment_size_option: bool
    """``large_segment_size_mb`` is a setting."""

    throw_on_oom_option: bool
    """``throw_on_cudamalloc_oom`` is a setting, and ``num_oom_rejections`` a statistic."""

    private_pool_stats: bool
    """``reserved_bytes_by_private_pools`` is among the statistics."""

    pools_release_cache: bool
    """A request in a pool of the user's may have cached memory released, as one outside may; in a capture none may.

    Source: ``is_capture_context`` of 2.13, ``captures_underway.empty()`` before (``malloc``).
    """

    pinned_round_options: bool
    """``pinned_max_round_threshold_mb`` and ``pinned_max_cached_size_mb`` are settings."""


def parse_torch_version(text: str) -> TorchVersion:
    """Major and minor number of a version such as ``2.13.0+cpu``.

    Raises:
        ValueError: the text does not begin with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a torch version")
    return int(match.group(1)), int(match.group(2))


def rules_for(version: TorchVersion) -> VersionRules:
    """The rules of a torch version; versions newer than known follow the newest known."""
    return VersionRules(
        large_segment_size_option=version >= (2, 11),
        throw_on_oom_option=version >= (2, 12),
        private_pool_stats=version >= (2, 13),
        pools_release_cache=version >= (2, 13),
        pinned_round_options=version >= (2, 13),
    )


def alloc_conf_from_env(environ: Mapping[str, str]) -> str:
    """The allocator settings that torch takes from the environment; empty when none are set.

    The first variable that exists decides alone, even when it is empty: settings are never merged. A comment in
    c10/core/AllocatorConfig.h says that the general name goes first, and it does not.
    """
    for name in ALLOC_CONF_VARIABLES:
        if name in environ:
            return environ[name]
    return ""
