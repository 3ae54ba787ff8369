"""Patches of torch.distributed are gone with the virtual card."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d

from vramfit.virtual.gpu import VirtualGPU


def test_every_patch_is_gone_afterwards() -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    before = {
        "split": distributed_c10d.split_group,
        "helper": distributed_c10d._new_process_group_helper,
        "pickle": distributed_c10d._object_to_tensor,
        "nccl": dist.is_nccl_available(),
        "class": getattr(distributed_c10d, "ProcessGroupNCCL", None),
        "handle": dict(vars(FakeProcessGroup)),
        "logger": dict(vars(torch._C._distributed_c10d.Logger)),
        "store": rendezvous._create_c10d_store,
    }
    with VirtualGPU("RTX 4090", alloc_conf=""):
        assert dist.is_nccl_available()
    assert distributed_c10d.split_group is before["split"]
    assert distributed_c10d._new_process_group_helper is before["helper"]
    assert distributed_c10d._object_to_tensor is before["pickle"]
    assert rendezvous._create_c10d_store is before["store"]
    assert dist.is_nccl_available() == before["nccl"]
    assert getattr(distributed_c10d, "ProcessGroupNCCL", None) is before["class"]
    assert dict(vars(FakeProcessGroup)) == before["handle"]
    assert dict(vars(torch._C._distributed_c10d.Logger)) == before["logger"]
