"""Several checks on one virtual GPU: each sees its own rounds only."""

from __future__ import annotations

import torch
from torch import Tensor

from vramfit import VirtualGPU, check_leaks

MIB = 1 << 20


def test_checks_in_one_recording_do_not_see_each_other() -> None:
    kept: list[Tensor] = []
    with VirtualGPU("RTX 4090", alloc_conf=""):
        before = check_leaks(lambda: torch.ones(3, device="cuda"), rounds=9)
        found = check_leaks(lambda: kept.append(torch.ones(MIB // 4, device="cuda")), owners=0)
    assert len(before.levels) == 12
    assert len(found.levels) == 8
    assert found.bytes_per_step == MIB
