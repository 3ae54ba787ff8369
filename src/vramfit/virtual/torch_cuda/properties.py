"""Device properties: what ``torch.cuda.get_device_properties`` gives."""

from __future__ import annotations

import uuid as uuids
from dataclasses import dataclass

from vramfit.virtual.machine import VirtualDevice

MIB = 1 << 20
_FIRST_BUS = 0x17  # PCI buses of GPUs in servers; only its being stable matters


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CudaDeviceProperties:
    """Stands for ``torch._C._CudaDeviceProperties`` (torch/csrc/cuda/Module.cpp,
    registerCudaDeviceProperties).

    The attributes are those of the C class, in its units: bytes and kHz.
    """

    name: str
    major: int
    minor: int
    is_multi_gpu_board: int
    is_integrated: int
    multi_processor_count: int
    total_memory: int
    max_threads_per_multi_processor: int
    max_threads_per_block: int
    regs_per_multiprocessor: int
    warp_size: int
    gcnArchName: str
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    shared_memory_per_multiprocessor: int
    L2_cache_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    pci_bus_id: int
    pci_device_id: int
    pci_domain_id: int
    uuid: uuids.UUID

    def __repr__(self) -> str:
        """Write them as the C class does."""
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // MIB}MB, multi_processor_count={self.multi_processor_count}, "
            f"uuid={self.uuid}, pci_bus_id={self.pci_bus_id}, pci_device_id={self.pci_device_id}, "
            f"pci_domain_id={self.pci_domain_id}, L2_cache_size={self.L2_cache_size // MIB}MB)"
        )


def properties_of(device: VirtualDevice) -> CudaDeviceProperties:
    """The properties of a virtual device, from its card's data."""
    spec = device.spec
    major, minor = spec.compute_capability
    return CudaDeviceProperties(
        name=spec.vendor_name,
        major=major,
        minor=minor,
        is_multi_gpu_board=0,
        is_integrated=int(spec.integrated),
        multi_processor_count=spec.sm_count,
        total_memory=spec.total_bytes,
        max_threads_per_multi_processor=spec.max_threads_per_sm,
        max_threads_per_block=1024,
        regs_per_multiprocessor=spec.registers_per_sm,
        warp_size=spec.warp_size,
        gcnArchName=spec.vendor_name,
        shared_memory_per_block=spec.shared_memory_per_block,
        shared_memory_per_block_optin=spec.shared_memory_per_block_optin,
        shared_memory_per_multiprocessor=spec.shared_memory_per_sm,
        L2_cache_size=spec.l2_bytes,
        clock_rate=round(spec.boost_clock / 1e3),
        memory_clock_rate=round(spec.memory_clock / 1e3),
        memory_bus_width=spec.memory_bus_bits,
        pci_bus_id=_FIRST_BUS + device.physical_index,
        pci_device_id=0,
        pci_domain_id=0,
        uuid=device.uuid,
    )
