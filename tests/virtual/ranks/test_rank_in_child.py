"""A script as one rank of several, in a child interpreter: the entry point of a run of ranks."""

from __future__ import annotations

from pathlib import Path

from vramfit.gpus import find_gpu
from vramfit.options.run_options import RunOptions
from vramfit.virtual.ranks.rank_place import RankPlace
from vramfit.virtual.virtual_run import VirtualSettings, run_in_child

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
if dist.get_rank():
    received = [None]
    dist.recv_object_list(received, src=0)
    size = received[0]
else:
    size = 1 << 20
    dist.send_object_list([size], dst=1)
kept = torch.empty(size, device="cuda")
print(dist.get_rank(), dist.get_world_size(), torch.cuda.current_device(), size)
"""


def test_ranks_hand_objects_through_a_mailbox(tmp_path: Path) -> None:
    script, mailbox = tmp_path / "train.py", tmp_path / "mailbox"
    script.write_text(SCRIPT)
    mailbox.mkdir()
    for rank in (0, 1):
        place = RankPlace(rank=rank, world_size=2, mailbox=str(mailbox))
        run = run_in_child(
            [str(script)], RunOptions(gpu=find_gpu("H100"), alloc_conf=""), VirtualSettings(place=place)
        )
        assert (run.exit_code, run.error) == (0, None)
        # What was sent took a few bytes on the card too.
        peaks = [device.peak_allocated_bytes // (1 << 20) for device in run.devices]
        assert peaks == ([4, 0] if rank == 0 else [0, 4])
