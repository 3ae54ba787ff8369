"""From what a rank asks of NCCL to its communicators."""

import torch
import torch.distributed._functional_collectives  # registers ops

from vramfit.gpus import find_gpu
from vramfit.gpus.nccl.collective_times import NcclCollective
from vramfit.gpus.nccl.communicator_log import COLLECTIVE_OF_OP, CommunicatorLog
from vramfit.gpus.nccl.communicator_use import NOTHING
from vramfit.gpus.nccl.nccl_memory import process_memory
from vramfit.gpus.nccl.nccl_settings import NcclSettings
from vramfit.gpus.nccl.node_types import usual_node
from vramfit.units import MIB

ASKS_NOTHING = {
    "_wrap_tensor_autograd",
    "check_for_nan",
    "monitored_barrier_",  # of Gloo alone
    "wait_tensor",
    "wait_tensors",
}
WORLD = tuple(range(64))


def log(rank: int) -> CommunicatorLog:
    card = find_gpu("H100")
    return CommunicatorLog(
        rank=rank, per_node=8, card=card, node=usual_node(card), settings=NcclSettings(cumem=True)
    )


def test_every_op_of_torch_is_known() -> None:
    names = {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.split("::")[0] in ("c10d", "_c10d_functional")
    }
    assert names - ASKS_NOTHING <= COLLECTIVE_OF_OP.keys()
    assert not COLLECTIVE_OF_OP.keys() & ASKS_NOTHING


def test_nothing_asked_nothing_taken() -> None:
    assert log(0).uses() == ()
    assert process_memory(log(0).uses()).total == NOTHING


def test_groups_lie_where_their_ranks_are() -> None:
    rank = log(9)
    rank.collective("world", WORLD, NcclCollective.ALL_GATHER, 8 * MIB)
    rank.collective("tp", tuple(range(8, 16)), NcclCollective.ALL_REDUCE, MIB)
    rank.collective("dp", tuple(range(1, 64, 8)), NcclCollective.REDUCE_SCATTER, MIB)
    rank.collective("world", WORLD, NcclCollective.ALL_GATHER, 9 * MIB)
    world, tensor, data = rank.uses()
    assert (world.layout.ranks, world.layout.nodes, world.layout.local) == (64, 8, 8)
    assert (tensor.layout.ranks, tensor.layout.nodes) == (8, 1)
    assert (data.layout.ranks, data.layout.nodes, data.layout.local) == (8, 8, 1)
    gathered = NcclCollective.ALL_GATHER
    assert world.collectives == {gathered}
    assert world.calls == {(gathered, 8 * MIB), (gathered, 9 * MIB)}


def test_peers_of_the_same_node_are_counted_and_others_are_not() -> None:
    rank = log(7)  # a stage of a pipeline, at the end of its node
    for _ in range(3):
        rank.receive("pp", WORLD, 6, MIB)
        rank.send("pp", WORLD, 8, MIB)
        rank.send("pp", WORLD, 5, MIB)
    [use] = rank.uses()
    assert (use.send_peers, use.receive_peers) == (1, 1)
    assert use.collectives == {NcclCollective.SEND_RECEIVE}
    names = [part.name for part in process_memory([use]).parts]
    assert "connections to peers for send and receive" in names
    assert "pools for send and receive over the network" in names


def test_known_sizes_leave_less_open() -> None:
    rank = log(0)
    rank.collective("tp", tuple(range(8)), NcclCollective.ALL_REDUCE, 256 * MIB)
    known = process_memory(rank.uses()).total
    [use] = rank.uses()
    assert use.layout.nodes == 1
    # by size NCCL takes NVLink SHARP alone: arrays and its buffers
    parts = {part.name: part.nbytes.likely // MIB for part in process_memory(rank.uses()).parts[1:]}
    assert parts == {"arrays of the channels": 228, "buffers of NVLink SHARP": 258}
    rank.collective("tp", tuple(range(8)), NcclCollective.ALL_REDUCE, 1024)
    assert process_memory(rank.uses()).total.likely == known.likely + 288 * MIB
