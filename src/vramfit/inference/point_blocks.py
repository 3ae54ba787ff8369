"""Point clouds in spatial blocks, equal to the whole for networks in which a point sees no farther than a radius.

NOTE [Halo of a block]: a block gives the results of its own points; beside these it holds all points within the radius
of the box around them, so that each of its own points sees all that it would see in the whole cloud. Points keep their
order, so that a network which sums over neighbours in the order of the points sums in the same order. A network of
several layers sees as far as its layers together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.arguments import number_argument, shown, whole_argument
from vramfit.errors import UsageError
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.workload.containers import mapped_leaves, tensors_in

_SLACK = 1e-5
"""Part of the cloud's extent by which the halo is wider: a network measures distances in its own precision."""

_STEPS = 84
"""Roundings of the largest coordinate by which it is wider besides: 1e-5 of it in float32."""

_TRIED = 8
"""Blocks of which one is run with a wider halo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PointSettings:
    """How a cloud is cut.

    Attributes:
        radius: how far a point sees, in the units of the coordinates: the sum over the layers.
        most_points: of a block, its halo included.
        device: where blocks are moved to before each call; None leaves them where they are.
        output_device: where results are joined; None is where the calls leave them.
        check: whether one block is run with a wider halo first, to see that the radius is enough.

    Raises:
        UsageError: a number is out of bounds.
    """

    radius: float
    most_points: int
    device: torch.device | None = None
    output_device: torch.device | None = None
    check: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        number_argument("radius", self.radius, least=0.0, most=math.inf)
        whole_argument("most_points", self.most_points, least=1)


@dataclass(frozen=True, slots=True, eq=False)
class PointBlock:
    """A block of a cloud.

    Attributes:
        points: numbers of its points, halo included, in ascending order.
        own: which of these are the block's own, as a mask.
    """

    points: torch.Tensor
    own: torch.Tensor


def point_blocks(xyz: torch.Tensor, settings: PointSettings) -> Iterator[PointBlock]:
    """Cut a cloud into boxes of few enough points, by halving the longest side where there are too many.

    Boxes are as large as the cloud allows where it is thin, and small where it is dense; none is empty. Every point
    belongs to one box, on borders and where points coincide too.

    Args:
        xyz: coordinates, (points, dimensions), on any device.

    Raises:
        UsageError: coordinates are no numbers, or more points than a block may have lie within the radius of one.
    """
    if xyz.dim() != 2 or not xyz.is_floating_point():
        raise UsageError(
            f"coordinates are {xyz.dtype} of shape {list(xyz.shape)}", "Give floating ones, (points, 3)"
        )
    where = xyz.detach().double()
    if not bool(torch.isfinite(where).all()):
        raise UsageError("coordinates are infinite or not a number", "Drop those points first")
    everything = torch.arange(len(xyz), device=xyz.device)
    reach = settings.radius + _slack(where, xyz.dtype)
    marked = torch.zeros(len(xyz), dtype=torch.bool, device=xyz.device)
    stack = [(everything, everything)] if len(xyz) else []
    while stack:
        own, near = stack.pop()
        places = where[own]
        low, high = places.amin(0), places.amax(0)
        near = near[_within(where[near], low, high, reach)]
        if len(near) <= settings.most_points:
            marked[own] = True
            yield PointBlock(near, marked[near])
            marked[own] = False
            continue
        side = int((high - low).argmax())
        if float(high[side] - low[side]) <= 0.0:
            raise UsageError(
                f"{len(near)} points lie within {settings.radius:g} of one place, and a block may have "
                f"{settings.most_points}",
                f"Allow {len(near)} points, or thin the cloud out",
            )
        left = places[:, side] < low[side] + (high[side] - low[side]) / 2
        # Rounding can leave the middle at the lower end: then that end is a part of its own.
        left = left if bool(left.any()) else places[:, side] == low[side]
        stack += [(own[~left], near), (own[left], near)]


def _slack(where: torch.Tensor, dtype: torch.dtype) -> float:
    """What rounding may add to distances: of the cloud's extent, and of its place as far as its dtype resolves that.

    Coordinates of a map are far from the origin, and in float64 that costs nothing.
    """
    if not len(where):
        return 0.0
    extent = float((where.amax(0) - where.amin(0)).max())
    resolved = min(_SLACK, _STEPS * torch.finfo(dtype).eps)
    return _SLACK * extent + resolved * float(where.abs().max())


def call_by_blocks(
    function: Callable[..., Any],
    xyz: torch.Tensor,
    settings: PointSettings,
    *,
    features: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """What a network gives for each point of a cloud, computed block by block and without gradients.

    Args:
        function: called as ``function(points, **features)`` with some points and their features; gives tensors whose
            first dimension is the points', in any containers.
        xyz: (points, 3 or more): the first three columns are coordinates, further ones features that go along.
        features: further tensors with an entry for each point.

    Returns:
        the network's containers with a result for each point, in the order of the cloud.

    Raises:
        UsageError: shapes do not fit, a block would be too large, or the radius is not enough.
    """
    if xyz.dim() != 2:
        raise UsageError(f"points have the shape {list(xyz.shape)}", "Give (points, 3 or more)")
    given = dict(features or {})
    for name, value in given.items():
        if value.shape[:1] != xyz.shape[:1]:
            raise UsageError(
                f"{name} has {shown(list(value.shape))} for {len(xyz)} points", "Give one for each"
            )
    if not len(xyz):
        return function(xyz, **given)
    joined = _JoinedPoints(len(xyz), settings.output_device)
    with torch.no_grad():
        blocks = list(point_blocks(xyz[:, :3], settings))
        if settings.check and len(blocks) > 1:
            _check_radius(function, xyz, given, blocks, settings)
        for block in blocks:
            joined.add(_called(function, xyz, given, block.points, settings), block)
    return joined.value()


def _called(
    function: Callable[..., Any],
    xyz: torch.Tensor,
    features: Mapping[str, torch.Tensor],
    points: torch.Tensor,
    settings: PointSettings,
) -> Any:
    def taken(value: torch.Tensor) -> torch.Tensor:
        found = value.index_select(0, points.to(value.device))
        return found if settings.device is None else found.to(settings.device)

    return function(taken(xyz), **{name: taken(value) for name, value in features.items()})


def _check_radius(
    function: Callable[..., Any],
    xyz: torch.Tensor,
    features: Mapping[str, torch.Tensor],
    blocks: list[PointBlock],
    settings: PointSettings,
) -> None:
    """Run a block once more with a wider halo, as far as a block has room.

    Of some blocks the one is taken that the wider halo adds most to.

    Raises:
        UsageError: results of its own points differ.
    """
    where = xyz[:, :3].detach().double()
    some = blocks[:: max(1, len(blocks) // _TRIED)]
    block, widest = max(
        ((one, _widened(one, where, settings)) for one in some),
        key=lambda pair: len(pair[1]) - len(pair[0].points),
    )
    if len(widest) <= len(block.points):
        return
    own = block.points[block.own]
    narrow = _called(function, xyz, features, block.points, settings)
    wide = _called(function, xyz, features, widest, settings)
    inner = torch.isin(widest, own, assume_unique=True)
    for one, other in zip(tensors_in(narrow), tensors_in(wide), strict=True):
        if one.shape[:1] != block.points.shape or other.shape[:1] != widest.shape:
            return  # no entry for each point: told where blocks are joined
        one, other = one[block.own.to(one.device)], other[inner.to(other.device)]
        if isinstance(one, FakeTensor):
            continue  # on the virtual GPU there are no values to compare
        if one.is_floating_point():
            same = torch.allclose(one, other, rtol=0, atol=1e-3 * float(other.abs().max()), equal_nan=True)
        else:
            same = torch.equal(one, other)
        if not same:
            raise UsageError(
                f"results of points change with what lies farther away than the radius of {settings.radius:g}",
                "Give the sum of the radii of all layers; a network with global pooling, sampling or a fixed number "
                "of nearest neighbours sees no bounded radius",
            )


def _widened(block: PointBlock, where: torch.Tensor, settings: PointSettings) -> torch.Tensor:
    """The points within twice the radius, the nearest of them where they are too many for a block."""
    own = where[block.points[block.own]]
    distances = _distance(where, own.amin(0), own.amax(0))
    found = torch.nonzero(distances <= 2 * settings.radius)[:, 0]
    if len(found) > settings.most_points:
        found = found[distances[found].argsort(stable=True)[: settings.most_points]].sort().values
    return found


class _JoinedPoints:
    """Results of blocks in the order of the cloud."""

    def __init__(self, count: int, device: torch.device | None) -> None:
        self._count, self._device = count, device
        self._rooms: dict[str, torch.Tensor] = {}
        self._made: Any = None

    def add(self, value: Any, block: PointBlock) -> None:
        """Write the results of a block's own points."""
        numbers = block.points[block.own]

        def leaf(path: str, part: Any) -> Any:
            if not isinstance(part, torch.Tensor):
                return part
            if part.shape[:1] != block.points.shape:
                raise UsageError(
                    f"output {path or 'of the network'} has {shown(list(part.shape))} for {len(block.points)} points",
                    "Let it give one entry for each point",
                )
            if path not in self._rooms:
                shape = (self._count, *part.shape[1:])
                self._rooms[path] = torch.empty(shape, dtype=part.dtype, device=self._device or part.device)
            room = self._rooms[path]
            kept = part[block.own.to(part.device)].to(room.device)
            room.index_copy_(0, numbers.to(room.device), kept)
            return part

        self._made = mapped_leaves(value, leaf)

    def value(self) -> Any:
        """The results of all points."""
        return mapped_leaves(self._made, lambda path, part: self._rooms.get(path, part))


def _distance(places: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Distance of places to a box, 0 inside."""
    found: torch.Tensor = torch.linalg.vector_norm(
        (low - places).clamp(min=0) + (places - high).clamp(min=0), dim=1
    )
    return found


def _within(places: torch.Tensor, low: torch.Tensor, high: torch.Tensor, reach: float) -> torch.Tensor:
    near: torch.Tensor = _distance(places, low, high) <= reach
    return near
