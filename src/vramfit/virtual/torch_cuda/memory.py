"""Memory: statistics, the caching allocator's functions, snapshots, pinned memory."""

# ruff: noqa: ARG002  # the signatures are those of the C functions and classes

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.allocator import OutOfMemory
from vramfit.errors import ConfigError
from vramfit.patching import PatchStack
from vramfit.torch_internals.cuda_memory import unified_memory
from vramfit.trace.settings import settings_from_conf
from vramfit.virtual import simulated_streams as ids
from vramfit.virtual.machine import Machine, VirtualDevice
from vramfit.virtual.torch_cuda.base import CFunctions


class MemoryFunctions(CFunctions):
    """The functions of torch/csrc/cuda/Module.cpp and memory_snapshot.cpp that deal with memory."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.raw_owner: dict[int, VirtualDevice] = {}
        self.caching = True
        self.metadata = ""

    def used(self) -> list[VirtualDevice]:
        """The devices whose allocator has been used, with the blocks of dead tensors returned to them."""
        self.machine.collect()
        return [device for device in self.machine.devices if device.allocator_used]

    # Statistics

    def _cuda_memoryStats(self, device: int) -> dict[str, Any]:
        return self.device(device).allocator.memory_stats()

    def _cuda_resetAccumulatedMemoryStats(self, device: int) -> None:
        self.device(device).allocator.reset_accumulated_stats()

    def _cuda_resetPeakMemoryStats(self, device: int) -> None:
        self.device(device).allocator.reset_peak_stats()

    def _cuda_hostMemoryStats(self) -> dict[str, Any]:
        return self.machine.pinned.stats()

    def _cuda_resetAccumulatedHostMemoryStats(self) -> None:
        self.machine.pinned.reset_accumulated()

    def _cuda_resetPeakHostMemoryStats(self) -> None:
        self.machine.pinned.reset_peaks()

    # The allocator

    def _cuda_emptyCache(self) -> None:
        for device in self.used():
            device.allocator.empty_cache()

    def _host_emptyCache(self) -> None:
        self.machine.pinned.empty_cache()

    def _cuda_setMemoryFraction(self, fraction: float, device: int) -> None:
        self.device(device).allocator.set_memory_fraction(fraction)

    def _cuda_getMemoryFraction(self, device: int) -> float:
        return self.device(device).allocator.memory_fraction

    def _cuda_cudaCachingAllocator_raw_alloc(self, size: int, stream: int) -> int:
        device = self.device()
        number = ids.stream_of(stream, device.index)
        malloc = self.machine.hooks.malloc
        if malloc is not None:
            address = malloc(device.index, size, number)
        else:
            try:
                address = device.allocator.malloc(size, number)
            except OutOfMemory as error:
                raise torch.OutOfMemoryError(error.torch_message()) from error
        self.raw_owner[address] = device
        return address

    def _cuda_cudaCachingAllocator_raw_delete(self, address: int) -> None:
        device = self.raw_owner.pop(address, None)
        if device is None:
            raise RuntimeError(f"invalid device pointer: {address:#x}")
        if self.machine.hooks.free is not None:
            self.machine.hooks.free(device.index, address)
        else:
            device.allocator.free(address)

    def _cuda_cudaCachingAllocator_enable(self, value: bool) -> None:
        self.caching = value
        if not value:
            self.machine.warn(
                "caching-allocator-disabled",
                "The program switched the caching allocator off; the virtual GPU keeps caching",
            )

    def _cuda_cudaCachingAllocator_is_enabled(self) -> bool:
        return self.caching

    def _cuda_cudaCachingAllocator_set_allocator_settings(self, settings: str) -> None:
        self._accelerator_setAllocatorSettings(settings)

    def _accelerator_setAllocatorSettings(self, settings: str) -> None:
        before = self.machine.config
        try:
            config = before.updated(settings, torch_version=self.machine.torch_version)
        except ConfigError as error:
            raise RuntimeError(error.message) from error
        if config.backend != before.backend:  # c10/cuda/CUDAAllocatorConfig.cpp, parseBackend
            raise RuntimeError(
                "Allocator backend parsed at runtime != allocator backend parsed at load time, "
                f"{config.backend} != {before.backend}"
            )
        self.machine.set_config(config)

    def _accelerator_getAllocatorSettings(self) -> str:
        return self.machine.config.to_string()

    def _cuda_getAllocatorBackend(self) -> str:
        return str(self.machine.config.backend)

    def _cuda_cudaHostAllocator(self) -> int:
        return 0x5582_0000_0000  # an address that nobody reads

    def _cuda_getAllocator(self) -> object:
        return NativeAllocator()

    def _cuda_customAllocator(self, malloc: int, free: int) -> object:
        return NativeAllocator()

    def _cuda_changeCurrentAllocator(self, allocator: object) -> None:
        self.machine.warn(
            "pluggable-allocator",
            "The program brings its own allocator; the virtual GPU keeps torch's caching allocator",
        )

    # History and snapshots

    def _cuda_record_memory_history(
        self,
        enabled: str | None,
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = -1,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] = (),
        record_pinned_host_memory: bool = False,
        record_cuda: bool = True,
        *later: object,
    ) -> None:
        # From 2.14 on a history may be that of pinned memory, beside the card's or alone (memory_snapshot.cpp).
        if record_pinned_host_memory:
            self.machine.warn(
                "no-host-history", "The history of pinned host memory is not recorded on the virtual GPU"
            )
        if not record_cuda:
            return
        arguments: dict[str, Any] = {
            "enabled": enabled,
            "context": context,
            "stacks": stacks,
            "max_entries": max_entries,
            "clear_history": clear_history,
            "skip_actions": tuple(skip_actions),
        }
        self.machine.history = arguments if enabled else None
        if self.machine.hooks.on_record_history is not None:
            self.machine.hooks.on_record_history(arguments)

    def _cuda_record_memory_history_legacy(
        self,
        enabled: bool,
        record_context: bool = True,
        trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False,
        record_context_cpp: bool = False,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Sequence[str] = (),
        *later: Any,
    ) -> None:
        self._cuda_record_memory_history(
            "all" if enabled else None,
            "all" if record_context else None,
            "all" if record_context_cpp else "python",
            trace_alloc_max_entries,
            clear_history,
            compile_context,
            global_record_annotations,
            skip_actions,
            *later,
        )

    def _cuda_isHistoryEnabled(self) -> bool:
        return self.machine.history is not None

    def _cuda_memorySnapshot(self, pool: Sequence[Any] | None = None) -> dict[str, Any]:
        provider = self.machine.hooks.snapshot_provider
        snapshot = self.plain_snapshot() if provider is None else provider()
        if pool is None:
            return snapshot
        wanted = tuple(pool[:2])
        if wanted != (0, 0):
            segments = [s for s in snapshot["segments"] if tuple(s.get("segment_pool_id", (0, 0))) == wanted]
            snapshot = {**snapshot, "segments": segments}
        if len(pool) > 2 and not pool[2]:
            snapshot = {**snapshot, "device_traces": [[] for _ in self.machine.devices]}
        return snapshot

    def plain_snapshot(self) -> dict[str, Any]:
        """A snapshot without any history."""
        return {
            "segments": [segment for device in self.used() for segment in device.allocator.segments()],
            "device_traces": [[] for _ in self.machine.devices],
            "allocator_settings": settings_from_conf(self.machine.config.to_string()),
            "external_annotations": [],
        }

    def _cuda_allocationTraceback(self, address: int) -> None:
        return None

    def _cuda_attach_out_of_memory_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        self.machine.hooks.oom_observers.append(observer)

    def _cuda_setMemoryMetadata(self, metadata: str) -> None:
        self.metadata = metadata
        if self.machine.hooks.on_metadata is not None:
            self.machine.hooks.on_metadata(metadata)

    def _cuda_getMemoryMetadata(self) -> str:
        return self.metadata

    def _cuda_memoryMetadataSupported(self) -> bool:
        return True

    def _cuda_annotateMemory(self, address: int, metadata: str) -> None:
        """Note something of a block in the history: it is no event of memory, and is not kept."""


def patch_memory(machine: Machine, patches: PatchStack) -> None:
    """Replace what ``torch.cuda.memory`` asks the runtime for by itself."""
    use_uvm = unified_memory()  # it calls cudaMallocManaged through cuda.bindings
    if use_uvm is None:
        return

    @contextmanager
    def use_managed_memory(device: Any = None) -> Iterator[None]:
        machine.warn(
            "managed-memory", "Managed memory counts as memory of the card, and does not grow beyond it"
        )
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
            yield

    patches.rebind([(use_uvm, use_managed_memory)])


class NativeAllocator:
    """Stands for a ``torch._C._cuda_CUDAAllocator``: the one allocator that the virtual GPU has."""
