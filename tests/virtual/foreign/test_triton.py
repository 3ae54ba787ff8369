"""Triton kernels on a virtual card. Needs Triton, which installs without one; the kernels are in triton_kernels.py."""

from __future__ import annotations

import pytest
import torch

from vramfit.virtual.gpu import VirtualGPU

triton = pytest.importorskip("triton")
MIB = 1 << 20


def test_a_launch_allocates_nothing_and_what_it_writes_is_unknown(gpu: VirtualGPU) -> None:
    from tests.virtual.foreign.triton_kernels import add

    x, y = torch.arange(8.0, device="cuda"), torch.ones(8, device="cuda")
    out = torch.zeros(8, device="cuda")
    before = torch.cuda.memory_allocated()
    grids = []
    add[lambda meta: grids.append(meta["BLOCK"]) or (1,)](x, y, out, 8, BLOCK=128, num_warps=4)
    assert grids == [128]
    assert torch.cuda.memory_allocated() == before
    assert x.tolist() == list(range(8))
    assert [w.location for w in gpu.run.warnings] == ["add"]
    out.tolist()
    assert {w.code for w in gpu.run.warnings} == {"kernel-not-run", "guessed-value"}


def test_the_autotuner_runs_each_configuration_twice_with_its_buffer(gpu: VirtualGPU) -> None:
    from tests.virtual.foreign.triton_kernels import tuned

    x, out = torch.ones(8, device="cuda"), torch.ones(MIB, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tuned[(1,)](x, out, 8)
    # triton/testing.py do_bench: 256 MB to clear the cache; restore_value: a copy of what is restored
    assert torch.cuda.max_memory_allocated() - before == 256 * MIB + out.nbytes
    torch.cuda.reset_peak_memory_stats()
    tuned[(1,)](x, out, 8)
    assert torch.cuda.max_memory_allocated() == before
    assert tuned.best_config.kwargs == {"BLOCK": 128}


def test_triton_sees_the_virtual_card(gpu: VirtualGPU) -> None:
    driver = triton.runtime.driver.active
    assert driver.get_current_target().arch == 89
    assert driver.get_current_device() == 0
    assert driver.utils.get_device_properties(0)["multiprocessor_count"] == 128
    assert triton.testing.do_bench(lambda: torch.zeros(4, device="cuda")) > 0


def test_a_tensor_of_the_host_is_refused_as_by_triton(gpu: VirtualGPU) -> None:
    from tests.virtual.foreign.triton_kernels import add

    x = torch.ones(8, device="cuda")
    with pytest.raises(ValueError, match=r"at 1\) cannot be accessed from Triton"):
        add[(1,)](x, torch.ones(8), x, 8, BLOCK=128)


def test_operators_over_kernels_run_with_their_scratch_memory(gpu: VirtualGPU) -> None:
    from tests.virtual.foreign.triton_kernels import add

    @torch.library.triton_op("vramfit_test::sum_of", mutates_args={})
    def sum_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(4 * MIB, dtype=torch.uint8, device=x.device)
        out = torch.empty_like(x)
        torch.library.wrap_triton(add)[(scratch.shape[0],)](x, y, out, x.numel(), BLOCK=128)
        return out

    x = torch.ones(8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert sum_of(x, x).shape == (8,)
    assert torch.cuda.max_memory_allocated() - before == 4 * MIB + 512
    torch.library.wrap_triton(add)[(1,)](x, x, x, 8, BLOCK=128)


def test_triton_is_itself_again_afterwards() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, triton.testing.do_bench, driver._active, driver._default
    with VirtualGPU("RTX 4090", alloc_conf=""):
        assert JITFunction.run is not before[0]
    assert before == (JITFunction.run, triton.testing.do_bench, driver._active, driver._default)
