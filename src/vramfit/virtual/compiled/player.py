"""Runs the programs that Inductor writes: what they call to take memory, to see it otherwise, and to launch.

torch/_inductor/cudagraph_trees.py keeps one pool per card and thread. A graph's first call warms up in that pool, the
second records in it, and later ones replay: their results lie where the recording put them. Inputs that do not keep
their address are copied into the pool from the recording on. Here every call makes its requests in the pool, which
caches: replays find the blocks of the calls before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.capture.attribution import ProgramPhase
from vramfit.capture.ops import tensors_in
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.trace import Category, Frame
from vramfit.virtual import roofline
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_cuda.cuda_graphs import PoolId, new_pool_id

# -- CUDA graphs of compiled programs (``mode="reduce-overhead"``): the same requests, in a private pool -----


GRAPHS = (
    "torch.compile was asked for CUDA graphs (reduce-overhead): what their pools keep between calls is followed "
    "roughly, and a card may hold more"
)


class GraphPools:
    """The pools of a program's compiled graphs, one per card."""

    def __init__(self, mode: OpRunner) -> None:
        self._mode = mode
        self._pools: dict[int, tuple[PoolId, int]] = {}

    def wrap(
        self,
        model: Callable[[list[Any]], Any],
        static_input_idxs: Sequence[int] = (),
        *,
        device_index: int,
        **options: Any,
    ) -> Callable[[list[Any]], Any]:
        """A compiled graph that runs in the pool of its card; stands for ``compile_fx.cudagraphify``."""
        del options
        self._mode.machine.warn("compiled-graphs", GRAPHS)
        static, calls = frozenset(static_input_idxs), 0

        def run(inputs: list[Any]) -> Any:
            nonlocal calls
            calls += 1
            with self._in_pool(device_index, clear=calls <= 2):
                if calls > 1:
                    inputs[:] = [
                        value if i in static or not _is_on_card(value) else value.clone()
                        for i, value in enumerate(inputs)
                    ]
                return model(inputs)

        return run

    @contextmanager
    def _in_pool(self, device: int, *, clear: bool) -> Iterator[None]:
        """Requests of the block go to the pool, on its stream; while it records, without cuBLAS's workspaces."""
        machine = self._mode.machine
        if device not in self._pools:
            self._pools[device] = new_pool_id(user_created=True), machine.new_stream(device)
        pool, stream = self._pools[device]
        allocator, before = machine.devices[device].allocator, machine.current_stream(device)
        if clear:
            self._mode.workspaces.clear()
        machine.set_stream(stream, device)
        allocator.begin_pool(pool)
        allocator.mark_capture_begin()
        try:
            yield
        finally:
            allocator.mark_capture_end()
            allocator.end_pool(pool)
            machine.set_stream(before, device)
            if clear:
                self._mode.workspaces.clear()


def _is_on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


