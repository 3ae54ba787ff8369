"""One process of a distributed program: process groups of one rank, as ``torch.distributed`` gives them on a card.

NOTE [What a process group is here]
torch's own Python does all that it does on a card: it reads RANK, WORLD_SIZE and MASTER_*, names groups, pickles
objects, builds DDP's buckets and FSDP's gather buffers. Only three things below it are ours:

1. The store where processes meet (process_groups.py) belongs to this process alone: no port is opened, no file made.
2. A group of the ``nccl`` backend (process_groups.py) is a handle: a build without NCCL has no such class, and none
   could talk to a card. Gloo is torch's own and runs for real on CPU tensors.
3. Collectives arrive in the dispatch mode as ops ``c10d::*`` and ``_c10d_functional::*`` (collectives.py): one rule per
   op says what it writes and what NCCL's side of torch allocates.

A group has one rank. What needs more is refused by name (process_groups.py, one_process.py), never made up.
"""

from __future__ import annotations

import torch.distributed

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Let a program make process groups of one rank, until the patches are undone."""
    if not torch.distributed.is_available():
        return
    from vramfit.virtual.ranks import collectives, one_process, process_groups

    collectives.register()
    for module in (process_groups, collectives, one_process):
        module.install(mode, patches)
