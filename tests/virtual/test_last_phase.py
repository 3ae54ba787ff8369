"""Where the last phase of a program on a virtual card ends: before the program lets go of what it holds."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from vramfit.analysis import growth, phases
from vramfit.capture.step_counter import count_steps
from vramfit.launch.stopping import Stopping
from vramfit.options.limits import Limits
from vramfit.patching import PatchStack
from vramfit.trace import TEARDOWN, Run
from vramfit.units import MIB
from vramfit.virtual.gpu import VirtualGPU

STEPS = 4
BATCH = 8 * 1024 * 4


def train(*, zeroed_last: bool) -> None:
    """A model that lives in a function, as in most scripts: 16 MiB of it, 16 of its gradients, 32 of Adam's states."""
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(STEPS):
        if not zeroed_last:
            optimizer.zero_grad()
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        if zeroed_last:
            optimizer.zero_grad()


def run(folder: Path, steps: int | None, *, zeroed_last: bool) -> Run:
    with PatchStack() as patches, VirtualGPU("24GiB") as gpu:
        count_steps(gpu.meter, Stopping(folder, Limits(steps=steps)), patches)
        with contextlib.suppress(SystemExit):
            train(zeroed_last=zeroed_last)
        gc.collect()
    return gpu.run


@pytest.mark.parametrize("zeroed_last", [False, True])
@pytest.mark.parametrize("steps", [None, 3], ids=["ends by itself", "is ended"])
def test_the_last_step_ends_as_the_one_before(tmp_path: Path, steps: int | None, zeroed_last: bool) -> None:
    found = phases(run(tmp_path, steps, zeroed_last=zeroed_last).trace)
    ends = [phase.end_allocated for phase in found if phase.part == "optimizer"]
    assert len(ends) == (steps or STEPS)
    assert len(set(ends[:-1])) == 1
    assert ends[0] > 64 * MIB, "the model, states, and 16.25 MiB of workspaces"
    assert ends[0] - ends[-1] == (0 if steps else BATCH), (
        "a program that ends by itself has dropped its last batch"
    )
    assert growth(found).end_allocated == tuple(ends)
    assert TEARDOWN not in {phase.part for phase in found}
