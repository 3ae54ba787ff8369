"""What a search does not run, since it cannot help."""

from __future__ import annotations

from typing import Any

import pytest
from tests.planner.test_search import CONTEXT, GPU, MIB, workload

from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.plans import PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.workload import Workload


class Listing(VirtualBackend):
    """A card that notes what is run on it."""

    def __init__(self) -> None:
        super().__init__(GPU, alloc_conf="", host_bytes=1 << 34)
        self.ran: list[tuple[str, ...]] = []

    def profile_step(self, workload: Workload, *given: Any) -> Any:
        self.ran.append(tuple(choice.name for choice in getattr(workload, "choices", ())))
        return super().profile_step(workload, *given)


@pytest.mark.parametrize(("budget", "tried"), [(800, True), (850, False), (900, False), (2000, False)])
def test_settings_of_the_allocator_are_tried_only_where_they_could_help(budget: int, tried: bool) -> None:
    # Each result is of 64 MiB: at 800 MiB one less is recomputed with the 24 MiB that the allocator holds beside them.
    asked, device = workload(256, 1 << 16), Listing()
    PlanSearch(Candidates(device=device, request=_request(asked, budget * MIB))).best()
    assert any("allocator-settings" in names for names in device.ran) == tried


def _request(asked: Workload, budget: int) -> PlanRequest:
    return PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=CONTEXT + budget,
        host_bytes=1 << 34,
        allowed=frozenset({"activation-checkpointing", "allocator-settings"}),
        entries=False,
    )


def test_a_trial_of_micro_batches_waits_until_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = workload(256, 1 << 16)
    order: list[str] = []
    request = PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=CONTEXT + 800 * MIB,
        host_bytes=1 << 34,
        allowed=frozenset({"activation-checkpointing", "micro-batching", "optimizer-kernel"}),
        entries=False,
    )
    search = PlanSearch(Candidates(device=Listing(), request=request, progress=order.append))
    search.plan()
    assert "whether batches can be cut" in order
    tried = order.index("whether batches can be cut")
    assert order.index("a run with the plan") < tried
    assert order.index("optimizer-kernel") < tried
