"""The search on the virtual GPU: combinations, and sizes made as large as fits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.gpus import find_gpu
from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.cost import StepCost
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.largest_size import grown_size, search_for
from vramfit.planner.plans import MEMORY, NothingFits, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.techniques import AppliedWorkload, Choice, Numerics, find_technique
from vramfit.techniques.low_precision_training import LowPrecisionTrainingSetting
from vramfit.workload import Workload

MIB = 1 << 20
GPU = find_gpu("RTX 4090")
CONTEXT = GPU.typical_context_bytes


class Deep(nn.Module):
    """Blocks whose parameters outweigh a small batch."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def workload(width: int, batch_size: int) -> Workload:
    return Workload(
        model=lambda: Deep(width),
        # The host keeps one row of it: filling gigabytes takes longer than all else.
        batch=lambda batch_size: torch.ones(1, width).expand(batch_size, width),
        sizes={"batch_size": batch_size},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=adamw,
    )


def _request(asked: Workload, budget: int, **other: object) -> PlanRequest:
    return PlanRequest(
        workload=asked,
        sizes=asked.sizes,
        budget_bytes=CONTEXT + budget,
        host_bytes=1 << 34,
        **other,  # type: ignore[arg-type]
    )


def _device() -> VirtualBackend:
    return VirtualBackend(GPU, alloc_conf="", host_bytes=1 << 34)


def test_techniques_that_fit_only_together_are_found() -> None:
    # 8 matrices of 4 MiB: with gradients and two states 128 MiB, and the step takes as much as one more of them.
    asked = workload(1024, 64)
    budget = 70 * MIB
    allowed = frozenset({"low-precision-training", "optimizer-offload", "optimizer-kernel"})
    request = _request(asked, budget, numerics=Numerics.PRECISION, allowed=allowed)
    search = PlanSearch(Candidates(device=_device(), request=request))
    plan = search.plan()
    assert {"low-precision-training", "optimizer-offload"} == {choice.name for choice in plan.choices}
    alone = [
        candidate.profile.peak_reserved_bytes
        for candidate in search.candidates.seen()
        if len(candidate.choices) == 1
    ]
    assert len(alone) >= 7
    assert min(alone) > budget
    priced = _device().step_cost(plan.apply(asked), dict(asked.sizes), request.limit)
    assert priced.fits
    assert priced.figures == plan.after


def test_a_search_goes_on_from_techniques_that_it_begins_with() -> None:
    start = Choice(technique=find_technique("low-precision-training"), setting=LowPrecisionTrainingSetting())
    request = _request(
        workload(256, 1 << 15),
        1 << 30,
        objective=MEMORY,
        numerics=Numerics.PRECISION,
        allowed=frozenset({"low-precision-training", "optimizer-kernel"}),
    )
    search = PlanSearch(Candidates(device=_device(), request=request), start=(start,))
    best = search.best()
    assert "low-precision-training" in {choice.name for choice in best.candidate.choices}
    assert any(
        len(candidate.choices) > 1 and start in candidate.choices for candidate in search.candidates.seen()
    )


