"""CUDA graphs and memory pools: captured work runs at once, into a private pool; a replay only takes time."""

# ruff: noqa: ARG002  # the signatures are those of the C functions and classes

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from vramfit.allocator import CachingAllocator
from vramfit.torch_internals.cuda_device import graph_base, pool_base
from vramfit.torch_internals.cuda_memory import pool_snapshot
from vramfit.torch_internals.names import TorchName
from vramfit.virtual.torch_cuda.base import CFunctions, installed_machine

PoolId = tuple[int, int]

_graph_pools = itertools.count(1)
_user_pools = itertools.count(1)


# The graphs that record, by device and stream (ATen/cuda/CUDAGraph.cpp: _currently_capturing_graphs).
_capturing: weakref.WeakValueDictionary[tuple[int, int], CUDAGraphBase] = weakref.WeakValueDictionary()
# Numbers of the streams that bodies of conditions are recorded on; twice one is the address of an external stream.
_body_streams = itertools.count(0x2AC1_8000_0000)


def new_pool_id(*, user_created: bool) -> PoolId:
    """A fresh pool id (ATen/cuda/MemPool.cpp): users' pools count in the second number."""
    return (0, next(_user_pools)) if user_created else (next(_graph_pools), 0)


def _when_gone(holder: object, function: Callable[..., object], *args: object) -> Callable[[], object]:
    """Call a function when an object is gone, or when the result is called; not at the interpreter's end."""
    finalizer = weakref.finalize(holder, function, *args)
    finalizer.atexit = False
    return finalizer


def _release_all(allocator: CachingAllocator, pools: list[PoolId]) -> None:
    while pools:
        allocator.release_pool(pools.pop())


class PoolFunctions(CFunctions):
    """The functions that send allocations to a private pool."""

    def _graph_pool_handle(self) -> PoolId:
        return new_pool_id(user_created=True)

    def _cuda_beginAllocateToPool(self, device: int, pool: PoolId) -> None:
        self.device(device).allocator.begin_pool((pool[0], pool[1]))

    def _cuda_beginAllocateCurrentThreadToPool(self, device: int, pool: PoolId) -> None:
        self._cuda_beginAllocateToPool(device, pool)

    def _cuda_beginAllocateCurrentStreamToPool(self, device: int, stream: int, pool: PoolId) -> None:
        self._cuda_beginAllocateToPool(device, pool)

    def _cuda_endAllocateToPool(self, device: int, pool: PoolId) -> None:
        self.device(device).allocator.end_pool((pool[0], pool[1]))

    def _cuda_releasePool(self, device: int, pool: PoolId) -> None:
        self.device(device).allocator.release_pool((pool[0], pool[1]))


