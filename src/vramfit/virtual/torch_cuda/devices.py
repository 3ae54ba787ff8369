"""Devices: counting, choosing, initialising, waiting."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import Any

import torch

from vramfit.gpus import GpuKind
from vramfit.patching import PatchStack
from vramfit.torch_internals import cuda_device
from vramfit.virtual.machine import InvalidDevice, Machine
from vramfit.virtual.torch_cuda.base import CFunctions
from vramfit.virtual.torch_cuda.properties import (
    CudaDeviceProperties,
    TorchRelease,
    needs_older_build,
    properties_of,
    release_for,
)
from vramfit.virtual.torch_cuda.rng import VirtualGenerator

_HANDLE = 0x5580_0000_0000  # made-up addresses of library handles: stable and not zero


class DeviceFunctions(CFunctions):
    """The functions of torch/csrc/cuda/Module.cpp that deal with devices."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.sync_debug_mode = 0

    @cached_property
    def release(self) -> TorchRelease:
        """The build of torch that stands for this one, chosen by the cards that are visible."""
        cards = [device.spec.compute_capability for device in self.machine.devices]
        return release_for(self.machine.torch_version, cards)

    def properties(self, index: int) -> CudaDeviceProperties:
        """Answers ``torch.cuda._get_device_properties``."""
        return properties_of(self.device(index))

    def _cuda_init(self) -> None:
        if not self.machine.devices:
            raise RuntimeError("No CUDA GPUs are available")
        self.machine.init_pid = os.getpid()
        # THCPModule_initExtension binds these into torch.cuda; `patch_devices` remembered how they stood.
        cuda = sys.modules["torch.cuda"]
        setattr(cuda, cuda_device.get_device_properties.name, self.properties)
        cuda.default_generators = tuple(  # type: ignore[attr-defined]
            VirtualGenerator(device.index, device.rng) for device in self.machine.devices
        )

    def _cuda_isInBadFork(self) -> bool:
        # torch sets a flag in a fork handler; the number of the process says the same and needs no handler.
        return self.machine.init_pid is not None and self.machine.init_pid != os.getpid()

    def _cuda_getDeviceCount(self) -> int:
        return len(self.machine.devices)

    def _cuda_getDevice(self) -> int:
        return self.machine.current_device

    def _cuda_setDevice(self, index: int) -> None:
        self.machine.current_device = self.device(index).index

    def _cuda_exchangeDevice(self, index: int) -> int:
        if index < 0:
            return -1
        before = self.machine.current_device
        self._cuda_setDevice(index)
        return before

    def _cuda_maybeExchangeDevice(self, index: int) -> int:
        return self._cuda_exchangeDevice(index)

    def _cuda_canDeviceAccessPeer(self, index: int, peer: int) -> bool:
        # A device is not its own peer, and drivers refuse peer access between GeForce cards.
        one, other = self.device(index).spec, self.device(peer).spec
        return index != peer and one == other and one.kind in (GpuKind.DATACENTER, GpuKind.WORKSTATION)

    def _cuda_hasPrimaryContext(self, index: int) -> bool:
        return self.machine.init_pid is not None and index < len(self.machine.devices)

    def _cuda_getArchFlags(self) -> str:
        return " ".join(f"sm_{number}" for number in self.release.architectures)

    def _cuda_getCompiledVersion(self) -> int:
        major, minor = self.release.cuda.split(".")
        return int(major) * 1000 + int(minor) * 10

    def _cuda_synchronize(self) -> None:
        self.machine.synchronize()

    def _cuda_sleep(self, cycles: int) -> None:
        self.machine.advance(1e6 * cycles / self.device().spec.boost_clock)

    def _cuda_set_sync_debug_mode(self, mode: int) -> None:
        self.sync_debug_mode = mode

    def _cuda_get_sync_debug_mode(self) -> int:
        return self.sync_debug_mode

    def _cuda_ipc_collect(self) -> None:
        """Nothing to collect: no memory is shared between processes."""

    def _cuda_getCurrentBlasHandle(self) -> int:
        return _HANDLE + (self.machine.current_device << 16)

    def _cuda_getCurrentSolverHandle(self) -> int:
        return _HANDLE + (self.machine.current_device << 16) + 0x1000

    def _cuda_clearCublasWorkspaces(self) -> None:
        if self.machine.hooks.clear_workspaces is not None:
            self.machine.hooks.clear_workspaces()

    def _cuda_lock_mutex(self) -> None:
        """The free mutex guards against NCCL; nothing runs here."""

    def _cuda_unlock_mutex(self) -> None:
        """See `_cuda_lock_mutex`."""

    def _cudnn_clear_dropout_state(self) -> None:
        """Nothing to clear: states of dropout in recurrent layers are tensors of the program's here."""

    def _cuda_getHipblasltVersion(self) -> int:
        return 0  # of builds for ROCm


