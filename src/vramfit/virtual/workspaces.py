"""cuBLAS and cuBLASLt workspaces: taken through the caching allocator at a library's first use, and mostly kept.

NOTE [Handles and threads]
torch keeps one cuBLAS handle per thread and device (ATen/cuda/CublasHandlePool.cpp), and one workspace per handle and
stream. The autograd engine runs the backward pass of each device on a thread of its own, so a training program holds
two workspaces per device: one of the thread that ran forward, one of the engine's. A thread that ends gives its
handle back to the pool, and the next new thread takes it, workspace included. cuDNN's handles (ATen/cudnn/Handle.cpp)
belong to threads too, but take nothing from the allocator; its convolution plans are kept for each thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable

import torch

from vramfit.torch_internals.cuda_device import preferred_blas_backend
from vramfit.torch_internals.kernel_choice import (
    attention_order,
    is_cublaslt,
    switches,
    takes_tf32,
)
from vramfit.trace import Category
from vramfit.virtual import kernels
from vramfit.virtual.kernels import Blas, KernelContext
from vramfit.virtual.machine import Machine
from vramfit.virtual.meter import Meter

# What sets the size of a workspace by itself, whatever was measured (see kernels/matmul.py).
_WORKSPACE_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
)


class _Handle(threading.local):
    """The handle of this thread; returned to the pool when the thread ends and its locals die."""

    lease: _Lease | None = None


class _Lease:
    def __init__(self, pool: list[int], number: int) -> None:
        self.number = number
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.number)


class Workspaces:
    """The workspaces of every device, handle and stream."""

    def __init__(self, machine: Machine, meter: Meter) -> None:
        self._machine = machine
        self._meter = meter
        self._held: dict[tuple[Blas, int, int, int], tuple[int, int]] = {}  # bytes and address
        self._local = _Handle()
        self._free_handles: list[int] = []
        self._handles = 0
        self._dropout_states: dict[int, torch.Tensor] = {}
        self._contexts: dict[int, KernelContext] = {}
        self._context_key: tuple[object, ...] = ()
        self._searched: set[Hashable] = set()
        self._plans_kept: dict[Hashable, int] = {}
        self._default_priority = attention_order()

    def context(self, device: int) -> KernelContext:
        """The state on which kernels on a device depend; made anew when a backend flag has changed."""
        key = (*switches(), preferred_blas_backend(), self._machine.conv_benchmark_empties_cache)
        if key != self._context_key:
            self._contexts.clear()
            self._context_key = key
        context = self._contexts.get(device)
        if context is None:
            context = self._contexts[device] = self._new_context(device)
        return context

    def _new_context(self, device: int) -> KernelContext:
        cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
        deterministic = torch.are_deterministic_algorithms_enabled()
        spec = self._machine.devices[device].spec
        return KernelContext(
            spec=spec,
            capability=spec.compute_capability,
            torch_version=self._machine.torch_version,
            cudnn_enabled=cudnn.enabled,
            cudnn_benchmark=cudnn.benchmark,
            cudnn_deterministic=cudnn.deterministic or deterministic,
            cudnn_tf32=takes_tf32("conv"),
            deterministic=deterministic and not torch.is_deterministic_algorithms_warn_only_enabled(),
            allow_tf32=takes_tf32("matmul"),
            prefers_cublaslt=is_cublaslt(preferred_blas_backend()),
            flash_sdp=cuda.flash_sdp_enabled(),
            mem_efficient_sdp=cuda.mem_efficient_sdp_enabled(),
            math_sdp=cuda.math_sdp_enabled(),
            cudnn_sdp=cuda.cudnn_sdp_enabled(),
            half_reduction_math_sdp=cuda.fp16_bf16_reduction_math_sdp_allowed(),
            sdp_priority=self._priority(),
            conv_benchmark_empties_cache=self._machine.conv_benchmark_empties_cache,
            searched=self._searched,
            plans_kept=self._plans_kept,
            asker=self._machine.cudnn_asker,
            profile=self._machine.measured,
            environ=dict(os.environ),
        )

    def _priority(self) -> tuple[int, ...] | None:
        """The order of attention backends that the program set; None while it is torch's own."""
        order = attention_order()
        return None if order == self._default_priority else order

    def use(self, blas: Blas, device: int, context: KernelContext) -> list[int]:
        """Make sure the workspace of a library is there; returns blocks that last for this op only."""
        key = (blas, device, self._handle(), self._machine.current_stream(device))
        held, old = self._held.get(key, (-1, 0))
        self._machine.devices[device].use_library(blas.value)
        chosen = self._machine.cublas_workspace_bytes.get(blas.value)
        if held >= 0 and (chosen is None or held >= chosen):
            return []
        size = self._workspace_bytes(blas, context) if chosen is None else chosen
        address = 0
        if size:
            address, _ = self._meter.malloc(
                size, device, op=f"{blas.value} workspace", category=Category.WORKSPACES
            )
        if not kernels.workspace_is_cached(blas, context):
            return [address] if address else []
        self._held[key] = (size, address)
        if old:  # the program asked for more than it had (``setWorkspaceForHandle``)
            self._meter.free(old, device)
        return []

    def _workspace_bytes(self, blas: Blas, context: KernelContext) -> int:
        """Bytes as measured with torch's own settings, else by the rule, which knows the variables that change them."""
        measured = self._machine.measured
        if measured is None or any(name in context.environ for name in _WORKSPACE_VARIABLES):
            return kernels.workspace_bytes(blas, context)
        found = measured.profile.workspace_bytes.get(blas.value)
        return kernels.workspace_bytes(blas, context) if found is None else found

    def dropout_state(self, device: int) -> torch.Tensor:
        """The random states of cuDNN's dropout: one tensor per device, made at its first use and kept.

        cuDNN gives the size only on a card (``cudnnDropoutGetStatesSize``). Its generators are XORWOW states of curand
        (48 B, ``curandStateXORWOW_t``), one for each thread that the card holds: an estimate, with an error bar of its
        own size.
        """
        state = self._dropout_states.get(device)
        if state is None:
            spec = self._machine.devices[device].spec
            measured = self._machine.measured
            known = None if measured is None else measured.profile.workspace_bytes.get("cudnn_dropout")
            size = 48 * spec.sm_count * spec.max_threads_per_sm if known is None else known
            state = self._dropout_states[device] = torch.empty(
                size, dtype=torch.uint8, device=f"cuda:{device}"
            )
            self._meter.tag(state, Category.WORKSPACES)
            if known is None:
                self._meter.in_doubt(state, size, size, "cuDNN dropout")
        return state

    def clear(self) -> None:
        """Give all workspaces back: ``torch._C._cuda_clearCublasWorkspaces()``."""
        for (_, device, _, _), (_, address) in self._held.items():
            if address:
                self._meter.free(address, device)
        self._held.clear()

    def _handle(self) -> int:
        lease = self._local.lease
        if lease is None:
            if self._free_handles:
                number = self._free_handles.pop()
            else:
                number = self._handles
                self._handles += 1
            lease = self._local.lease = _Lease(self._free_handles, number)
        return lease.number
