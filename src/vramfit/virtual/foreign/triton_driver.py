"""Triton's driver on a virtual card: which card it is, which stream is current, and timings for the autotuner.

The autotuner runs as it is: each configuration is called twice, to warm up and to be timed, no difference is noted, and
the first is taken. On a card that would be the quickest, of which nothing here knows; the buffer of 256 MB that clears
the card's cache between two runs (triton/testing.py, ``do_bench``) is allocated as there, and so are copies of tensors
that are restored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from vramfit.patching import PatchStack, after_import
from vramfit.virtual.op_runner import OpRunner

_CACHE_BYTES = 256 << 20  # triton/backends/nvidia/driver.py: get_empty_cache_for_benchmark
UNTUNED = (
    "Triton's autotuner cannot time configurations here, and takes the first: on a card it may take another, which "
    "matters where scratch memory depends on it"
)


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Give Triton a driver, and its benchmark no loop."""

    def give_driver(module: ModuleType) -> None:
        driver = _driver(mode)
        patches.set(module.driver, "_default", driver)
        patches.set(module.driver, "_active", driver)

    def give_benchmark(module: ModuleType) -> None:
        def do_bench(
            fn: Callable[[], object],
            warmup: float = 25,
            rep: float = 100,
            grad_to_none: Any = None,
            quantiles: Sequence[float] | None = None,
            return_mode: str = "mean",
        ) -> Any:
            return benchmark(mode, fn, quantiles, return_mode)

        original = module.do_bench
        patches.set(module, "do_bench", do_bench)
        patches.rebind([(original, do_bench)])

    after_import({"triton.runtime.driver": give_driver, "triton.testing": give_benchmark}, patches)


def benchmark(
    mode: OpRunner, fn: Callable[[], object], quantiles: Sequence[float] | None, return_mode: str = "mean"
) -> Any:
    """Call a function, then once more with the benchmark's buffer there; gives its simulated milliseconds.

    Returns:
        One figure, or a list of equal ones where quantiles or all are asked for.
    """
    mode.machine.warn("kernel-untuned", UNTUNED)
    fn()
    buffer = torch.empty(_CACHE_BYTES // 4, dtype=torch.int, device="cuda")
    before = mode.machine.clock_us
    fn()
    del buffer
    milliseconds = max((mode.machine.clock_us - before) / 1e3, 1e-3)
    if quantiles:
        return [milliseconds] * len(quantiles)
    return [milliseconds] if return_mode == "all" else milliseconds


def _driver(mode: OpRunner) -> Any:
    """An object of Triton's driver class; made here, where Triton is imported."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver

    def properties(device: int) -> dict[str, int]:
        found: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": found.shared_memory_per_block_optin,
            "max_num_regs": found.regs_per_multiprocessor,
            "multiprocessor_count": found.multi_processor_count,
            "warpSize": found.warp_size,
            "max_threads_per_sm": found.max_threads_per_multi_processor,
        }

    class VirtualDriver(GPUDriver):  # type: ignore[misc]  # untyped where Triton is not installed
        utils = SimpleNamespace(get_device_properties=properties)

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> Any:
            major, minor = torch.cuda.get_device_capability()
            return GPUTarget("cuda", major * 10 + minor, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", torch.cuda.current_device())

        def get_device_interface(self) -> Any:
            return torch.cuda

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Callable[..., Any]:
            return lambda fn, quantiles=None, **options: benchmark(mode, fn, quantiles)

        def get_empty_cache_for_benchmark(self) -> torch.Tensor:
            return torch.empty(_CACHE_BYTES // 4, dtype=torch.int, device="cuda")

        def clear_cache(self, cache: torch.Tensor) -> None:
            cache.zero_()

    return VirtualDriver()
