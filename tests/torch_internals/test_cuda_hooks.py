"""Whose answer each hook gives, and that a build's own come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vramfit.torch_internals import build_check, build_shim, cuda_hooks
from vramfit.torch_internals.virtual_tables import entries_of

needs_cuda_build = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="the hooks of a CPU build have nothing of their own"
)


def table() -> int:
    """The virtual table that the hooks' object has now."""
    return cuda_hooks._place().value or 0


@pytest.mark.usefixtures("bare")
def test_the_undo_gives_the_own_table_back() -> None:
    own = table()
    undo = cuda_hooks.install()
    assert table() != own
    undo()
    assert table() == own


@needs_cuda_build
@pytest.mark.usefixtures("bare")
def test_a_cuda_build_has_its_own_hooks_and_guard_again_after_leaving() -> None:
    own, count = table(), torch._C._accelerator_hooks_device_count()
    build_shim.install()
    assert table() != own and torch._C._accelerator_hooks_device_count() == 1
    build_shim.uninstall()
    assert table() == own and torch._C._accelerator_hooks_device_count() == count


@needs_cuda_build
@pytest.mark.usefixtures("bare")
def test_no_hook_of_a_cuda_build_reaches_its_runtime() -> None:
    names = cuda_hooks.hook_names(cuda_hooks.interface_table())
    own = entries_of(table(), names.length)
    interface = entries_of(cuda_hooks.interface_table(), names.length)
    build_shim.install()
    now = entries_of(table(), names.length)
    settled = {names.slot(name) for name in cuda_hooks._SETTLED_AT_COMPILE_TIME if names.has(name)}
    ours = {names.slot(name) for name in cuda_hooks._answers() if names.has(name)}
    assert not settled & ours
    for slot in range(cuda_hooks._DESTRUCTORS, names.length):
        if slot in settled:
            assert now[slot] == own[slot]
        elif slot in ours:
            assert now[slot] not in (own[slot], interface[slot])
        else:
            assert now[slot] == interface[slot]
    reaching = (
        "init",
        "hasCUDA",
        "isAvailable",
        "getNumGPUs",
        "isPinnedPtr",
        "getDefaultGenerator",
        "deviceSynchronize",
    )
    assert all(own[names.slot(name)] != now[names.slot(name)] for name in reaching)


def test_a_hook_that_is_not_ours_refuses() -> None:
    build_shim.install()
    with pytest.raises(RuntimeError, match="without ATen_cuda library"):
        torch._cufft_get_plan_cache_size(0)


# -- the card -----------------------------------------------------------------------------------------------------


@pytest.fixture
def on_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hooks for a card of one compute capability."""
    undo = cuda_hooks.describe_cards(lambda: [request.param])
    yield
    undo()


def backend(ask: Callable[[], object]) -> str:
    with FakeTensorMode(allow_fallback_kernels=False):
        return str(ask()).removeprefix("_ConvBackend.")


@pytest.mark.parametrize(
    ("on_card", "bfloat16", "depthwise"),
    [
        ((9, 0), "Cudnn", "Cudnn"),
        ((8, 0), "Cudnn", "Cudnn"),
        ((7, 5), "Slow2d", "Cudnn"),  # aten/src/ATen/cuda/detail/CUDAHooks.cpp: bfloat16 from 8.0 on
        ((6, 1), "Slow2d", "CudaDepthwise2d"),  # the same: depthwise kernels from 7.0 on
    ],
    indirect=["on_card"],
)
@pytest.mark.usefixtures("on_card")
def test_a_hook_answers_for_the_card(bfloat16: str, depthwise: str) -> None:
    build_shim.install()
    depthwise_layer = build_check._convolution(channels=32, groups=32, dtype=torch.float16)
    assert backend(build_check._convolution(dtype=torch.bfloat16)) == bfloat16
    assert backend(depthwise_layer) == depthwise
    assert backend(build_check._convolution(dilation=2)) == "Cudnn"
