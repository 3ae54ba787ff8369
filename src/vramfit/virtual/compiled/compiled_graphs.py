"""CUDA graphs of compiled programs (``mode="reduce-overhead"``): the same requests, in a private pool.

torch/_inductor/cudagraph_trees.py keeps one pool per card and thread. A graph's first call warms up in that pool, the
second records in it, and later ones replay: their results lie where the recording put them. Inputs that do not keep
their address are copied into the pool from the recording on. Here every call makes its requests in the pool, which
caches: replays find the blocks of the calls before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_cuda.cuda_graphs import PoolId, new_pool_id


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
        static, calls = frozenset(static_input_idxs), 0

        def run(inputs: list[Any]) -> Any:
            nonlocal calls
            calls += 1
            with self._in_pool(device_index, clear=calls <= 2):
                if calls > 1:
                    inputs[:] = [
                        value.clone()
                        if isinstance(value, torch.Tensor) and _moves(value, i in static)
                        else value
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
        try:
            yield
        finally:
            allocator.end_pool(pool)
            machine.set_stream(before, device)
            if clear:
                self._mode.workspaces.clear()


def _moves(tensor: torch.Tensor, static: bool) -> bool:
    return not static and tensor.device.type == "cuda"
