"""The self-check: a hook that stands in the wrong entry is found, named, and nothing else is touched."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import fake_tensor

from vramfit.errors import EnvironmentUnfitError
from vramfit.torch_internals import build_check, build_shim, cuda_hooks, device_guards
from vramfit.torch_internals.virtual_tables import TableNames


def test_a_process_checks_itself_once_and_a_fork_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[None] = []
    backward = torch.Tensor.backward

    def counted(self: torch.Tensor) -> None:
        ran.append(None)
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    monkeypatch.setattr(build_check, "_passed_in", None)
    build_shim.install()
    build_check.self_check()
    build_check.self_check()
    assert len(ran) == 1
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    build_check.self_check()
    assert len(ran) == 2


# -- entries that are not those of their names -----------------------------------------------------------------------

DECISIVE = [
    "isBuilt",
    "hasPrimaryContext",
    "deviceCount",
    "getCurrentDevice",
    "compiledWithCuDNN",
    "supportsDilatedConvolutionWithCuDNN",
    "supportsDepthwiseConvolutionWithCuDNN",
    "supportsBFloat16ConvolutionWithCuDNNv8",
    "versionCuDNN",
    "batchnormMinEpsilonCuDNN",
]


def shifted(monkeypatch: pytest.MonkeyPatch, moved: Callable[[str], bool], by: int = 1) -> None:
    """Let the answers of some methods stand in other entries than theirs."""
    right = TableNames.slot

    def wrong(self: TableNames, name: str) -> int:
        return right(self, name) + (by if moved(name) else 0)

    monkeypatch.setattr(TableNames, "slot", wrong)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("hook", DECISIVE)
def test_a_hook_in_the_entry_beside_its_own_is_refused_by_name(
    hook: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted(monkeypatch, hook.__eq__, by)
    build_shim.install()
    with pytest.raises(EnvironmentUnfitError, match=hook) as refused:
        build_check.self_check()
    assert torch.__version__ in str(refused.value) or hook == "hasPrimaryContext"
    assert build_check._passed_in is None


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("by", [1, -1])
def test_a_shifted_table_is_refused(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted(monkeypatch, lambda name: name not in ("uncheckedSetDevice", "getDevice"), by)
    build_shim.install()
    with pytest.raises(EnvironmentUnfitError, match="the CUDA hook"):
        build_check.self_check()


@pytest.mark.usefixtures("bare")
def test_a_shifted_guard_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shifted(monkeypatch, "uncheckedSetDevice".__eq__)  # getStream, which sets nothing
    build_shim.install()
    with pytest.raises(EnvironmentUnfitError, match="uncheckedSetDevice or getDevice of the device guard"):
        build_check.self_check()


# -- what the check leaves alone ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bare")
def test_what_the_program_has_set_neither_disturbs_the_check_nor_is_lost() -> None:
    build_shim.install()
    torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic = False, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    device_guards.set_current_device(1)
    try:
        build_check.self_check()
        assert not torch.backends.cudnn.enabled and torch.backends.cudnn.deterministic
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert device_guards.current_device() == 1
    finally:
        torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic = True, False
        torch.use_deterministic_algorithms(False)
        device_guards.set_current_device(0)


@pytest.mark.usefixtures("bare")
def test_no_context_is_made_on_a_card_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda *device: made.append(*device), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    build_shim.install()
    build_check.self_check()
    assert made == []


@pytest.mark.usefixtures("bare")
def test_a_question_that_torch_knows_no_more_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    build_shim.install()
    monkeypatch.delattr(torch._C, "_accelerator_hooks_device_count")
    build_check.self_check()


@pytest.mark.usefixtures("bare")
def test_the_answers_of_the_check_are_gone_afterwards() -> None:
    build_shim.install()
    build_check.self_check()
    assert torch._C._accelerator_hooks_device_count() == len(cuda_hooks._before_any())
