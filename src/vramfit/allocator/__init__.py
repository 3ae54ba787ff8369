"""An exact replica of PyTorch's CUDA caching allocator, in pure Python and without torch."""

from vramfit.allocator.caching import CachingAllocator as CachingAllocator
from vramfit.allocator.config import AllocatorConfig as AllocatorConfig
from vramfit.allocator.core import AllocatorEventKind as AllocatorEventKind
from vramfit.allocator.core import EventCallback as EventCallback
from vramfit.allocator.driver import Driver as Driver
from vramfit.allocator.release import OutOfMemory as OutOfMemory
from vramfit.allocator.versions import alloc_conf_from_env as alloc_conf_from_env
from vramfit.allocator.versions import parse_torch_version as parse_torch_version
