"""Point clouds in blocks: bit for bit the whole for networks that see a bounded way, in less memory."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.inference.point_blocks import PointSettings, call_by_blocks, point_blocks
from vramfit.virtual.gpu import VirtualGPU

pytestmark = pytest.mark.torch_versions

RADIUS = 0.1


class Messages(nn.Module):
    """Two layers in each of which a point sums over all within a radius, in the order of the points."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3 + width, 16), nn.Linear(3 + 16, 16)])

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        places, x = points[:, :3], points[:, 3:]
        near = torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist") <= RADIUS
        for layer in self.layers:
            # Sums of each point alone: a product of matrices sums in an order that depends on how many rows there are.
            sent = (torch.cat([places, x], 1)[:, None] * layer.weight).sum(2) + layer.bias
            x = torch.stack([sent[near[row]].cumsum(0)[-1] for row in range(len(points))]).tanh()
        return x


def cloud(count: int = 400) -> torch.Tensor:
    torch.manual_seed(1)
    points = torch.rand(count, 9)
    points[:40, :3] = points[0, :3]  # duplicates
    points[40:80, 0] = 0.5  # on a border
    points[80, :3] = torch.tensor([7.0, -3.0, 2.0])  # far away, with nothing between
    return points[torch.randperm(count)]


@pytest.mark.parametrize("most_points", [150, 250, 10_000])
def test_it_equals_the_whole_bit_for_bit(most_points: int) -> None:
    model, points = Messages(), cloud()
    with torch.no_grad():
        expected = model(points)
    settings = PointSettings(radius=2 * RADIUS, most_points=most_points)
    assert torch.equal(call_by_blocks(model, points, settings), expected)


def test_every_point_belongs_to_one_block_with_all_that_is_near() -> None:
    points = cloud()[:, :3]
    settings = PointSettings(radius=0.15, most_points=120)
    blocks = list(point_blocks(points, settings))
    owned = torch.cat([block.points[block.own] for block in blocks])
    assert len(blocks) > 3 and sorted(owned.tolist()) == list(range(len(points)))
    distances = torch.cdist(points.double(), points.double())
    for block in blocks:
        assert len(block.points) <= 120 and bool((block.points.diff() > 0).all())
        near = torch.nonzero((distances[block.points[block.own]] <= 0.15).any(0))[:, 0]
        assert set(near.tolist()) <= set(block.points.tolist())


def test_clouds_far_from_the_origin_have_no_wider_halo() -> None:
    points = cloud().double()
    points[:, :3] += torch.tensor([5e5, 5e6, 0.0])  # metres of a map
    near = torch.cdist(points[:, :3], points[:, :3], compute_mode="donot_use_mm_for_euclid_dist") <= RADIUS

    def count(some: torch.Tensor) -> torch.Tensor:
        places = some[:, :3]
        return (torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist") <= RADIUS).sum(1)

    settings = PointSettings(radius=RADIUS, most_points=120)
    assert torch.equal(call_by_blocks(count, points, settings), near.sum(1))
    assert len(list(point_blocks(points[:, :3], settings))) == len(
        list(point_blocks(cloud()[:, :3].double(), settings))
    )


def test_features_and_containers_go_along() -> None:
    points = cloud()
    colours = torch.randn(len(points), 2, dtype=torch.double)

    def function(points: torch.Tensor, *, colours: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": points.sum(1), "colours": colours * 2}

    found = call_by_blocks(
        function, points, PointSettings(radius=0.05, most_points=100), features={"colours": colours}
    )
    assert torch.equal(found["colours"], colours * 2) and torch.equal(found["sum"], points.sum(1))
    empty = call_by_blocks(lambda points: points * 2, points[:0], PointSettings(radius=1.0, most_points=5))
    assert empty.shape == (0, 9)


def test_bad_input_is_one_line() -> None:
    model, points = Messages(), cloud()
    with pytest.raises(UsageError, match=r"lies farther away than the radius of 0.1"):
        call_by_blocks(model, points, PointSettings(radius=RADIUS, most_points=250))
    with pytest.raises(UsageError, match=r"lie within 0.2 of one place, and a block may have 30"):
        call_by_blocks(model, points, PointSettings(radius=0.2, most_points=30))
    with pytest.raises(UsageError, match="infinite or not a number"):
        call_by_blocks(model, points / 0, PointSettings(radius=0.2, most_points=300))
    with pytest.raises(UsageError, match=r"has 5 for|has \[5\] for"):
        call_by_blocks(
            model, points, PointSettings(radius=0.2, most_points=300), features={"x": torch.ones(5)}
        )
    with pytest.raises(UsageError, match="Let it give one entry for each point"):
        call_by_blocks(lambda p: p.sum(), points, PointSettings(radius=0.01, most_points=100, check=False))
    with pytest.raises(UsageError, match="Let it give one entry for each point"):
        call_by_blocks(lambda p: p.sum(0), points, PointSettings(radius=0.01, most_points=100))
    with pytest.raises(UsageError, match=r"points have the shape \[400\]"):
        call_by_blocks(model, points[:, 0], PointSettings(radius=0.2, most_points=300))


def test_a_card_holds_one_block(gpu: VirtualGPU) -> None:
    """Distances of all pairs are what the whole takes; bytes are of the virtual card."""
    points = torch.rand(4096, 3)  # on the host

    def function(points: torch.Tensor) -> torch.Tensor:
        pairs = points[:, None] - points[None]
        return pairs.square().sum(-1).sum(1)

    def peak(most_points: int) -> int:
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        settings = PointSettings(radius=0.05, most_points=most_points, device=torch.device("cuda"))
        call_by_blocks(function, points, settings)
        return torch.cuda.max_memory_allocated() - before

    whole, blocks = peak(4096), peak(512)
    assert whole >= 2 * 4096**2 * 12 > 50 * blocks
