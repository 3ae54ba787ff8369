"""What DTensor asks of all tensors of a ``_foreach_`` op is found once, and is what it would have found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributed.tensor.placement_types import _StridedShard

from vramfit.virtual.gpu import VirtualGPU

NAME = "_propagate_use_strided_shard_flag"
pytestmark = pytest.mark.skipif(not hasattr(_sharding_prop, NAME), reason="this torch has no such flag")


class Schema(SimpleNamespace):
    """The tensors of an op; counts how often they are looked through."""

    looks = 0

    @property
    def args_spec(self) -> tuple[DTensorSpec, ...]:
        self.looks += 1
        found: tuple[DTensorSpec, ...] = tuple(self.specs)
        return found


@pytest.mark.parametrize(
    "flags", [(), (False,), (True,), (True, True), (False, True), (True, False), (False,) * 3]
)
def test_the_flag_is_that_of_torch(flags: tuple[bool, ...]) -> None:
    original = getattr(_sharding_prop, NAME)
    with VirtualGPU("H100", rank=0, world_size=4):
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (4,))

        def strided(flag: bool) -> DTensorSpec:
            placements = (_StridedShard(0, split_factor=2),)
            return DTensorSpec(mesh, placements, use_strided_shard_as_shard_order=flag)

        schema = Schema(specs=[DTensorSpec(mesh, (Shard(0),)), *map(strided, flags)])
        patched = getattr(_sharding_prop, NAME)
        assert patched is not original
        found: list[Any] = []
        for propagate in (original, patched, patched):
            strategy = OpStrategy([OpSpec(strided(False), input_specs=(strided(True),))])
            try:
                propagate(strategy, schema)
            except ValueError as refusal:  # torch 2.12 refuses flags that differ
                found.append(str(refusal))
                continue
            (spec,) = strategy.strategies
            assert isinstance(spec.output_specs, DTensorSpec) and spec.input_specs is not None
            found.append(
                [one.use_strided_shard_as_shard_order for one in (spec.output_specs, *spec.input_specs)]
            )
    assert found[0] == found[1] == found[2]
    assert schema.looks == 2, "once by torch's own, once by ours for two"
    assert getattr(_sharding_prop, NAME) is original


EXPAND = "_expand_single_dim_strategy_to_mesh"
ATEN = torch.ops.aten
PLACED = (
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (_StridedShard(0, split_factor=2), Shard(0)),
    (Replicate(), Replicate()),
)


@pytest.mark.skipif(not hasattr(_sharding_prop, EXPAND), reason="this torch expands them elsewhere")
@pytest.mark.parametrize(
    ("op", "lists", "rest"),
    [
        (ATEN._foreach_mul_.Scalar, 1, (2.0,)),
        (ATEN._foreach_lerp_.Scalar, 2, (0.1,)),
        (ATEN._foreach_addcdiv_.ScalarList, 3, ([0.5] * 9,)),
        (ATEN._foreach_sqrt.default, 1, ()),
        (ATEN._foreach_mul.Scalar, 1, (2.0,)),
    ],
    ids=lambda one: one.__name__ if hasattr(one, "__name__") else None,
)
def test_the_strategies_of_equal_tensors_are_those_of_torch(
    op: Any, lists: int, rest: tuple[Any, ...]
) -> None:
    """Nine tensors of four layouts and two sizes, of which several are equal."""
    original = getattr(_sharding_prop, EXPAND)
    with VirtualGPU("H100", rank=0, world_size=4):
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2, 2))
        metas = [
            TensorMeta(torch.Size([side, 8]), (8, 1), torch.float32) for side in (8, 8, 8, 16, 16, 8, 8, 8, 8)
        ]
        chosen = [0, 1, 2, 1, 1, 0, 3, 2, 3]
        one = [
            OpStrategy([OpSpec(DTensorSpec(mesh, PLACED[at], meta))])
            for at, meta in zip(chosen, metas, strict=True)
        ]
        schema = OpSchema(op, (*(TupleStrategy(list(one)) for _ in range(lists)), *rest), {})
        propagator = DTensor._op_dispatcher.sharding_propagator
        info = propagator.op_single_dim_strategy_funcs[op]
        outs = metas if op._schema.returns else None
        patched = getattr(_sharding_prop, EXPAND)
        assert patched is not original
        found, plain = (
            expand(mesh, schema, info, outs)(op, schema.args_meta, schema.kwargs_meta)
            for expand in (patched, original)
        )
        assert [str(child) for child in found.children] == [str(child) for child in plain.children]
        assert len(plain.children) == 9 and len({id(child) for child in found.children}) == 5
