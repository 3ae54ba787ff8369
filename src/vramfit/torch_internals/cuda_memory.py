"""The caching allocator of a real card: its history, statistics and settings, as ``torch.cuda.memory`` keeps them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

_C: Any = torch._C


def record_history(enabled: str | None, **options: Any) -> None:
    """Begin or end torch's memory history: ``torch.cuda.memory._record_memory_history``."""
    record: Any = torch.cuda.memory._record_memory_history
    record(enabled, **options)


def snapshot() -> dict[str, Any]:
    """What the allocators hold, with their history: ``torch.cuda.memory._snapshot``."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def pool_snapshot(selection: tuple[Any, ...]) -> dict[str, Any]:
    """The part of a snapshot that a pool's numbers choose: ``torch._C._cuda_memorySnapshot``."""
    found: dict[str, Any] = _C._cuda_memorySnapshot(selection)
    return found


def is_recording() -> bool:
    """Whether the history is kept."""
    return bool(_C._cuda_isHistoryEnabled())


def metadata() -> str:
    """The note that each event of the history gets at present."""
    return str(_C._cuda_getMemoryMetadata())


def set_metadata(text: str) -> None:
    """Give each later event of the history a note."""
    _C._cuda_setMemoryMetadata(text)


def statistics(device: int) -> dict[str, Any]:
    """The allocator's nested counts of a device: ``torch._C._cuda_memoryStats``."""
    found: dict[str, Any] = _C._cuda_memoryStats(device)
    return found


def observe_out_of_memory(observer: Callable[[int, int, int, int], None]) -> None:
    """Call a function with device, request, limit and free bytes before an allocator gives up; it cannot be undone."""
    _C._cuda_attach_out_of_memory_observer(observer)


def clear_cublas_workspaces() -> bool:
    """Let go of cuBLAS' workspaces; False on a build that has none."""
    clear = getattr(_C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return False
    clear()
    return True


def empty_host_cache() -> None:
    """Let go of the page-locked memory that torch keeps for later."""
    _C._host_emptyCache()


def settings() -> str:
    """The settings of the allocator, as text."""
    return str(_C._accelerator_getAllocatorSettings())


def set_settings(text: str) -> None:
    """Give the allocator other settings.

    Raises:
        RuntimeError, ValueError: it refuses them.
    """
    _C._accelerator_setAllocatorSettings(text)


def settings_setter() -> Callable[[str], None] | None:
    """What reads the allocator's settings and refuses wrong ones; None before torch 2.10 (torch/csrc/Module.cpp)."""
    setter: Callable[[str], None] | None = getattr(_C, "_accelerator_setAllocatorSettings", None)
    return setter


def unified_memory() -> Callable[[torch.device], AbstractContextManager[Any]] | None:
    """A block in which this thread allocates unified memory; None before torch 2.13 (torch/cuda/__init__.py)."""
    found: Callable[[torch.device], AbstractContextManager[Any]] | None = vars(torch.cuda).get("_use_uvm")
    return found
