"""Allocator settings in snapshots and traces: the string that was set, or one made from the values in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vramfit.allocator import AllocatorConfig, parse_torch_version
from vramfit.allocator.versions import REFERENCE_VERSION, TorchVersion
from vramfit.errors import ConfigError
from vramfit.trace.model import MemoryTrace
from vramfit.units import MIB

_CONF_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

CONF_FROM = "alloc_conf_from"
"""Key of a trace's ``meta``: where the settings came from, an environment variable or `GIVEN_BY_OPTION`."""

GIVEN_BY_OPTION = "--alloc-conf"
"""The settings were given to vramfit, and no variable was read."""


def conf_from_settings(settings: Mapping[str, Any]) -> str:
    """The settings string of a snapshot's ``allocator_settings``.

    Where torch's string is empty although settings are in force (they can be set from Python), one is made
    from the values.
    """
    for key in _CONF_KEYS:
        if isinstance(settings.get(key), str) and settings[key]:
            return str(settings[key])
    parts = []
    if _positive(settings.get("max_split_size")):
        parts.append(f"max_split_size_mb:{settings['max_split_size'] // MIB}")
    if _positive(settings.get("garbage_collection_threshold")):
        parts.append(f"garbage_collection_threshold:{settings['garbage_collection_threshold']}")
    if settings.get("expandable_segments") is True:
        parts.append("expandable_segments:True")
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and any(_positive(value) for value in divisions.values()):
        pairs = [f"{key}:{value}" for key, value in divisions.items() if _positive(value)]
        parts.append(f"roundup_power2_divisions:[{','.join(pairs)}]")
    return ",".join(parts)


def settings_from_conf(conf: str) -> dict[str, Any]:
    """``allocator_settings`` as torch's snapshots have them, for a settings string.

    Raises:
        ConfigError: the string cannot be read.
    """
    config = AllocatorConfig.parse(conf)
    return {
        "PYTORCH_ALLOC_CONF": conf,
        "max_split_size": -1 if config.max_split_size is None else config.max_split_size,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": config.pinned_num_register_threads,
        "release_lock_on_cudamalloc": config.release_lock_on_cudamalloc,
        "pinned_use_cuda_host_register": config.pinned_use_cuda_host_register,
        "roundup_power2_divisions": {
            str(1 << power): value for power, value in enumerate(config.roundup_power2_divisions)
        },
    }


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def recorded_version(trace: MemoryTrace) -> TorchVersion:
    """The torch version of a trace; the reference version if it does not say."""
    try:
        return parse_torch_version(str(trace.meta.get("torch_version", "")))
    except ValueError:
        return REFERENCE_VERSION


def recorded_config(trace: MemoryTrace) -> AllocatorConfig:
    """The allocator settings a trace was recorded with; unknown settings are ignored."""
    text = str(trace.meta.get("alloc_conf", ""))
    version = recorded_version(trace)
    try:
        return AllocatorConfig.parse(text, torch_version=version)
    except ConfigError:
        kept = [part for part in _split_settings(text) if _is_known(part, version)]
        return AllocatorConfig.parse(",".join(kept), torch_version=version)


def _split_settings(text: str) -> list[str]:
    """Settings between the commas that are not in brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _is_known(setting: str, version: TorchVersion) -> bool:
    try:
        AllocatorConfig.parse(setting, torch_version=version)
    except ConfigError:
        return False
    return True
