"""Settings of torch's caching allocator, as the plan found them to be best."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from vramfit.allocator import AllocatorConfig
from vramfit.allocator.versions import ALLOC_CONF_VARIABLES, parse_torch_version
from vramfit.errors import ConfigError, UsageError
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Setting, Technique
from vramfit.torch_internals import cuda_memory
from vramfit.units import MIB

# Given anew, settings that are not named keep their value, but for four (c10/core/AllocatorConfig.cpp, parseArgs).
_STAYING = {
    "expandable_segments": "expandable_segments:False",
    "large_segment_size": "large_segment_size_mb:20",
    "per_process_memory_fraction": "per_process_memory_fraction:1.0",
    "throw_on_cudamalloc_oom": "throw_on_cudamalloc_oom:False",
    "graph_capture_record_stream_reuse": "graph_capture_record_stream_reuse:False",
    "release_lock_on_cudamalloc": "release_lock_on_cudamalloc:False",
    "pinned_use_cuda_host_register": "pinned_use_cuda_host_register:False",
    "pinned_num_register_threads": "pinned_num_register_threads:1",
    "pinned_use_background_threads": "pinned_use_background_threads:False",
    "pinned_free_catch_all": "pinned_free_catch_all:False",
}
_LEAST_GAP_BYTES = 20 * MIB
_LEAST_GAP_SHARE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSetting(Setting):
    """Settings of the allocator.

    Attributes:
        conf: as in ``PYTORCH_ALLOC_CONF``: ``expandable_segments:True``.
    """

    conf: str


class AllocatorSettings(Technique[AllocatorSetting]):
    """The caching allocator is given other settings, so that it reserves less for the same tensors.

    They decide how far what is reserved lies above what is allocated. Expandable segments close most of that gap at no
    cost in time where the driver has virtual memory (CUDA on Linux); the other settings help where they are not to be
    had, and can cost time for releasing and asking anew. Nothing is gained where the two figures are equal, and
    nothing on the CPU, where they have no effect. ``vramfit tune`` searches finer ones for a recorded run.

    The settings are given to this process's allocator and to its environment, for processes that it starts. Segments
    that are there already stay as they are: apply the plan before the model is moved to the card. Another ``backend``
    is chosen when torch is imported; it has to be exported before.
    """

    name: ClassVar[str] = "allocator-settings"
    summary: ClassVar[str] = "other settings of torch's caching allocator, against fragmentation"
    numerics: ClassVar[Numerics] = Numerics.BITWISE
    phase: ClassVar[AttachStage] = AttachStage.MODEL
    setting_type = AllocatorSetting
    follows: ClassVar[str | None] = "chunked-loss"

    def options(self, profile: Profile) -> Iterable[AllocatorSetting]:
        """Coarse ones, where more than 20 MiB and 2 % of what is reserved at the peak lies idle on a card."""
        idle = profile.peak_reserved_bytes - profile.peak_allocated_bytes
        least = max(_LEAST_GAP_BYTES, _LEAST_GAP_SHARE * profile.peak_reserved_bytes)
        if profile.device_type != "cuda" or idle <= least:
            return
        yield AllocatorSetting(conf="expandable_segments:True")
        yield AllocatorSetting(conf="max_split_size_mb:512")
        yield AllocatorSetting(conf="max_split_size_mb:128")
        yield AllocatorSetting(conf="roundup_power2_divisions:8")

    def attach(self, live: AttachedProgram, setting: AllocatorSetting) -> None:
        """Give the settings to the allocator; nothing happens for a model on the CPU.

        Raises:
            UsageError: torch does not read them, or cannot change them in a running process.
        """
        version = parse_torch_version(torch.__version__)
        wanted = AllocatorConfig.parse(setting.conf, torch_version=version)
        if live.device.type != "cuda":
            return
        variable = ALLOC_CONF_VARIABLES[0]
        before = cuda_memory.settings()
        try:
            cuda_memory.set_settings(setting.conf)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"torch cannot take {setting.conf} in a running process ({_first_line(error)})",
                f"Export it before the program starts: export {variable}={setting.conf}",
            ) from error
        plain = AllocatorConfig()
        back = [text for name, text in _STAYING.items() if getattr(wanted, name) != getattr(plain, name)]
        live.on_undo(lambda: cuda_memory.set_settings(",".join((*back, before) if before else back)))
        _export(live, variable, setting.conf)


def _export(live: AttachedProgram, variable: str, conf: str) -> None:
    """Set a variable of the environment until the undo."""
    before = os.environ.get(variable)
    os.environ[variable] = conf

    def undo() -> None:
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before

    live.on_undo(undo)


def _first_line(error: Exception) -> str:
    message = error.message if isinstance(error, ConfigError) else str(error)
    return message.strip().splitlines()[0]
