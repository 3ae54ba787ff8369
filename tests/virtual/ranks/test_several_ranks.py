"""One rank of several: what it sees of the world, values of other ranks, waiting, and errors in plain words."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from vramfit.errors import UsageError
from vramfit.virtual.gpu import VirtualGPU
from vramfit.virtual.ranks.rank_place import RankPlace

MIB = 1 << 20
RANK, WORLD = 13, 16
TIMEOUT = distributed_c10d.default_pg_timeout

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.distributed.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:barrier\\(\\). using the device:UserWarning"),
]


@pytest.fixture(scope="module")
def world() -> Iterator[VirtualGPU]:
    """Rank 13 of 16 on two nodes; its program has groups of both backends."""
    with VirtualGPU("H100", rank=RANK, world_size=WORLD, alloc_conf="") as gpu:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", RANK % 8))
        torch.cuda.set_device(RANK % 8)
        yield gpu


# -- The place -------------------------------------------------------------------------------------------------


def test_the_program_finds_what_torchrun_sets(world: VirtualGPU) -> None:
    found = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    assert found == {"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "8"}
    assert (os.environ["GROUP_RANK"], os.environ["MASTER_PORT"]) == ("1", "29500")
    assert (dist.get_rank(), dist.get_world_size(), torch.cuda.device_count()) == (13, 16, 8)
    assert torch.cuda.current_device() == 5


def test_hooks_of_a_backward_pass_find_this_ranks_card(world: VirtualGPU) -> None:
    """They run in threads of autograd's, each of which begins with its device as the current one."""
    weight = torch.ones(4, device="cuda", requires_grad=True)
    seen = []
    weight.register_hook(
        lambda _: seen.append((torch.cuda.current_device(), torch.empty(2, device="cuda").device))
    )
    (weight * 2).sum().backward()
    assert seen == [(5, torch.device("cuda", 5))]


def test_the_last_node_may_have_fewer_ranks() -> None:
    place = RankPlace(rank=9, world_size=10, ranks_per_node=4)
    assert (place.local_rank, place.node, place.nodes, place.cards) == (1, 2, 3, 4)
    assert place.environment()["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 8, "world_size": 8}, "rank=8 is beyond a world of 8 ranks. Ranks count from 0 to 7"),
        ({"rank": -1, "world_size": 8}, "rank=-1 is no whole number from 0 on"),
        ({"rank": 0}, "rank is given without world_size"),
        ({"world_size": 8}, "world_size is given without rank"),
        ({"rank": 0, "world_size": 0}, "world_size=0 is no whole number from 1"),
        (
            {"rank": 0, "world_size": 16, "ranks_per_node": 9},
            "ranks_per_node=9 is no whole number from 1 to 8",
        ),
    ],
)
def test_a_rank_that_is_not_there_is_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        VirtualGPU("H100", **given)
    assert message in str(raised.value)


def test_a_program_that_means_another_rank_is_told(world: VirtualGPU) -> None:
    store = dist.HashStore()
    with pytest.raises(UsageError, match=r"joins as rank 0 of 4, and the virtual run is rank 13 of 16"):
        distributed_c10d._new_process_group_helper(
            4, 0, [], "gloo", store, "other", timeout=distributed_c10d.default_pg_timeout
        )


def test_a_mesh_that_does_not_fit_the_world_is_torchs_error(world: VirtualGPU) -> None:
    with pytest.raises(RuntimeError, match="Mesh should not be bigger than default world size"):
        init_device_mesh("cuda", (5, 4))


def test_meshes_and_subgroups_hold_this_rank(world: VirtualGPU) -> None:
    mesh = init_device_mesh("cuda", (4, 4), mesh_dim_names=("dp", "tp"))
    assert list(mesh.get_coordinate() or ()) == [3, 1]
    assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [1, 5, 9, 13]
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == [12, 13, 14, 15]
    group = dist.new_group([2, 13, 7])
    assert (group.rank(), group.size()) == (2, 3)
    assert dist.new_group([0, 1]) is dist.GroupMember.NON_GROUP_MEMBER
    part = dist.split_group(split_ranks=[[0, 1], [12, 13]])
    assert dist.get_process_group_ranks(part) == [12, 13]
    assert dist.get_backend(dist.new_group(backend="gloo")) == "gloo"


