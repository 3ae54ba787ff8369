"""Where the processes of a distributed program meet: here the program is alone."""

from __future__ import annotations

import importlib
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from vramfit.errors import UsageError
from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner


def refuse_more(world_size: int, rank: int) -> None:
    """A virtual run is one process, which others could not reach.

    Raises:
        UsageError: the group has more ranks than one.
    """
    if world_size > 1:
        raise UsageError(
            f"this process is rank {rank} of {world_size}, and a virtual run is one process: the other ranks are "
            "not there",
            "Run it with RANK=0 LOCAL_RANK=0 WORLD_SIZE=1: DDP's buckets and collectives are then those of one rank "
            "(parameters and states that FSDP or ZeRO divide among ranks stay whole)",
        )


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Give ``env://``, ``tcp://`` and ``file://`` a store of this process alone, after torch has read the address.

    torch's TCPStore would open a port and its FileStore would leave a file; with one rank nobody else reads either.
    """

    def tcp_store(
        hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any
    ) -> HashStore:
        if not 0 <= port < 2**16:  # as torch.distributed.rendezvous: _create_c10d_store
            raise ValueError(f"port must have value from 0 to 65535 but was {port}.")
        refuse_more(world_size, rank)
        return HashStore()

    def file_store(path: str, world_size: int = -1) -> HashStore:
        refuse_more(world_size, 0)
        return HashStore()

    # By its full name: the attribute `rendezvous` of torch.distributed is the function of that name.
    meeting = importlib.import_module("torch.distributed.rendezvous")
    patches.set(meeting, "_create_c10d_store", tcp_store)
    patches.set(meeting, "FileStore", file_store)
    original = distributed_c10d._new_process_group_helper

    def new_group(group_size: int, group_rank: int, *args: Any, **kwargs: Any) -> Any:
        refuse_more(group_size, group_rank)  # also where the program brings a store of its own
        return original(group_size, group_rank, *args, **kwargs)

    patches.set(distributed_c10d, "_new_process_group_helper", new_group)
