"""Samples of a workload for techniques of inference, and plans that are made by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.techniques.resnet import ResNet
from tests.techniques.samples import inference
from tests.techniques.toys import numbers
from torch import nn

from vramfit.gpus import find_gpu
from vramfit.planner.candidates import Candidates
from vramfit.planner.devices.virtual_backend import VirtualBackend
from vramfit.planner.plan_file import plan_from_toml, plan_to_toml
from vramfit.planner.plans import Plan, PlanRequest
from vramfit.planner.search import PlanSearch
from vramfit.planner.workload_samples import WorkloadSamples
from vramfit.techniques import Numerics
from vramfit.techniques.batch_norm_folding import find_foldable
from vramfit.techniques.half_inference import HalfInferenceSetting
from vramfit.workload import Workload

pytestmark = pytest.mark.torch_versions

SIZES = {"batch_size": 8, "image_size": 64}


class Net(nn.Module):
    """A small ResNet with a table twice, and a head that evaluation does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.auxiliary = ResNet((1, 1, 1, 1), 16, 10), nn.Linear(512, 512)
        self.register_buffer("table", torch.arange(1 << 16).float().view(256, 256) / 1e5)
        self.register_buffer("again", self.table.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.table[0, 1] - self.again[0, 1]


def workload() -> Workload:
    plain = inference(Net, lambda count: numbers(count, 3, 64, 64))
    return replace(
        plain,
        batch=lambda batch_size, image_size: numbers(batch_size, 3, image_size, image_size),
        sizes=SIZES,
    )


def samples(plain: Workload, flops: float = 1e9) -> WorkloadSamples:
    return WorkloadSamples(workload=plain, sizes=plain.sizes, flops=flops, model_bytes=1 << 22)


def request(plain: Workload, numerics: Numerics, **more: object) -> PlanRequest:
    return PlanRequest(
        workload=plain,
        sizes=dict(plain.sizes),
        budget_bytes=1 << 30,
        margin_bytes=0,
        host_bytes=1 << 30,
        numerics=numerics,
        objective="memory",
        **more,  # type: ignore[arg-type]
    )


def test_a_pass_is_watched_without_values_and_like_the_real_one() -> None:
    given = samples(workload())
    traced = given.traced()
    assert traced is not None and given.traced() is traced
    assert all(one.is_meta for one in traced.model.parameters())
    model = workload().make_model()
    real = find_foldable(model, numbers(2, 3, 64, 64))
    shaped = find_foldable(model.to("meta"), numbers(2, 3, 64, 64).to("meta"))
    assert real == shaped and len(real.norms) == 17


def test_a_model_that_reads_values_is_watched_at_small_sizes() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if float(x.sum()) > 0 else x

    traced = samples(inference(Reading, lambda count: torch.ones(count, 4))).traced()
    assert traced is not None and [call.path for call in traced.trace.calls] == ["", "layer"]


def test_samples_are_as_small_as_their_time_allows_and_none_at_all_for_large_models() -> None:
    quick, slow = samples(workload()).small(), samples(workload(), flops=1e11).small()
    assert quick is not None and quick.words == "batch_size 2, image_size 64"
    assert slow is not None and slow.words == "batch_size 2, image_size 32"
    large = WorkloadSamples(workload=workload(), sizes=SIZES, flops=1e9, model_bytes=1 << 50)
    assert large.small() is None and large.valued() is None
    assert large.traced() is not None, "shapes take no memory"


def test_a_limited_search_takes_half_of_what_is_left() -> None:
    short = WorkloadSamples(
        workload=workload(), sizes=SIZES, flops=1e9, model_bytes=1 << 22, left=lambda: 2.0
    ).small()
    assert short is not None and short.seconds == 1.0


def test_a_sample_that_fails_is_none() -> None:
    def fails(count: int) -> torch.Tensor:
        raise ValueError(count)

    broken = samples(inference(lambda: nn.Linear(4, 4), fails))
    assert broken.small() is None and broken.traced() is None


def test_models_are_the_same_each_time_and_nothing_is_drawn_from_the_callers_numbers() -> None:
    plain = replace(workload(), model=lambda: nn.Linear(4, 4))
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    one, other = samples(plain).valued(), samples(plain).valued()
    assert one is not None and other is not None
    assert torch.equal(one.weight, other.weight) and torch.equal(torch.rand(1), expected)


@pytest.fixture(scope="module")
def offers() -> dict[str, object]:
    """What techniques offer for inference."""
    device = VirtualBackend(find_gpu("RTX 4090"), host_bytes=1 << 30)
    candidates = Candidates(device, request(workload(), Numerics.PRECISION))
    return {choice.name: choice.setting for choice in candidates.options(candidates.plain)}


def test_inference_is_offered_what_is_for_it(offers: dict[str, object], tmp_path: Path) -> None:
    assert {"half-inference", "batch-norm-folding", "tensor-sharing"} <= set(offers)
    assert not {"low-precision-training", "parameter-sharing", "uint8-inputs"} & set(offers)
    half = offers["half-inference"]
    assert isinstance(half, HalfInferenceSetting) and half.error is not None and half.error <= 0.01


def test_nothing_is_searched_for_that_a_plan_may_not_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkloadSamples, "small", lambda _: pytest.fail("a search through the modules"))
    device = VirtualBackend(find_gpu("RTX 4090"), host_bytes=1 << 30)
    candidates = Candidates(device, request(workload(), Numerics.ROUNDING))
    found = [choice.name for choice in candidates.options(candidates.plain)]
    assert "batch-norm-folding" in found and "half-inference" not in found


def test_training_is_offered_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkloadSamples, "traced", lambda _: pytest.fail("a pass was watched"))
    plain = replace(
        workload(), loss=lambda model, batch: model(batch).square().mean(), optimizer=torch.optim.SGD
    )
    device = VirtualBackend(find_gpu("RTX 4090"), host_bytes=1 << 30)
    forbidden = frozenset({"micro-batching"})
    candidates = Candidates(device, request(plain, Numerics.APPROXIMATE, forbidden=forbidden))
    found = {choice.name for choice in candidates.options(candidates.plain)}
    assert not {"half-inference", "batch-norm-folding", "tensor-sharing", "uint8-inputs"} & found
    assert "low-precision-training" in found


def test_a_plan_holds_what_was_found_and_does_the_same_after_its_file() -> None:
    plain = workload()
    device = VirtualBackend(find_gpu("RTX 4090"), host_bytes=1 << 30)
    names = frozenset({"half-inference", "batch-norm-folding", "tensor-sharing"})
    asked = request(plain, Numerics.PRECISION, allowed=names)
    plan = PlanSearch(Candidates(device, asked)).plan()
    assert plan.choices and {choice.name for choice in plan.choices} <= names
    assert plan.after.peak_allocated_bytes < plan.before.peak_allocated_bytes
    again = plan_from_toml(plan_to_toml(plan), Plan)
    assert again.choices == plan.choices
    cost = device.step_cost(again.apply(plain), dict(plain.sizes), None)
    assert cost.peak_allocated_bytes == plan.after.peak_allocated_bytes
