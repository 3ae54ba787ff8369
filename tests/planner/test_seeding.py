from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from vramfit import VirtualGPU
from vramfit.planner.seeding import generators_kept, seed_all


def _numpy() -> bytes:
    state: Any = np.random.get_state()  # noqa: NPY002 - what programs draw from
    return bytes(state[1].tobytes())


def test_what_is_drawn_inside_changes_nothing_outside() -> None:
    """On the host, and on a card that is in use."""
    with VirtualGPU("RTX 4090"):
        torch.cuda.manual_seed(5)
        before = (torch.get_rng_state(), torch.cuda.get_rng_state())
        python, numpy = random.getstate(), _numpy()
        with generators_kept():
            seed_all(1)
            torch.rand(3, device="cuda")
            assert not torch.equal(torch.cuda.get_rng_state(), before[1])
            drawn = (random.random(), np.random.rand(), torch.rand(3))  # noqa: NPY002 - programs do
            assert len(drawn) == 3
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(torch.cuda.get_rng_state(), before[1])
        assert random.getstate() == python
        assert _numpy() == numpy
