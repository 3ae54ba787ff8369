"""Launches and timings without Triton: a package of its structure stands in, which compiles and runs nothing.

Its names, and who calls whom, are those of triton/runtime/jit.py (``KernelInterface.__getitem__`` calls ``run``),
runtime/driver.py (``DriverConfig`` and its one object), testing.py and backends/ of Triton 3.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20
FILES = {
    "triton/__init__.py": """
        from .runtime.jit import jit
        from . import testing
    """,
    "triton/language.py": """
        constexpr = int
        def load(pointer, mask=None): raise AssertionError("a kernel ran")
        store = arange = program_id = load
    """,
    "triton/runtime/__init__.py": "from .driver import driver",
    "triton/runtime/jit.py": """
        class KernelInterface:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)

        class JITFunction(KernelInterface):
            def __init__(self, fn):
                self.fn, self.pre_run_hooks = fn, []

            def run(self, *args, grid, warmup, **kwargs):
                raise AssertionError("a kernel was compiled")

        def jit(fn):
            return JITFunction(fn)
    """,
    "triton/runtime/driver.py": """
        class DriverConfig:
            def __init__(self):
                self._default = self._active = None

            @property
            def active(self):
                if self._active is None:
                    raise RuntimeError("0 active drivers ([]). There should only be one.")
                return self._active

        driver = DriverConfig()
    """,
    "triton/testing.py": """
        def do_bench(fn, warmup=25, rep=100, grad_to_none=None, quantiles=None, return_mode="mean"):
            raise AssertionError("a card was timed")
    """,
    "triton/backends/__init__.py": "",
    "triton/backends/compiler.py": """
        from collections import namedtuple
        GPUTarget = namedtuple("GPUTarget", "backend arch warp_size")
    """,
    "triton/backends/driver.py": """
        import torch

        class GPUDriver:
            def __init__(self):
                self.get_device_capability = torch.cuda.get_device_capability
                self.get_current_device = torch.cuda.current_device
    """,
    "kernels_of_the_stand_in.py": """
        import triton
        import triton.language as tl

        @triton.jit
        def scaled(x_ptr, out_ptr, n, factor=2, BLOCK: tl.constexpr = 128):
            offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out_ptr + offsets, factor * tl.load(x_ptr + offsets, mask=offsets < n), mask=offsets < n)
    """,
}


def _ours(name: str) -> bool:
    return name.split(".")[0] in ("triton", "kernels_of_the_stand_in")


@pytest.fixture
def kernels(gpu: VirtualGPU, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels' module, imported beside the stand-in; gone afterwards."""
    if "triton" in sys.modules:
        pytest.skip("Triton itself is imported: test_triton.py tries it")
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(line[8:] for line in text.splitlines()) if "\n" in text else text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        import kernels_of_the_stand_in

        yield kernels_of_the_stand_in
    finally:
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]


def test_a_launch_runs_nothing_and_makes_what_it_writes_unknown(gpu: VirtualGPU, kernels: ModuleType) -> None:
    x, out = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
    before, hooked, grids = torch.cuda.memory_allocated(), [], []
    kernels.scaled.pre_run_hooks.append(lambda *args, **kwargs: hooked.append(kwargs))
    kernels.scaled[lambda given: grids.append((given["factor"], given["BLOCK"])) or (1,)](
        x, out, 8, BLOCK=64, num_warps=4
    )
    assert grids == [(2, 64)] and hooked == [{"BLOCK": 64, "num_warps": 4}]
    assert torch.cuda.memory_allocated() == before
    assert x.tolist() == list(range(8)), "it is read only"
    assert [(w.code, w.location) for w in gpu.run.warnings] == [("kernel-not-run", "scaled")]
    out.tolist()
    assert "guessed-value" in {w.code for w in gpu.run.warnings}
    with pytest.raises(ValueError, match=r"at 0\) cannot be accessed from Triton"):
        kernels.scaled[(1,)](torch.ones(8), out, 8)


@pytest.mark.usefixtures("kernels")
def test_what_is_timed_is_called_twice_with_the_buffer_there(gpu: VirtualGPU) -> None:
    import triton

    driver = triton.runtime.driver.active
    assert driver.get_current_target() == ("cuda", 89, 32)
    before, calls = torch.cuda.memory_allocated(), []
    torch.cuda.reset_peak_memory_stats()
    assert triton.testing.do_bench(lambda: calls.append(torch.empty(MIB, device="cuda"))) > 0
    assert len(calls) == 2
    # triton/backends/nvidia/driver.py, get_empty_cache_for_benchmark: 256 MB, beside what both calls keep
    assert torch.cuda.max_memory_allocated() - before == 256 * MIB + 2 * 4 * MIB
    assert {w.code for w in gpu.run.warnings} == {"kernel-untuned"}
