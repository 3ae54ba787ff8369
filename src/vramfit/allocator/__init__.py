"""An exact replica of PyTorch's CUDA caching allocator, in pure Python and without torch."""

from vramfit.allocator.caching import CachingAllocator
from vramfit.allocator.config import AllocatorConfig
from vramfit.allocator.core import AllocatorEventKind, EventCallback
from vramfit.allocator.driver import Driver
from vramfit.allocator.release import OutOfMemory
from vramfit.allocator.versions import alloc_conf_from_env, parse_torch_version

__all__ = [
    "AllocatorConfig",
    "AllocatorEventKind",
    "CachingAllocator",
    "Driver",
    "EventCallback",
    "OutOfMemory",
    "alloc_conf_from_env",
    "parse_torch_version",
]