def test_a_size_is_made_as_large_as_fits() -> None:
    asked = workload(256, 1 << 16)  # of a size to which the allocator's segments of 20 MiB are little
    request = _request(
        asked, 1 << 30, objective="batch", allowed=frozenset({"activation-checkpointing"}), entries=False
    )
    _, plan = search_for(_device(), request, lambda _text: None)
    assert plan.aim.objective == "batch_size"
    found = plan.aim.sizes["batch_size"]
    planned = plan.apply(asked)
    assert _device().step_cost(planned, {"batch_size": found}, request.limit).fits
    assert not _device().step_cost(planned, {"batch_size": found * 11 // 10}, request.limit).fits
    assert not _device().step_cost(asked, {"batch_size": found * 2 // 3}, request.limit).fits


@pytest.mark.parametrize(
    ("objective", "name"), [("batch", "images"), ("sequence", "sequence_length"), ("side", "side")]
)
def test_sizes_go_by_their_names_or_by_what_they_are(objective: str, name: str) -> None:
    asked = replace(workload(64, 4), sizes={"images": 4, "sequence_length": 16, "side": 8})
    assert grown_size(_request(asked, 1 << 30, objective=objective)) == name


def test_an_objective_that_is_none_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"'sequence' is no objective of this workload\. .*memory.*batch_size"
    ):
        search_for(_device(), _request(workload(64, 4), 1 << 30, objective="sequence"), print)


def test_the_lowest_peak_is_that_of_a_run() -> None:
    asked = workload(256, 4096)
    request = _request(
        asked,
        1 << 30,
        objective=MEMORY,
        allowed=frozenset({"activation-checkpointing", "micro-batching"}),
        recipes=False,
    )
    plan = PlanSearch(Candidates(device=_device(), request=request)).plan()
    assert plan.after.peak_allocated_bytes < plan.before.peak_allocated_bytes / 3
    # Priced by eight of the pieces, run with all of them.
    full = _device().step_cost(plan.apply(asked), dict(asked.sizes), None)
    assert full.figures.total_bytes == plan.after.total_bytes
    assert full.step_seconds == pytest.approx(plan.after.step_seconds, rel=0.03)


class Flattened(nn.Module):
    """Views what convolutions give, as it lies in memory without channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 8, 3, padding=1)
        )
        self.head = nn.Linear(8 * 32 * 32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.convolutions(x).view(len(x), -1))


def test_a_technique_that_breaks_the_model_is_left_out_and_told() -> None:
    asked = Workload(
        model=Flattened,
        batch=lambda batch_size: torch.ones(batch_size, 3, 32, 32),
        sizes={"batch_size": 256},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=adamw,
    )
    request = _request(asked, 1 << 30, allowed=frozenset({"channels-last", "tf32"}), entries=False)
    plan = PlanSearch(Candidates(device=_device(), request=request)).plan()
    assert "channels-last" not in {choice.name for choice in plan.choices}
    (note,) = plan.notes
    assert note.startswith("channels-last is left out: the workload fails with it (RuntimeError: ")


@pytest.mark.parametrize("host", [100, 300])
def test_what_is_offloaded_stays_within_the_hosts_budget(host: int) -> None:
    asked = workload(1024, 4096)
    request = replace(
        _request(asked, 1 << 30, objective=MEMORY, allowed=frozenset({"activation-offload"}), entries=False),
        host_bytes=host * MIB,
    )
    plan = PlanSearch(Candidates(device=_device(), request=request)).plan()
    assert plan.fits
    assert plan.after.host_bytes <= host * MIB
    assert not replace(plan, aim=replace(plan.aim, host_budget_bytes=1)).fits or not plan.entries
    if host == 300:
        assert plan.after.host_bytes > 100 * MIB


class Positions(nn.Module):
    """A table of positions that ends, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 100:
            raise ValueError(f"sequence of {x.shape[1]}, and there are 100 positions")
        return self.layer(x)


def test_a_size_ends_where_the_model_does() -> None:
    asked = Workload(
        model=Positions,
        batch=lambda batch_size, sequence_length: torch.ones(batch_size, sequence_length, 64),
        sizes={"batch_size": 2, "sequence_length": 16},
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=adamw,
    )
    request = _request(
        asked, 1 << 30, objective="sequence", allowed=frozenset({"activation-checkpointing"}), entries=False
    )
    _, plan = search_for(_device(), request, lambda _text: None)
    assert plan.aim.sizes["sequence_length"] == 100
    assert plan.notes[-1].startswith("sequence_length 101 is too large for the workload itself (ValueError: ")


def test_a_combination_that_fails_or_is_refused_is_told() -> None:
    class Failing(VirtualBackend):
        error: Exception = RuntimeError("two hooks on one tensor")

        def profile_step(self, *_: object) -> Any:
            raise self.error

    device = Failing(GPU, alloc_conf="")
    candidates = Candidates(device=device, request=_request(workload(32, 4), 1 << 30))
    tf32, kernel, release = (
        Choice(technique=find_technique(name), setting=find_technique(name).setting_type())
        for name in ("tf32", "optimizer-kernel", "early-release")
    )
    assert candidates.run((tf32, kernel)) is None
    device.error = UsageError("the model has no such place", "Choose another")
    assert candidates.run((tf32, release)) is None
    assert candidates.notes(()) == (
        "tf32 with optimizer-kernel is left out: the workload fails with it (RuntimeError: two hooks on one tensor).",
        "tf32 with early-release is left out: the model has no such place.",
    )


def test_a_plan_that_cannot_be_run_is_none_and_says_why() -> None:
    class Breaking(VirtualBackend):
        def step_cost(self, workload: Workload, sizes: dict[str, int], budget: int | None = None) -> StepCost:
            if isinstance(workload, AppliedWorkload):
                raise RuntimeError("these two do not go together")
            return super().step_cost(workload, sizes, budget)

    device = Breaking(GPU, alloc_conf="", host_bytes=1 << 34)
    asked, allowed = workload(256, 1 << 16), frozenset({"activation-checkpointing"})
    with pytest.raises(NothingFits) as error:
        PlanSearch(
            Candidates(device=device, request=_request(asked, 700 * MIB, allowed=allowed, entries=False))
        ).plan()
    assert not error.value.plan.fits
    assert error.value.plan.notes[0] == (
        "activation-checkpointing is left out: the workload fails with it "
        "(RuntimeError: these two do not go together)."
    )