class CUDAGraphBase:
    """Stands for ``torch._C._CUDAGraph`` (ATen/cuda/CUDAGraph.cpp)."""

    _keep_graph: bool
    _device: int
    _pool: PoolId | None
    _pools: list[PoolId]
    _capturing: tuple[int, int] | None
    _bodies: list[tuple[int, int]]
    _began_us: float
    _duration_us: float | None
    _has_graph_exec: bool
    _release: Callable[[], object]

    def __new__(cls, keep_graph: bool = False) -> CUDAGraphBase:
        """Make a graph that holds nothing yet."""
        self = super().__new__(cls)
        self._keep_graph = keep_graph
        self._device = 0
        self._pool = None
        self._pools = []
        self._capturing = None
        self._bodies = []
        self._began_us = 0.0
        self._duration_us = None
        self._has_graph_exec = False
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ takes the arguments

    def capture_begin(self, pool: PoolId | None = None, capture_error_mode: str = "global") -> None:
        """Begin to record the current stream.

        Raises:
            RuntimeError: the graph already holds a recording, or the stream is the default one.
        """
        machine = installed_machine()
        if self._pool is not None:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. "
                "To capture a new graph, create a new instance."
            )
        device = machine.current_device
        stream = machine.current_stream(device)
        if stream == 0:
            raise RuntimeError(
                "CUDA graphs must be captured on a non-default stream. "
                "(However, after capture, it's ok to replay them on the default stream.)"
            )
        self._device = device
        self._pool = new_pool_id(user_created=False) if pool is None else (pool[0], pool[1])
        self._capturing = (device, stream)
        _capturing[self._capturing] = self
        self._began_us = machine.clock_us
        machine.begin_capture(device, stream)
        allocator = machine.devices[device].allocator
        allocator.begin_pool(self._pool)
        allocator.mark_capture_begin()
        # The graph holds its pools until it is reset or gone.
        self._pools = [self._pool]
        self._release = _when_gone(self, _release_all, allocator, self._pools)

    def capture_end(self) -> None:
        """End the recording; torch's own Python takes its two halves one by one from 2.14 on.

        Raises:
            RuntimeError: none is under way.
        """
        self.capture_end_pre()
        self.capture_end_post()

    def capture_end_pre(self) -> None:
        """End the recording and let what was recorded be looked at.

        Raises:
            RuntimeError: none is under way.
        """
        if self._capturing is None:
            raise RuntimeError("capture_end called before capture_begin")
        machine = installed_machine()
        machine.end_capture(*self._capturing)
        _capturing.pop(self._capturing, None)
        self._capturing = None
        allocator = machine.devices[self._device].allocator
        allocator.mark_capture_end()
        allocator.end_pool(self._pool)
        self._duration_us = machine.clock_us - self._began_us

    def capture_end_post(self) -> None:
        """Give up the recording's template, where it was not to be kept: here there is none."""

    @staticmethod
    def get_currently_capturing_graph() -> CUDAGraphBase:
        """The graph that records the current stream.

        Raises:
            RuntimeError: none does.
        """
        machine = installed_machine()
        device = machine.current_device
        graph = _capturing.get((device, machine.current_stream(device)))
        if graph is None:
            raise RuntimeError("The current stream is not currently capturing.")
        return graph

    def begin_capture_to_if_node(self, scalar_cuda_pred_tensor: object) -> None:
        """Begin to record what is run where a condition holds: it is run, on a stream of its own."""
        self._begin_body()

    def begin_capture_to_while_node(self, scalar_cuda_pred_tensor: object) -> None:
        """Begin to record what is run while a condition holds: it is run once."""
        self._begin_body()

    def set_conditional_handle_for_current_node(self, scalar_cuda_pred_tensor: object) -> None:
        """Take the condition's new value: here bodies run once, whatever it is."""

    def end_capture_to_conditional_node(self) -> None:
        """End the recording of what depends on a condition.

        Raises:
            RuntimeError: none is under way.
        """
        if not self._bodies:
            raise RuntimeError("Missing capture ID for conditional node.")
        machine = installed_machine()
        before, body = self._bodies.pop()
        machine.end_capture(self._device, body)
        machine.devices[self._device].allocator.mark_capture_end()
        _capturing.pop((self._device, body), None)
        machine.set_stream(before, self._device)
        machine.clock.hold(self._device, before, machine.clock.reached(self._device, body))

    def _begin_body(self) -> None:
        # CUDAGraph::begin_capture_to_conditional_node: a fresh stream of the same pool, current until the body ends
        if self._capturing is None:
            raise RuntimeError("capture_begin() must be called before begin_capture_to_conditional_node()")
        machine = installed_machine()
        before, body = machine.current_stream(self._device), 2 * next(_body_streams)
        self._bodies.append((before, body))
        _capturing[self._device, body] = self
        machine.begin_capture(self._device, body)
        machine.devices[self._device].allocator.mark_capture_begin()
        machine.set_stream(body, self._device)
        machine.clock.hold(self._device, body, machine.clock.reached(self._device, before))

    def instantiate(self) -> None:
        """Make it ready to replay."""
        self._has_graph_exec = True

    def replay(self) -> None:
        """Run the recording again: nothing is allocated, only its time passes.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if self._duration_us is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        installed_machine().advance(self._duration_us)

    def reset(self) -> None:
        """Give up the recording; its pool goes back to the card when its last tensor is gone."""
        if self._pool is not None and self._duration_us is not None:
            self._pool = self._duration_us = None
            self._has_graph_exec = False
            self._release()

    def pool(self) -> PoolId:
        """The id of its memory pool.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def pools(self) -> list[PoolId]:
        """The ids of all pools that it holds.

        Raises:
            RuntimeError: nothing was recorded.
        """
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pools() without a preceding successful capture.")
        return list(self._pools)

    def _retain_pool(self, pool: PoolId) -> None:
        """Hold another pool, in which the recording has memory, until the graph is reset or gone."""
        found = (pool[0], pool[1])
        if found not in self._pools:
            installed_machine().devices[self._device].allocator.create_pool(found)
            self._pools.append(found)

    def register_generator_state(self, generator: Any) -> None:
        """Let the recording use a generator: its offsets are the program's own here."""

    def enable_debug_mode(self) -> None:
        """Keep what `debug_dump` would write."""

    def debug_dump(self, debug_path: str) -> None:
        """Write nothing: no graph of kernels exists."""

    def raw_cuda_graph(self) -> int:
        """The ``cudaGraph_t``; a made-up address."""
        return id(self)

    def raw_cuda_graph_exec(self) -> int:
        """The ``cudaGraphExec_t``; a made-up address."""
        return id(self) + 8


def dump_nothing(cuda_graph: object, path: object, **options: object) -> None:
    """Stands for ``torch.cuda.graphs._dump_graph_dot`` (since 2.14), which writes the kernels of a graph: here none."""


class MemPoolBase:
    """Stands for ``torch._C._MemPool`` (ATen/cuda/MemPool.cpp)."""

    def __init__(
        self,
        allocator: object = None,
        is_user_created: bool = True,
        use_on_oom: bool = False,
        no_split: bool = False,
    ) -> None:
        machine = installed_machine()
        self._id = new_pool_id(user_created=is_user_created)
        self._allocator = allocator
        self._device = machine.current_device
        cache = machine.device().allocator
        cache.create_pool(self._id, use_on_oom=use_on_oom, no_split=no_split)
        _when_gone(self, _let_go, cache, self._id)

    @property
    def id(self) -> PoolId:
        """Its id, two numbers."""
        return self._id

    @property
    def allocator(self) -> object:
        """The allocator it was made with."""
        return self._allocator

    @property
    def device(self) -> int:
        """The device it was made on."""
        return self._device

    def use_count(self) -> int:
        """How many hold it: the object itself."""
        return 1


def _let_go(allocator: CachingAllocator, pool: PoolId) -> None:
    # As ~MemPool: the pool is released, and what is free in it goes back to the card.
    allocator.release_pool(pool)
    allocator.empty_cache(pool)


class MemPool(MemPoolBase):
    """Stands for ``torch.cuda.MemPool``, whose own class derives from a C class (torch/cuda/memory.py)."""

    __module__ = "torch.cuda.memory"

    def __init__(self, allocator: object = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        super().__init__(allocator, True, use_on_oom, no_split)

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:
        """The segments of this pool."""
        full: dict[str, Any] = pool_snapshot((*self.id, include_traces))
        segments: list[dict[str, Any]] = full["segments"]
        return segments


def base_classes() -> Iterator[tuple[TorchName, type]]:
    """Classes of C++ and the classes that stand there."""
    yield graph_base, CUDAGraphBase
    yield pool_base, MemPoolBase
