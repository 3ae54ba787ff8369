"""What NCCL takes of a rank's card: nothing before it is asked, then what its communicators need."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

from vramfit.gpus import find_gpu
from vramfit.gpus.nccl.collective_times import NcclCollective, collective_seconds
from vramfit.gpus.nccl.communicator_log import CommunicatorLog
from vramfit.gpus.nccl.nccl_host_memory import process_host_memory
from vramfit.gpus.nccl.nccl_memory import process_memory
from vramfit.gpus.nccl.node_types import usual_node
from vramfit.runtime.oom_forms import ShortOf, recognised
from vramfit.torch_internals.releases import at_least
from vramfit.units import format_bytes
from vramfit.virtual.gpu import VirtualGPU

H100 = find_gpu("H100")
ELEMENTS = 1 << 20


def told(gpu: VirtualGPU) -> list[str]:
    return [warning.message for warning in gpu.run.warnings if warning.code == "nccl-estimated"]


def test_a_group_that_asks_for_nothing_takes_nothing() -> None:
    with VirtualGPU("H100", rank=3, world_size=16) as gpu:
        dist.init_process_group("nccl")
        torch.ones(8, device="cuda:3")
    assert told(gpu) == []


@pytest.mark.parametrize("channels", [None, "4"])
def test_the_first_collective_makes_the_communicator(
    monkeypatch: pytest.MonkeyPatch, channels: str | None
) -> None:
    """By the settings of the environment, and with the seconds of NCCL's own model."""
    if channels is not None:
        monkeypatch.setenv("NCCL_MAX_NCHANNELS", channels)
    with VirtualGPU("H100", rank=3, world_size=16) as gpu:
        dist.init_process_group("nccl")
        values = torch.ones(ELEMENTS, device="cuda:3")
        torch.cuda.synchronize(3)
        start = gpu.mode.machine.clock.reached(3, 0)
        dist.all_reduce(values)
        torch.cuda.synchronize(3)
        took = gpu.mode.machine.clock.reached(3, 0) - start
        made = gpu.communicators
        assert made is not None
        log, taken = made.log, made.nccl_memory()
    plain = CommunicatorLog(rank=3, per_node=8, card=H100, node=usual_node(H100), settings=log.settings)
    plain.collective("all", tuple(range(16)), NcclCollective.ALL_REDUCE, 4 * ELEMENTS)
    assert log.settings.max_channels == (None if channels is None else 4)
    assert taken is not None and taken.total == process_memory(plain.uses()).total
    assert (
        1e6 * collective_seconds(NcclCollective.ALL_REDUCE, 4 * ELEMENTS, log.layout(tuple(range(16))))
        <= took
    )
    (line,) = told(gpu)
    host = process_host_memory(plain.uses())
    assert f"estimated: {format_bytes(taken.total.likely)} (" in line
    assert (
        f") of the card, counted with the context, and {format_bytes(host.likely)} (" in line
        and host.likely > 0
    )
    assert gpu.run.devices[3].context_bytes == H100.typical_context_bytes + taken.total.likely
    assert gpu.run.devices[2].context_bytes == 0


def test_what_it_takes_is_no_more_free_and_each_size_is_counted_once() -> None:
    with VirtualGPU("H100", rank=0, world_size=8) as gpu:
        dist.init_process_group("nccl")
        values = torch.ones(ELEMENTS, device="cuda:0")
        free = [torch.cuda.mem_get_info(0)[0]]
        for _ in range(3):
            dist.all_reduce(values)
            free.append(torch.cuda.mem_get_info(0)[0])
        assert gpu.communicators is not None
        taken = gpu.communicators.nccl_memory()
    assert taken is not None and free[0] - free[1] == taken.total.likely
    assert free[1] == free[2] == free[3]


