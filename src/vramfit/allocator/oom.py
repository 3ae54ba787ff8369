"""The error of a request that the allocator could not serve, with every figure torch's message has."""

from __future__ import annotations

from vramfit import errors
from vramfit.units import GIB, KIB, MIB

EXABYTE = 1 << 60
"""Requests from here on fail at once (c10/cuda/CUDACachingAllocator.cpp, ``allocate``)."""


def torch_size(size: int) -> str:
    """Write bytes as torch's messages do (c10/core/CachingDeviceAllocator, ``format_size``): ``1.50 GiB``."""
    if size <= 1024:
        return f"{size} bytes"
    for unit, factor in (("KiB", KIB), ("MiB", MIB)):
        if size <= factor * 1024:
            return f"{size / factor:.2f} {unit}"
    return f"{size / GIB:.2f} GiB"


class OutOfMemory(errors.OutOfMemory):
    """The caching allocator could not serve a request, after every retry.

    Attributes:
        device: index of the card.
        requested_bytes: what the caller asked for.
        rounded_bytes: the request after rounding, as the ``oom`` event of a trace has it.
        segment_bytes: what had to come from the driver; this is what torch's message names.
        total_bytes: memory of the card.
        free_bytes: free memory of the card when the request failed.
        allocated_bytes: bytes in blocks handed out, freed private pool blocks not included.
        reserved_bytes: bytes held from the driver.
        allowed_bytes: the limit by ``set_per_process_memory_fraction``, or None.
        private_pool_bytes: cached bytes of private pools (CUDA graphs), which other requests cannot use.
        process_bytes: memory of this process by NVML (context and allocator), or None when unknown.
        rejected: turned down by ``throw_on_cudamalloc_oom`` before any attempt.
    """

    def __init__(
        self,
        *,
        device: int,
        requested_bytes: int,
        rounded_bytes: int,
        segment_bytes: int,
        total_bytes: int,
        free_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
        allowed_bytes: int | None = None,
        private_pool_bytes: int = 0,
        process_bytes: int | None = None,
        rejected: bool = False,
    ) -> None:
        self.device = device
        self.requested_bytes = requested_bytes
        self.rounded_bytes = rounded_bytes
        self.segment_bytes = segment_bytes
        self.total_bytes = total_bytes
        self.free_bytes = free_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.allowed_bytes = allowed_bytes
        self.private_pool_bytes = private_pool_bytes
        self.process_bytes = process_bytes
        self.rejected = rejected
        super().__init__(self.torch_message())

    def torch_message(self) -> str:
        """The text of the ``torch.OutOfMemoryError`` that a card raises for the same figures.

        It is the same in torch 2.11 to 2.14 (c10/cuda/CUDACachingAllocator.cpp,
        ``DeviceCachingAllocator::malloc``, and the strings of libc10_cuda.so).
        """
        if self.requested_bytes >= EXABYTE:
            return "CUDA out of memory. Tried to allocate more than 1EB memory."
        if self.rejected:
            return (
                "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
                f"per_process_memory_fraction limit. Requested size: {torch_size(self.requested_bytes)}"
            )
        process = allowed = private = ""
        if self.process_bytes is not None:
            use = torch_size(self.process_bytes)
            process = f"Including non-PyTorch memory, this process has {use} memory in use. "
        if self.allowed_bytes is not None:
            allowed = f"{torch_size(self.allowed_bytes)} allowed; "
        if self.private_pool_bytes:
            use = torch_size(self.private_pool_bytes)
            private = f"with {use} allocated in private pools (e.g., CUDA Graphs), "
        allocated = self.allocated_bytes + self.private_pool_bytes
        return (
            f"CUDA out of memory. Tried to allocate {torch_size(self.segment_bytes)}. GPU {self.device} has "
            f"a total capacity of {torch_size(self.total_bytes)} of which {torch_size(self.free_bytes)} is "
            "free. "
            f"{process}{allowed}Of the allocated memory {torch_size(allocated)} is allocated by PyTorch, "
            f"{private}and {torch_size(self.reserved_bytes - allocated)} is reserved by PyTorch but "
            "unallocated. If reserved but unallocated memory is large try setting "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
            "Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html"
            "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
        )
