"""Operators that a program registers, with and without a description."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import vramfit
from vramfit.virtual.foreign.fake_kernels import KERNELS
from vramfit.virtual.gpu import VirtualGPU

MIB = 1 << 20


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """Operators of a library loaded from C++, which have no Python."""
    with torch.library._scoped_library("vramfit_test", "FRAGMENT") as made:
        yield made


@pytest.fixture(autouse=True)
def no_stand_ins() -> Iterator[None]:
    before = dict(KERNELS)
    yield
    KERNELS.clear()
    KERNELS.update(before)


def peak_of(call: object) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()  # type: ignore[operator]
    return torch.cuda.max_memory_allocated() - before


def test_an_operator_in_python_runs_as_it_is_with_its_scratch_memory(gpu: VirtualGPU) -> None:
    @torch.library.custom_op("vramfit_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(4 * MIB, dtype=torch.uint8, device=x.device)
        return (x + scratch.numel() * 0).mul(2)

    given = torch.arange(4.0, device="cuda")
    assert doubled(given).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert peak_of(lambda: doubled(given)) >= 4 * MIB


def test_the_description_of_an_operator_is_taken_where_there_is_one(gpu: VirtualGPU) -> None:
    @torch.library.custom_op("vramfit_test::compiled", mutates_args=())
    def compiled(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it calls what cannot run")

    compiled.register_fake(lambda x: torch.empty_like(x))
    given = torch.zeros(MIB, device="cuda")
    assert peak_of(lambda: compiled(given)) == given.nbytes


def test_an_operator_without_description_is_named_with_what_the_user_can_do(
    gpu: VirtualGPU, library: torch.library.Library
) -> None:
    library.define("pooled(Tensor x) -> Tensor")
    library.impl("pooled", lambda x: x, "CPU")
    with pytest.raises(
        NotImplementedError, match=r"vramfit_test\.pooled.*register_fake.*vramfit\.fake_kernel.*--kernels"
    ):
        torch.ops.vramfit_test.pooled(torch.zeros(4, device="cuda"))


def test_a_stand_in_describes_it_in_three_lines_scratch_memory_included(
    gpu: VirtualGPU, library: torch.library.Library
) -> None:
    library.define("reduced(Tensor(a!) x) -> Tensor")
    library.impl("reduced", lambda x: x, "CPU")

    @vramfit.fake_kernel("vramfit_test::reduced")
    def reduced(x: torch.Tensor) -> torch.Tensor:
        scratch = torch.empty(3 * MIB, dtype=torch.uint8, device=x.device)
        return x.new_empty(scratch.numel() // MIB)

    given = torch.ones(4, device="cuda")
    assert torch.ops.vramfit_test.reduced(given).shape == (3,)
    assert peak_of(lambda: torch.ops.vramfit_test.reduced(given)) == 3 * MIB + 512
    given.tolist()  # the schema says that it is written
    assert {w.code for w in gpu.run.warnings} >= {"kernel-not-run", "guessed-value"}


@pytest.mark.parametrize("name", ["flash_attn", "aten::mm", "torch.add", "a::b::c", "module.not a name"])
def test_names_that_name_no_kernel_are_refused(name: str) -> None:
    with pytest.raises(vramfit.VramfitError, match=r"kernel|torch's own"):
        vramfit.fake_kernel(name)
