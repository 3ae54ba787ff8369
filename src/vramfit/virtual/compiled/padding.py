"""Inductor's trials of padded matrix products, on the virtual card.

While it compiles, Inductor times products whose sides do not suit the tensor cores, as they are and padded
(``pad_mm``). It makes operands for that on the card, and both results: with a vocabulary of 50,257 that can be the peak
of a program. torch's own code runs here, so the same requests are made. Nothing is timed: products stay as they are. A
machine keeps its choices on disk, so a program that was compiled there before tries nothing and needs less; here it is
always the first run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.compiler import inductor_utils, pad_mm
from vramfit.torch_internals.dispatch import disable_current_modes
from vramfit.virtual import roofline
from vramfit.virtual.op_runner import OpRunner

_DECISIONS = ("_should_pad", "_should_pad_bench")
"""What decides on one product: its name since 2.11, and before."""


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Let Inductor try padded products on the virtual card."""
    name = next((name for name in _DECISIONS if hasattr(pad_mm, name)), None)
    if name is None:
        patches.set(pad_mm, "has_triton", lambda *args, **kwargs: False)
        return
    decide = inspect.unwrap(getattr(pad_mm, name))  # what keeps choices of other cards is around it
    tried: set[str] = set()

    @contextmanager
    def here() -> Iterator[None]:
        # The compiler's modes would remember our views, and with them their memory.
        with disable_current_modes(), mode:
            yield

    def in_force(key: str) -> bool | None:
        return False if key in tried else None

    def decided(*args: Any, **kwargs: Any) -> Any:
        device = mode.machine.devices[mode.machine.current_device]

        def operations(dtype: torch.dtype) -> float:
            return roofline.flops_per_second(device.spec, dtype) / 1e12

        with PatchStack() as once:
            once.set(pad_mm, "no_dispatch", here)
            once.set(inductor_utils, "get_device_tflops", operations)
            once.set(inductor_utils, "get_gpu_dram_gbps", lambda: device.spec.bandwidth / 1e9)
            return decide(*args, **kwargs)

    def keep(key: str, value: bool) -> None:
        del value
        tried.add(key)

    patches.set(pad_mm, "has_triton", lambda *args, **kwargs: True)
    patches.set(pad_mm, "get_cached_should_pad", in_force)
    patches.set(pad_mm, "set_cached_should_pad", keep)
    patches.set(pad_mm, "get_cached_base_mm_benchmark_time", lambda key: None)
    patches.set(pad_mm, "set_cached_base_mm_benchmark_time", lambda key, value: None)
    patches.set(pad_mm, "get_do_bench", lambda: _run)
    patches.set(pad_mm, name, decided)


def _run(call: Callable[[], Any], **options: Any) -> float:
    """Run what would be timed, as ``InductorBenchmarker`` does: first alone, then beside what flushes the L2 cache."""
    del options
    call()
    l2_bytes = torch.cuda.get_device_properties().L2_cache_size
    flushed = torch.empty(l2_bytes // 4, dtype=torch.int, device="cuda")
    call()
    call()
    del flushed
    return 1.0
