"""Patches of torch.distributed are gone with the virtual card."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, Logger
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from vramfit.virtual.fake_impls.registry import RULES
from vramfit.virtual.gpu import VirtualGPU

FUNCTIONS = (
    "split_group",
    "batch_isend_irecv",
    "_new_process_group_helper",
    "_object_to_tensor",
    "_store_based_barrier",
    "_create_process_group_wrapper",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "ProcessGroupNCCL",
    "ProcessGroupGloo",
)


PLACES = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_param",
    "torch.distributed.fsdp._flat_param",
    "torch.distributed.fsdp._runtime_utils",
    "torch.distributed.pipelining.stage",
    "torch.nn.parallel.distributed",
)
"""Modules whose functions and classes tell what memory is for."""


def functions(name: str) -> dict[str, Any]:
    """The functions of a module and of its classes."""
    module = importlib.import_module(name)
    own = {key: value for key, value in vars(module).items() if callable(value)}
    classes = [value for value in own.values() if isinstance(value, type) and value.__module__ == name]
    return {
        **{f"{name}.{key}": value for key, value in own.items()},
        **{f"{one.__qualname__}.{key}": value for one in classes for key, value in vars(one).items()},
    }


def state() -> dict[str, Any]:
    """All that is replaced for a rank."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    return {
        **{name: getattr(distributed_c10d, name, None) for name in FUNCTIONS},
        "exported": dist.broadcast_object_list,
        "nccl": dist.is_nccl_available(),
        "handle": dict(vars(FakeProcessGroup)),
        "logger": dict(vars(Logger)),
        "store": rendezvous._create_c10d_store,
        "mesh": DeviceMesh.__init__,
        "rules": {str(op): rule for op, rule in RULES.items()},
        "variables": dict(os.environ),
        "excepthook": sys.excepthook,
        "initialized": dist.is_initialized(),
        "reducer": dict(vars(dist.Reducer)),
        "broadcast": dist._broadcast_coalesced,
        **{f"functions of {name}": functions(name) for name in PLACES},
    }


@pytest.mark.parametrize("ranks", [{}, {"rank": 2, "world_size": 4}], ids=["alone", "of four"])
def test_every_patch_is_gone_afterwards(ranks: dict[str, int]) -> None:
    before = state()
    with VirtualGPU("RTX 4090", alloc_conf="", **ranks):
        assert dist.is_nccl_available()
        if ranks:
            assert os.environ["RANK"] == "2"
            dist.init_process_group("nccl")  # and left behind
            dist.all_reduce(torch.ones(2, device="cuda:2"))
    assert state() == before


def test_a_program_that_fails_leaves_no_group_behind() -> None:
    with pytest.raises(ZeroDivisionError), VirtualGPU("RTX 4090", alloc_conf="", rank=0, world_size=2):
        dist.init_process_group("gloo")
        _ = 1 / 0
    assert not dist.is_initialized() and "RANK" not in os.environ


def test_a_program_that_makes_no_group_is_told() -> None:
    with VirtualGPU("H100", alloc_conf="", rank=1, world_size=2) as gpu:
        torch.ones(2, device="cuda:1")
    assert [w.message for w in gpu.run.warnings if w.code == "no-process-group"] == [
        "the program was run as rank 1 of 2 and never called init_process_group: nothing was divided among ranks"
    ]
