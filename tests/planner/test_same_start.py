"""A workload's run on the virtual card has one peak, whatever ran before in the process."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.workload import Workload

BACKEND = VirtualBackend(find_gpu("RTX 4090"))


class Cyclic(nn.Module):
    """Leaves tensors in reference cycles: only Python's collector frees them, whenever that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(60):
            x = self.layer(x)
            ring = [x.detach().repeat(8, 1)]
            ring.append(ring)  # type: ignore[arg-type]
        return x


def _drawn(batch_size: int) -> torch.Tensor:
    """A batch of a length that is drawn."""
    return torch.randn(batch_size + int(torch.randint(0, 64, ())) + random.randrange(64), 64)


def _workload(model: Callable[[], nn.Module], batch: Callable[[int], torch.Tensor]) -> Workload:
    return Workload(
        model=model,
        batch=lambda batch_size: batch(batch_size),
        sizes={"batch_size": 32},
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))


CYCLIC = _workload(Cyclic, lambda batch_size: torch.randn(batch_size, 64))
DRAWN = _workload(_plain, _drawn)
OTHER = _workload(_plain, lambda batch_size: torch.randn(batch_size * 3, 64))


def cost(workload: Workload) -> StepCost:
    return BACKEND.step_cost(workload, dict(workload.sizes))


def _in_a_thread() -> None:
    thread = threading.Thread(target=lambda: cost(OTHER))
    thread.start()
    thread.join()


def _on_the_host() -> None:
    torch.randn(11), random.random()
    kept = [[index] for index in range(1234)]
    kept.append(kept)  # type: ignore[arg-type]


BEFORE = {
    "itself": lambda workload: cost(workload),
    "another": lambda workload: cost(OTHER),
    "another in a thread": lambda workload: _in_a_thread(),
    "work on the host": lambda workload: _on_the_host(),
    "its profile": lambda workload: BACKEND.profile_step(workload, dict(workload.sizes), lambda model: ()),
}


@pytest.mark.parametrize("workload", [CYCLIC, DRAWN], ids=["cyclic", "drawn"])
def test_a_workload_has_one_cost_whatever_ran_before(workload: Workload) -> None:
    alone = cost(workload)
    for name, before in BEFORE.items():
        before(workload)
        assert cost(workload) == alone, f"after {name}"


def test_what_only_cycles_hold_counts_until_the_step_is_over() -> None:
    rings, workspaces = 60 * 32 * 64 * 8 * 4, 2 * 8_519_680
    peak = cost(CYCLIC).peak_allocated_bytes
    assert workspaces + rings < peak < workspaces + 2 * rings, "those of one step"


def test_the_process_goes_on_as_if_nothing_had_run() -> None:
    torch.manual_seed(3)
    random.seed(3)
    expected = float(torch.randn(())), random.random()
    torch.manual_seed(3)
    random.seed(3)
    cost(DRAWN)
    assert (float(torch.randn(())), random.random()) == expected
    assert gc.isenabled()