_ALIGNMENT = 16  # torch/_inductor/utils.py: GPU_ALIGN_BYTES, in bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a compiled graph.

    Attributes:
        label: what it runs, as the trace names it.
        frames: lines of the program for which it stands, innermost first; none in a backward pass, which the
            program enters at one line.
    """

    label: str
    frames: tuple[Frame, ...] = ()


_NO_STEP = Step(label="inductor")

_CHECKS = (
    "assert_size_stride",
    "assert_alignment",
    "assert_size_stride_grouped",  # since 2.14
    "assert_tensor_metadata",  # since 2.14, of results that torch asks for their dtype as well
)
"""Checks of tensors between the steps of a program (torch/_inductor/codegen/wrapper.py)."""


class GraphPlayer:
    """Runs compiled graphs on a virtual card."""

    def __init__(self, mode: OpRunner) -> None:
        self.mode = mode
        self._step = _NO_STEP
        self._caller: tuple[Frame, ...] = ()

    @property
    def step(self) -> Step:
        """What is being run."""
        return self._step

    @step.setter
    def step(self, step: Step) -> None:
        self._step = step
        self.mode.meter.stacks.origin = step.frames or self._caller

    def play(self, run: Callable[[list[Any]], Any], inputs: list[Any], *, backward: bool) -> Any:
        """Run a graph.

        Args:
            inputs: its arguments, which it takes out of the list.
            backward: whether it is a backward pass. What a forward pass returns, it returns to the program and to
                its backward pass: those are activations. All else is gone when it ends.
        """
        with self._attributed(backward=backward):
            results = run(inputs)
        if not backward and self.mode.meter.phases.phase in (ProgramPhase.FORWARD, ProgramPhase.BACKWARD):
            for tensor in tensors_in(tuple(results)):
                record = self.mode.meter.record_of(tensor) if type(tensor) is FakeTensor else None
                if record is not None and record.category == Category.TEMPORARIES:
                    self.mode.meter.tag(tensor, Category.ACTIVATIONS)
        return results

    @contextmanager
    def _attributed(self, *, backward: bool) -> Iterator[None]:
        meter = self.mode.meter
        before = meter.category
        # Autograd's threads show the frames of torch that run the graph, and none of the program.
        self._caller = meter.backward_frames if backward else ()
        if meter.phases.phase is not ProgramPhase.SETUP:
            meter.category = Category.TEMPORARIES
        try:
            yield
        finally:
            meter.category = before
            self._caller = ()
            self.step = _NO_STEP

    # -- what programs call --------------------------------------------------------------------------------------

    def namespace(self) -> dict[str, Any]:
        """Names that a program finds instead of those that it would import."""
        return {
            "empty_strided_cuda": self.empty_strided,
            "empty_strided_cpu": self.empty_on_host,
            "empty_strided_cpu_pinned": self.empty_on_host,
            "reinterpret_tensor": self.reinterpret,
            "alloc_from_pool": self.from_pool,
            **dict.fromkeys(_CHECKS, _nothing),
            "copy_if_misaligned": self.aligned,
            "copy_misaligned": self.aligned,  # its name in 2.12
        }

    def empty_strided(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the current card."""
        out = self._make(size, stride, dtype, torch.device("cuda", self.mode.machine.current_device))
        meter = self.mode.meter
        meter.adopt(out, self._step.label, extents=meter.numbers.named(size) if meter.assuming else ())
        return out

    def empty_on_host(self, size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the host, which holds no values either."""
        return self._make(size, stride, dtype, torch.device("cpu"))

    def _make(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        meta = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return self.mode.describer.factory.make(meta, device)

    def reinterpret(self, tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
        """The same memory in another shape (torch/csrc/dynamo/guards.cpp, ``_reinterpret_tensor``)."""
        return self._view(tensor, tensor.dtype, size, stride, int(tensor.storage_offset()) + offset)

    def from_pool(
        self, pool: torch.Tensor, offset: int, dtype: torch.dtype, size: Any, stride: Any
    ) -> torch.Tensor:
        """A part of a pool that begins ``offset`` bytes after its start (torch/csrc/inductor/inductor_ops.cpp)."""
        return self._view(pool, dtype, size, stride, offset // dtype.itemsize)

    def _view(
        self, base: torch.Tensor, dtype: torch.dtype, size: Any, stride: Any, offset: int
    ) -> torch.Tensor:
        if type(base) is not FakeTensor:  # real, on the host
            return torch.empty(0, dtype=dtype).set_(base.untyped_storage(), offset, size, stride)
        meta = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), offset, size, stride)
        return self.mode.describer.factory.make(meta, base.fake_device)

    def aligned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at an address that kernels can take: itself, or a copy."""
        return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()

    def kernel(self, name: str, written: frozenset[int] | None) -> Kernel:
        """A stand-in for a kernel.

        Args:
            written: positions of the arguments that it writes; None: it may write all.
        """
        return Kernel(self, name, written)

    def launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        """Let the time of a kernel pass, and forget the values of what it writes."""
        mode = self.mode
        moved, device = 0, None
        for position, tensor in enumerate(args):
            if type(tensor) is not FakeTensor:
                continue
            moved += tensor.numel() * tensor.element_size()
            device = tensor.fake_device if tensor.fake_device.type == "cuda" else device
            if kernel.written is None or position in kernel.written:
                mode.shadows.forget(tensor)
                mode.meter.expect(tensor, None)
        if device is not None:
            mode.meter.ops += 1
            index = device.index or 0
            spec, rates = mode.machine.devices[index].spec, mode.machine.rates
            mode.machine.advance(1e6 * roofline.traffic_seconds(moved, spec, rates), index)


class Kernel:
    """Stands for a fused kernel: it runs in no memory of its own."""

    def __init__(self, player: GraphPlayer, name: str, written: frozenset[int] | None) -> None:
        self._player = player
        self.name = name
        self.written = written

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch it."""
        del kwargs
        self._player.launch(self, args)

    __call__ = run


def _nothing(*args: Any) -> None:
    """A check that holds by construction."""
