"""Device properties as ``torch.cuda.get_device_properties`` gives them, and the versions that a torch release has."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Iterable
from dataclasses import dataclass, replace

from vramfit.virtual.machine import VirtualDevice

# -- What a release of torch for CUDA brings with it: toolkit, cuDNN, NCCL, architectures --------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRelease:
    """One CUDA build of a torch release.

    Attributes:
        cuda: version of the toolkit, as in ``torch.version.cuda``.
        cudnn: as in ``torch.backends.cudnn.version()``.
        nccl: as in ``torch.cuda.nccl.version()``.
        architectures: the ``sm_`` numbers it has code for.
    """

    cuda: str
    cudnn: int
    nccl: tuple[int, int, int]
    architectures: tuple[int, ...]


# Requirements of the wheels on PyPI (Requires-Dist), and torch._C._cuda_getArchFlags() of each; 2.13 names the versions
# of 2.12.
_CU130 = (75, 80, 86, 90, 100, 120)
_PYPI = {
    (2, 10): TorchRelease(cuda="12.8", cudnn=91002, nccl=(2, 27, 5), architectures=(70, *_CU130)),
    (2, 11): TorchRelease(cuda="13.0", cudnn=91900, nccl=(2, 28, 9), architectures=_CU130),
    (2, 12): TorchRelease(cuda="13.0", cudnn=92000, nccl=(2, 29, 7), architectures=_CU130),
    (2, 14): TorchRelease(cuda="13.0", cudnn=92400, nccl=(2, 30, 7), architectures=_CU130),
    (2, 15): TorchRelease(cuda="13.2", cudnn=92600, nccl=(2, 30, 7), architectures=_CU130),
}
# CUDA 13 and cuDNN from 9.11 on no longer run on cards before Turing: such a card wants the wheel for CUDA 12.6.
_OLDEST_OF_CUDA_13 = (7, 5)
_CU126 = (50, 60, 70, 75, 80, 86, 90)
_CUDNN_CU126 = 91002


def needs_older_build(capabilities: Iterable[tuple[int, int]]) -> bool:
    """Whether one of these cards is no longer served by a build for CUDA 13."""
    return any(card < _OLDEST_OF_CUDA_13 for card in capabilities)


def release_for(torch_version: tuple[int, int], capabilities: Iterable[tuple[int, int]]) -> TorchRelease:
    """The build that somebody with cards of these compute capabilities would install.

    A newer torch than is known here gets the newest release known.
    """
    known = max((version for version in _PYPI if version <= torch_version), default=min(_PYPI))
    release = _PYPI[known]
    cards = list(capabilities)
    if needs_older_build(cards):
        release = TorchRelease(cuda="12.6", cudnn=_CUDNN_CU126, nccl=release.nccl, architectures=_CU126)
    # Boards with their own builds (Jetson, GB10) are served by code for just them.
    extra = {
        major * 10 + minor for major, minor in cards if not _covered(major, minor, release.architectures)
    }
    return replace(release, architectures=tuple(sorted({*release.architectures, *extra})))


# Served by their own code only: torch/cuda/__init__.py, DEVICE_REQUIREMENT.
_BOARDS = {53, 62, 72, 87, 101, 110}


def _covered(major: int, minor: int, architectures: tuple[int, ...]) -> bool:
    if major * 10 + minor in _BOARDS:
        return major * 10 + minor in architectures
    return any(code // 10 == major and code % 10 <= minor for code in architectures)


MIB = 1 << 20
_FIRST_BUS = 0x17  # PCI buses of GPUs in servers; only its being stable matters


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class CudaDeviceProperties:
    """Stands for ``torch._C._CudaDeviceProperties`` (torch/csrc/cuda/Module.cpp, registerCudaDeviceProperties).

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