# -- Values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_other_ranks_are_taken_to_hold_what_this_one_holds(world: VirtualGPU, device: str) -> None:
    def given() -> torch.Tensor:
        return torch.arange(16.0, device=device)

    def reduced(op: ReduceOp.RedOpType) -> float:
        tensor = torch.full((2,), 3.0, device=device)
        dist.all_reduce(tensor, op)
        return float(tensor[0].item())

    assert [reduced(op) for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN)] == [48.0, 3.0, 3.0]
    gathered = torch.empty(32, device=device)
    dist.all_gather_into_tensor(gathered, torch.tensor([1.0, 2.0], device=device))
    assert gathered.tolist() == [1.0, 2.0] * 16
    one = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(one, given())
    assert one.tolist() == [13.0 * 16]
    exchanged = torch.empty(16, device=device)
    dist.all_to_all_single(exchanged, given())
    assert exchanged.tolist() == [13.0] * 16
    parts = [torch.empty(1, device=device) for _ in range(16)]
    dist.all_gather(parts, torch.tensor([4.0], device=device))
    assert {part.item() for part in parts} == {4.0}
    total = functional.all_reduce(torch.ones(2, device=device), "sum", dist.group.WORLD)
    assert (total + 0).tolist() == [16.0, 16.0]


def test_only_the_root_holds_a_reduction(world: VirtualGPU) -> None:
    mine, others = (torch.ones(2, device="cuda") for _ in range(2))
    dist.reduce(mine, RANK)
    dist.reduce(others, 0)
    assert (mine.tolist(), others.tolist()) == ([16.0, 16.0], [1.0, 1.0])


@pytest.mark.parametrize("root", [RANK, 0])
def test_only_the_root_holds_what_is_gathered_into_one_tensor(world: VirtualGPU, root: int) -> None:
    if not hasattr(dist.group.WORLD, "gather_into_tensor"):
        pytest.skip("a group gathers into a tensor from torch 2.14 on")
    whole, mine = torch.zeros(2 * WORLD, device="cuda"), torch.ones(2, device="cuda")
    options = dist.GatherOptions()
    options.rootRank = root
    dist.group.WORLD.gather_into_tensor(whole, mine, options).wait()
    assert whole.tolist() == [float(root == RANK)] * (2 * WORLD)


def test_functional_results_are_waited_for_together(world: VirtualGPU) -> None:
    functional = torch.distributed._functional_collectives
    if not hasattr(functional, "wait_tensors"):
        pytest.skip("torch waits for several results at once from 2.15 on")
    given = [torch.ones(2, device="cuda") for _ in range(2)]
    name = dist.group.WORLD.group_name
    reduced = [torch.ops._c10d_functional.all_reduce(one, "sum", name) for one in given]
    waited = torch.ops._c10d_functional.wait_tensors(reduced)
    assert [one.tolist() for one in waited] == [[float(WORLD)] * 2] * 2


def test_nothing_is_known_of_what_another_rank_scatters_or_scales(world: VirtualGPU) -> None:
    scattered, scaled = (torch.full((2,), 7.0, device="cuda") for _ in range(2))
    dist.scatter(scattered, src=0)
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    assert 7.0 * WORLD not in scaled.tolist() and 7.0 not in (*scattered.tolist(), *scaled.tolist())


def test_objects_of_other_ranks(world: VirtualGPU) -> None:
    gathered: list[object] = [None] * WORLD
    dist.all_gather_object(gathered, {"mine": [1, 2]})
    assert gathered == [{"mine": [1, 2]}] * WORLD
    kept: list[object] = [7, None]
    dist.broadcast_object_list(kept, 0)
    assert kept == [7, None]
    assert any(w.code == "object-from-other-rank" and "rank 0" in w.message for w in world.run.warnings)
    out: list[object] = [None]
    dist.scatter_object_list(out, list(range(WORLD)), 0)
    assert out == [RANK]


def test_what_an_all_to_all_of_uneven_parts_rests_on_is_said(world: VirtualGPU) -> None:
    sizes = [2] * 8 + [4] * 8
    given = torch.zeros(sum(sizes), 4, device="cuda")
    out = torch.empty(4 * WORLD, 4, device="cuda")
    dist.all_to_all_single(out, given, [4] * WORLD, sizes)
    told = [w for w in world.run.warnings if w.code == "sizes-of-other-ranks"]
    assert len(told) == 1 and told[0].location is not None and "test_several_ranks.py" in told[0].location


# -- Memory and waiting ----------------------------------------------------------------------------------------


