"""What DTensor asks of all tensors of a ``_foreach_`` op is found once, and is what it would have found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
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
        found = []
        for propagate in (original, patched, patched):
            strategy = OpStrategy([OpSpec(strided(False), input_specs=(strided(True),))])
            propagate(strategy, schema)
            (spec,) = strategy.strategies
            assert isinstance(spec.output_specs, DTensorSpec) and spec.input_specs is not None
            found.append(
                [one.use_strided_shard_as_shard_order for one in (spec.output_specs, *spec.input_specs)]
            )
    assert found[0] == found[1] == found[2]
    assert schema.looks == 2, "once by torch's own, once by ours for two"
    assert getattr(_sharding_prop, NAME) is original
