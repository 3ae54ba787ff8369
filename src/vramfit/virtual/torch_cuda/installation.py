"""Puts the facade together: patches torch so that a program finds ``torch.cuda`` as on a card.

NOTE [Where torch.cuda is patched]
At the lowest level that Python reaches: the functions ``torch._C._cuda_*``, which a CPU build lacks and a
CUDA build has, and the C classes that ``Stream``, ``Event``, ``CUDAGraph``, ``MemPool`` and ``Generator``
derive from. torch's own Python above them (formatting, checks, lazy initialisation, contexts) keeps
working and keeps its version's habits. Python classes that derived from a C class when torch was imported
are made anew from torch's own source, now that the C class is ours, and bound wherever the old ones were.
"""

# ruff: noqa: ARG002  # the signatures are those of the C functions and classes

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import CodeType, ModuleType
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals import cuda_bindings, cuda_device, names
from vramfit.torch_internals.real_tensors import refuse_real_tensors
from vramfit.virtual.machine import Machine
from vramfit.virtual.torch_cuda.backends import BackendFunctions, patch_backends
from vramfit.virtual.torch_cuda.base import C, CFunctions, set_machine
from vramfit.virtual.torch_cuda.cuda_graphs import MemPool, PoolFunctions, base_classes, dump_nothing
from vramfit.virtual.torch_cuda.devices import DeviceFunctions, patch_devices
from vramfit.virtual.torch_cuda.extras import CommFunctions, TunableFunctions, patch_extras
from vramfit.virtual.torch_cuda.legacy import patch_legacy_tensors
from vramfit.virtual.torch_cuda.memory import MemoryFunctions, patch_memory
from vramfit.virtual.torch_cuda.refused import RefusedFunctions, patch_refused
from vramfit.virtual.torch_cuda.rng import VirtualGenerator, default_generator, patch_rng
from vramfit.virtual.torch_cuda.streams import StreamFunctions, VirtualStream, patch_streams

Pairs = list[tuple[object, object]]


def install(machine: Machine, patches: PatchStack) -> None:
    """Let a machine answer ``torch.cuda`` and its kin until the patches are undone.

    If this function raises, undo `patches`: what was patched before is in them.
    """
    patches.call(set_machine(machine))
    patches.call(refuse_real_tensors())
    devices = DeviceFunctions(machine)
    memory = MemoryFunctions(machine)
    backends = BackendFunctions(machine)
    tables: Sequence[CFunctions] = (
        devices,
        memory,
        backends,
        StreamFunctions(machine),
        PoolFunctions(machine),
        CommFunctions(machine),
        TunableFunctions(machine),
        AcceleratorFunctions(machine, devices, memory),
        RefusedFunctions(machine),
    )
    pairs: Pairs = []
    for table in tables:
        for name, function in table.functions().items():
            # torch imports some of these by name (from torch._C import _cuda_getCurrentRawStream).
            pairs += _replaced(name, function)
            patches.set(C, name, function)
    for place, cls in base_classes():
        if place.exists:
            pairs.append((place.get(), cls))
        place.supply(patches, cls)
    pairs += patch_streams(patches)
    pairs += patch_rng(patches)
    patches.rebind(pairs)
    cuda_bindings.hide(patches)
    patches.rebind(_made_anew(torch.cuda.streams, ("Stream", "ExternalStream", "Event"), patches))
    for step in (
        _install_graphs,
        partial(patch_devices, devices),
        partial(patch_backends, backends),
        partial(patch_memory, machine),
        partial(patch_extras, machine),
        patch_legacy_tensors,
        patch_refused,
    ):
        names.attempt(cuda_device.FEATURE, patches, step)


def _install_graphs(patches: PatchStack) -> None:
    graphs = (
        "CUDAGraph",
        "graph",
        "make_graphed_callables",
        "is_current_stream_capturing",
        "graph_pool_handle",
    )
    patches.rebind(_made_anew(torch.cuda.graphs, graphs, patches, _dump_graph_dot=dump_nothing))
    if hasattr(torch.cuda, "MemPool"):
        patches.rebind([(torch.cuda.MemPool, MemPool)])


def _replaced(name: str, new: Any) -> Pairs:
    old = getattr(C, name, None)
    return [] if old is None else [(old, new)]


