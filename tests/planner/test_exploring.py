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


class _TriedError(Exception):
    """The trial begins: all that is to come before it has been told."""


def test_a_trial_of_micro_batches_waits_until_there_is_a_plan() -> None:
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

    def note(text: str) -> None:
        order.append(text)
        if text == "whether batches can be cut":
            raise _TriedError

    search = PlanSearch(Candidates(device=Listing(), request=request, progress=note))
    with pytest.raises(_TriedError):
        search.plan()
    assert {"full checkpointing", "selective checkpointing"} < set(order[:-1])
    assert search._has_fitting()