def test_an_asynchronous_collective_keeps_its_input_until_the_program_waits(world: VirtualGPU) -> None:
    out = torch.empty(16 * MIB, device="cuda")
    before = torch.cuda.memory_allocated()
    given = torch.empty(MIB, device="cuda")
    work = dist.all_gather_into_tensor(out, given, async_op=True)
    del given
    assert torch.cuda.memory_allocated() - before == 4 * MIB
    assert work.wait() and work.is_completed()
    assert torch.cuda.memory_allocated() == before
    given = torch.empty(MIB, device="cuda")
    dist.all_gather_into_tensor(out, given)  # on the current stream: nothing is kept
    del given
    assert torch.cuda.memory_allocated() == before
    given = torch.empty(MIB, device="cuda")
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(given, WORLD, dist.group.WORLD.group_name)
    del given
    assert torch.cuda.memory_allocated() - before == 4 * MIB * (WORLD + 1)
    torch.ops._c10d_functional.wait_tensor(gathered)
    assert torch.cuda.memory_allocated() - before == 4 * MIB * WORLD


def test_lists_are_gathered_and_scattered_through_one_block(world: VirtualGPU) -> None:
    parts = [torch.empty(MIB, device="cuda") for _ in range(WORLD)]
    one = torch.empty(MIB, device="cuda")
    for collective in (lambda: dist.all_gather(parts, one), lambda: dist.reduce_scatter(one, parts)):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        collective()
        assert torch.cuda.max_memory_allocated() - before == 4 * MIB * WORLD
        assert torch.cuda.memory_allocated() == before


def test_a_future_holds_the_results(world: VirtualGPU) -> None:
    tensor = torch.ones(2, device="cuda")
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert doubled.wait().tolist() == [32.0, 32.0]


def test_a_collective_runs_beside_the_program_until_it_waits(world: VirtualGPU) -> None:
    machine = world.mode.machine
    tensor = torch.empty(256 * MIB, device="cuda")
    device = tensor.device.index
    assert device is not None

    def reached() -> float:
        return machine.clock.reached(device, machine.current_stream(device))

    torch.cuda.synchronize()
    start = reached()
    work = dist.all_reduce(tensor, async_op=True)
    assert reached() == start
    work.wait()
    beside = reached() - start
    dist.all_reduce(tensor)
    assert reached() - start == pytest.approx(2 * beside, rel=1e-6)


# -- What needs the others ---------------------------------------------------------------------------------------


def test_a_key_that_another_rank_writes_is_named(world: VirtualGPU) -> None:
    store = dist.PrefixStore("of-the-program", distributed_c10d._get_default_store())
    store.set("mine", "1")
    assert store.get("mine") == b"1"
    with pytest.raises(UsageError, match=r"rank 13 of 16 waits for the key '.*theirs' in the store"):
        store.get("theirs")


def test_an_object_from_a_rank_that_does_not_run_is_named(world: VirtualGPU) -> None:
    with pytest.raises(
        UsageError, match="rank 13 of 16 waits for an object from rank 12, which does not run"
    ):
        dist.recv_object_list([None], src=12)


def test_a_rank_that_sends_nothing_is_named_after_a_while(tmp_path: Path) -> None:
    from vramfit.virtual.ranks.mailbox import Mailbox

    first, second = (
        Mailbox(RankPlace(rank=rank, world_size=2, mailbox=str(tmp_path), patience=0.05)) for rank in range(2)
    )
    first.send("pp", 1, [{"shape": (2, 3)}])
    assert second.receive("pp", 0) == [{"shape": (2, 3)}]
    with pytest.raises(
        UsageError, match=r"rank 1 of 2 waits for rank 0, for 0\.05 s now, which sent nothing"
    ):
        second.receive("pp", 0)


# -- Pipelines -------------------------------------------------------------------------------------------------


def pipeline_step(**shapes: torch.Tensor | tuple[torch.Tensor, ...]) -> int:
    """The 14th of 16 stages does a step of 1F1B; bytes that it held at most over what was there."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    device = torch.device("cuda", RANK % 8)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stage = PipelineStage(torch.nn.Linear(256, 256, device=device), RANK, WORLD, device, **shapes)
    Schedule1F1B(stage, 16).step()
    return torch.cuda.max_memory_allocated() - before


def test_a_stage_that_knows_its_shapes_runs_alone(world: VirtualGPU) -> None:
    shape = torch.empty(4, 256, device="meta", requires_grad=True)
    assert pipeline_step(input_args=(shape,), output_args=(shape,)) > 256 * 256 * 4


def test_a_stage_that_must_ask_another_says_which(world: VirtualGPU) -> None:
    with pytest.raises(
        UsageError, match="rank 13 of 16 waits for an object from rank 12, which does not run"
    ):
        pipeline_step()