_REGISTRIES = (dict, OrderedDict, list, set)


@cache
def _code(module: ModuleType) -> CodeType:
    return compile(inspect.getsource(module), str(module.__file__), "exec")


def _made_anew(
    module: ModuleType, names: Sequence[str], patches: PatchStack, **instead: Callable[..., object]
) -> Pairs:
    """Run a module's source once more, apart from it; returns pairs of its old and new objects of these names.

    Functions of `instead` take the place of the module's own of their names, where it has such.
    """
    fresh = ModuleType(module.__name__)
    fresh.__dict__.update(__package__=module.__package__, __file__=module.__file__)
    exec(_code(module), fresh.__dict__)
    # What functions that stay register is found by the classes made anew (hooks of graphs, from torch 2.14 on).
    shared = {
        name: value
        for name, value in vars(module).items()
        if type(value) in _REGISTRIES and name in vars(fresh)
    }
    fresh.__dict__.update(shared)
    fresh.__dict__.update({name: function for name, function in instead.items() if name in vars(module)})
    cuda_bindings.hide_in(fresh, patches)
    return [(vars(module)[name], vars(fresh)[name]) for name in names if name in vars(module)]


class AcceleratorFunctions(CFunctions):
    """``torch.accelerator`` (torch/csrc/DeviceAccelerator.cpp), whose device is ``cuda`` here and answers."""

    def __init__(self, machine: Machine, devices: DeviceFunctions, memory: MemoryFunctions) -> None:
        super().__init__(machine)
        self.devices = devices
        self.memory = memory

    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions by their name in ``torch._C``; some are those of ``torch.cuda`` themselves."""
        return super().functions() | {
            "_accelerator_getDeviceIndex": self.devices._cuda_getDevice,
            "_accelerator_setDeviceIndex": self.devices._cuda_setDevice,
            "_accelerator_exchangeDevice": self.devices._cuda_exchangeDevice,
            "_accelerator_maybeExchangeDevice": self.devices._cuda_maybeExchangeDevice,
            "_accelerator_hooks_device_count": self.devices._cuda_getDeviceCount,
            "_accelerator_hooks_get_current_device": self.devices._cuda_getDevice,
            "_accelerator_hooks_set_current_device": self.devices._cuda_setDevice,
            "_accelerator_hooks_exchange_device": self.devices._cuda_exchangeDevice,
            "_accelerator_hooks_maybe_exchange_device": self.devices._cuda_maybeExchangeDevice,
            "_accelerator_emptyCache": self.memory._cuda_emptyCache,
            "_accelerator_emptyHostCache": self.memory._host_emptyCache,
            "_accelerator_getDeviceStats": self.memory._cuda_memoryStats,
            "_accelerator_resetAccumulatedStats": self.memory._cuda_resetAccumulatedMemoryStats,
            "_accelerator_resetPeakStats": self.memory._cuda_resetPeakMemoryStats,
        }

    def _accelerator_getAccelerator(self) -> torch.device:
        return torch.device("cuda")

    def _get_accelerator(self, check: bool | None = None) -> torch.device:
        return torch.device("cuda")

    def _accelerator_getDefaultGenerator(self, device: int) -> VirtualGenerator:
        return default_generator(self.device(device).index)

    def _accelerator_getDeviceCapability(self, device: int) -> dict[str, Any]:
        self.device(device)
        # Every dtype has kernels on every card; what the hardware does fast is another question.
        return {"supported_dtypes": {v for v in vars(torch).values() if isinstance(v, torch.dtype)}}

    def _accelerator_getStream(self, device: int) -> VirtualStream:
        index = self.device(device).index
        return VirtualStream(stream_id=self.machine.current_stream(index), device_index=index)

    def _accelerator_setStream(self, stream: Any) -> None:
        self.machine.current_device = self.device(stream.device_index).index
        self.machine.set_stream(stream.stream_id, stream.device_index)

    def _accelerator_synchronizeDevice(self, device: int) -> None:
        self.machine.synchronize(self.device(device).index)

    def _accelerator_isAllocatorInitialized(self) -> bool:
        return self.machine.init_pid is not None

    def _accelerator_getMemoryInfo(self, device: int) -> tuple[int, int]:
        return self.device(device).memory_info()
