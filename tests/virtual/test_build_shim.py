"""What is done once in a process so that fake ``cuda`` tensors go through autograd."""

import os

import pytest
import torch

from vramfit.virtual import build_shim


def test_a_process_checks_itself_once_and_a_fork_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[None] = []
    backward = torch.Tensor.backward

    def counted(self: torch.Tensor) -> None:
        ran.append(None)
        backward(self)

    monkeypatch.setattr(torch.Tensor, "backward", counted)
    monkeypatch.setattr(build_shim, "_passed_in", None)
    build_shim.install()
    build_shim.self_check()
    build_shim.self_check()
    assert len(ran) == 1
    own = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: own + 1)
    build_shim.self_check()
    assert len(ran) == 2