@pytest.mark.parametrize("caught", [False, True])
def test_a_card_without_room_for_it_does_not_fit(caught: bool) -> None:
    """The collective fails with NCCL's error, which is told as running out of memory."""
    gpu = VirtualGPU("H100", rank=0, world_size=8)

    def program() -> None:
        dist.init_process_group("nccl")
        values = torch.ones(ELEMENTS, device="cuda:0")
        room = torch.cuda.mem_get_info(0)[0] - (64 << 20)
        held = torch.empty(room, dtype=torch.uint8, device="cuda:0")
        try:
            dist.all_reduce(values)
        except dist.DistBackendError as error:
            found = recognised(error)
            assert found is not None and found.of is ShortOf.NCCL
            if not caught:
                raise
        del held

    with contextlib.nullcontext() if caught else pytest.raises(dist.DistBackendError), gpu:
        program()
    oom = gpu.run.oom
    assert oom is not None and oom.op == "NCCL: all-reduce" and oom.free_bytes < oom.requested_bytes
    assert (oom.handled, gpu.run.ran_out) == (caught, not caught)
    assert gpu.run.devices[0].context_bytes == H100.typical_context_bytes, "nothing was taken"


def taken_by_subgroup(*, bound: bool) -> tuple[int, list[bool]]:
    """Bytes that a group of four of eight takes beside the world's, and which communicators were split."""
    with VirtualGPU("H100", rank=3, world_size=8) as gpu:
        dist.init_process_group("nccl", device_id=torch.device("cuda", 3) if bound else None)
        values = torch.ones(ELEMENTS, device="cuda:3")
        dist.all_reduce(values)
        before = torch.cuda.mem_get_info(3)[0]
        dist.all_reduce(values, group=dist.new_group([0, 1, 2, 3]))
        assert gpu.communicators is not None
        splits = [use.split for use in gpu.communicators.log.uses()]
        return before - torch.cuda.mem_get_info(3)[0], splits


@pytest.mark.skipif(at_least(2, 15), reason="a group of NCCL is bound to a card by itself")
def test_groups_of_a_world_that_is_bound_to_a_card_are_split_and_may_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert taken_by_subgroup(bound=False)[1] == [False, False]
    alone, splits = taken_by_subgroup(bound=True)
    assert splits == [False, True]
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    assert taken_by_subgroup(bound=False)[0] == alone, "nothing is split without a device_id"
    assert taken_by_subgroup(bound=True)[0] < alone


@pytest.mark.skipif(
    not at_least(2, 15), reason="a group of NCCL is bound to a card where the program says so"
)
def test_groups_of_a_world_are_split_whether_the_program_names_a_card_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, splits = taken_by_subgroup(bound=False)
    assert splits == [False, True]
    assert taken_by_subgroup(bound=True) == (alone, splits)
    monkeypatch.setenv("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1")
    assert taken_by_subgroup(bound=False)[0] < alone


def sent_and_received(backend: str, *, bound: bool, batched: bool) -> list[int]:
    """How many ranks the communicators have that a few sends and receives take."""
    with VirtualGPU("H100", rank=3, world_size=8) as gpu:
        dist.init_process_group(backend, device_id=torch.device("cuda", 3) if bound else None)
        values = torch.ones(ELEMENTS, device="cuda:3")
        ways = [(dist.isend, 4), (dist.irecv, 2), (dist.isend, 4), (dist.isend, 2)]
        if batched:
            for work in dist.batch_isend_irecv([dist.P2POp(way, values, peer) for way, peer in ways]):
                work.wait()
        else:
            for way, peer in ways:
                work = way(values, peer)
                assert work is not None
                work.wait()
        assert gpu.communicators is not None
        return [use.layout.ranks for use in gpu.communicators.log.uses()]


@pytest.mark.parametrize(
    ("bound", "batched", "expected"), [(False, False, [2, 2]), (False, True, [8]), (True, False, [8])]
)
def test_single_sends_and_receives_have_communicators_of_two(
    bound: bool, batched: bool, expected: list[int]
) -> None:
    if at_least(2, 15) and not batched:
        expected = [8]  # a group of NCCL is bound to a card by itself
    assert sent_and_received("nccl", bound=bound, batched=batched) == expected


@pytest.mark.skipif(not at_least(2, 14), reason="there is no such backend yet")
@pytest.mark.parametrize("batched", [False, True])
def test_lazy_groups_have_communicators_of_two_for_batches_too(batched: bool) -> None:
    assert sent_and_received("cuda:nccl-lazy", bound=False, batched=batched) == [2, 2]
