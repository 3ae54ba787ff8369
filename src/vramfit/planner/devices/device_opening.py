"""Opens the device that a question is asked of: a virtual card, this machine's own, or its CPU."""

from __future__ import annotations

from collections.abc import Callable

from vramfit.gpus import GpuSpec
from vramfit.planner.devices.card_backend import card_of_this_process
from vramfit.planner.devices.cost import DeviceBackend
from vramfit.planner.devices.cpu_backend import CpuBackend
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.planner_job import DeviceMemory
from vramfit.virtual.gpu import VirtualGPU
from vramfit.workload import Workload, load_workload


def opened(memory: DeviceMemory) -> tuple[DeviceBackend, Callable[[str], Workload]]:
    """Where steps are run, and what reads the workload's file there.

    Raises:
        UsageError: this machine's card is meant, and torch sees none.
    """
    if memory.device == "cpu":
        return CpuBackend(), load_workload
    if memory.device == "card":
        return card_of_this_process(memory.host_bytes), load_workload
    spec = memory.gpu
    assert spec is not None

    def load(target: str) -> Workload:
        with VirtualGPU(spec):  # a file may ask for the card while it is read
            return load_workload(target)

    return virtual_card(memory, spec, own_process=True), load


def virtual_card(memory: DeviceMemory, card: GpuSpec, *, own_process: bool = False) -> VirtualBackend:
    """A card with the host's memory and the allocator's settings that were asked for."""
    return VirtualBackend(
        card, alloc_conf=memory.alloc_conf, host_bytes=memory.host_bytes, own_process=own_process
    )