def patch_devices(functions: DeviceFunctions, patches: PatchStack) -> None:
    """Replace what ``torch.cuda`` keeps in Python about devices and initialisation."""
    cuda = torch.cuda
    # The properties class is a C class without a constructor (CUDA build) or a dummy (CPU build).
    for place in cuda_device.properties_classes:
        place.supply(patches, CudaDeviceProperties)
    # _cuda_init binds these two.
    cuda_device.get_device_properties.keep(patches)
    patches.set(cuda, "default_generators", ())
    # The state of lazy initialisation: the program starts with CUDA not initialised, whatever happened
    # before, and what it queues must not be left behind.
    cuda_device.initialized.replace(patches, False)
    if cuda_device.queued_calls.exists:
        cuda_device.queued_calls.replace(patches, cuda_device.queued_before_first_use())
    if cuda_device.lazy_seed_tracker.exists:
        cuda_device.lazy_seed_tracker.replace(patches, cuda_device.seed_tracker())
    # Both were bound at import time from functions that a CPU build lacks.
    cuda_device.in_bad_fork.replace(patches, functions._cuda_isInBadFork)
    cuda_device.exchange_device.replace(patches, functions._cuda_exchangeDevice)
    cuda_device.maybe_exchange_device.replace(patches, functions._cuda_maybeExchangeDevice)
    # NVML would count the cards of the machine we run on.
    cuda_device.device_count_by_nvml.replace(patches, functions._cuda_getDeviceCount)
    cuda_device.raw_device_count_by_nvml.replace(patches, lambda: len(functions.machine.specs))
    cuda_device.raw_uuids_by_nvml.replace(patches, lambda: list(functions.machine.uuids))
    cuda_device.cached_device_count.replace(patches, None)
    patches.set(cuda, "has_magma", True)
    # fork_rng warns once per process about several devices.
    cuda_device.fork_rng_warned.replace(patches, False)
    # Whether this torch was built with CUDA is looked up in torch._C at run time.
    cuda_device.built_with_cuda.supply(patches, True)
    cuda_device.built_with_magma.supply(patches, True)
    _forget_cached_answers(patches)
    # Fake tensors warm up a real context when is_available() says there is a card: there is none to warm up.
    cuda_device.gpu_context.replace(patches, _no_context)
    # A CUDA build keeps its own version only if that serves the cards: all of them, not just the visible ones, since
    # CUDA_VISIBLE_DEVICES is the program's to set.
    cards = [spec.compute_capability for spec in functions.machine.specs]
    if not cuda_device.has_cuda or needs_older_build(cards):
        patches.set(torch.version, "cuda", release_for(functions.machine.torch_version, cards).cuda)


def _no_context(device: torch.device) -> None:
    """Stands for ``init_gpu_context`` of torch/_subclasses/fake_tensor.py."""


def _forget_cached_answers(patches: PatchStack) -> None:
    """Empty functools caches whose answers depend on the devices, now and again at the undo."""
    for clear in cuda_device.cached_answers():
        clear()
        patches.call(clear)


def device_index_of(machine: Machine, device: Any) -> int:
    """Number of the device that a ``torch.device``, a text, a number or None means.

    Raises:
        InvalidDevice: the machine has no such device.
    """
    if device is None:
        return machine.current_device
    if isinstance(device, int):
        index: int | None = device
    else:
        index = torch.device(device).index
    if index is None or index < 0:
        return machine.current_device
    if index >= len(machine.devices):
        raise InvalidDevice(f"device {index} of {len(machine.devices)}")
    return index
