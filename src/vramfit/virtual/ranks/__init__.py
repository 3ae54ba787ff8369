"""A rank of a distributed program: process groups as ``torch.distributed`` gives them on a card.

NOTE [What a process group is here]
torch's own Python does all that it does on a card: it reads RANK, WORLD_SIZE and MASTER_*, names groups, pickles
objects, builds DDP's buckets and FSDP's gather buffers. One rank of the world runs, and nothing is moved. Only these
things below torch's Python are ours:

1. The store where processes meet belongs to this process alone: no port is opened, no file made (rank_store.py).
2. A group of the ``nccl`` backend is a handle: a build without NCCL has no such class, and none could talk to a card
   (process_groups.py). In a world of more than one rank a group of ``gloo`` is a handle too; in a world of one, gloo is
   torch's own and runs for real on CPU tensors.
3. Collectives arrive in the dispatch mode as ops ``c10d::*`` and ``_c10d_functional::*``: one rule per op says what it
   writes, what NCCL's side of torch allocates, on which stream it runs and for how long (collectives.py,
   functional_collectives.py; how long by gpus/nccl).
4. What comes from other ranks is taken to equal this rank's (peer_values.py, rank_objects.py).

5. How many tokens a rank of experts receives is stated or taken to be even (routed_tokens.py).
6. What torch allocates for communication, and what FSDP gathers, count as that (capture/communication_buffers.py,
   capture/gathered_parameters.py).

What needs other processes is refused by name (one_process.py), never made up.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vramfit.virtual.ranks.rank_place import ALONE

if TYPE_CHECKING:
    from vramfit.patching import PatchStack
    from vramfit.virtual.op_runner import OpRunner
    from vramfit.virtual.ranks.communicators import Communicators
    from vramfit.virtual.ranks.rank_place import RankPlace


def install(mode: OpRunner, place: RankPlace, patches: PatchStack) -> Communicators | None:
    """Let a program make the process groups of one rank of a world, until the patches are undone.

    Returns:
        what it will have asked of NCCL; None where torch has no process groups.
    """
    if place is not ALONE:
        for name, value in place.environment().items():
            patches.item(os.environ, name, value)
    import torch.distributed

    if not torch.distributed.is_available():
        return None
    from vramfit.capture import communication_buffers, gathered_parameters
    from vramfit.virtual.fake_impls.registry import RULES
    from vramfit.virtual.ranks import (
        deepspeed_checks,
        one_process,
        pipeline_stages,
        process_groups,
        rank_checkpoints,
        rank_objects,
        rank_roles,
        sharding,
    )
    from vramfit.virtual.ranks.asked_sizes import AskedSizes
    from vramfit.virtual.ranks.collectives import handlers
    from vramfit.virtual.ranks.communicators import Communicators
    from vramfit.virtual.ranks.functional_collectives import FunctionalCollectives
    from vramfit.virtual.ranks.mailbox import Mailbox
    from vramfit.virtual.ranks.peer_values import PeerValues
    from vramfit.virtual.ranks.rank_roles import RankRoles
    from vramfit.virtual.ranks.routed_tokens import RoutedTokens
    from vramfit.virtual.ranks.sent_numbers import SentNumbers

    communicators, values, mailbox = Communicators(mode, place), PeerValues(mode), Mailbox(place)
    numbers, sizes = SentNumbers(mode, mailbox, values), AskedSizes(mode)
    roles = RankRoles(mode.meter.builder)
    tokens = RoutedTokens(mode, values, roles)
    rules = (
        handlers(communicators, values, numbers, sizes, tokens)
        | FunctionalCollectives(communicators, values, sizes, tokens).handlers()
    )
    for overload, handler in rules.items():
        patches.item(RULES, overload, handler)
    process_groups.install(mode, place, communicators, roles, patches)
    rank_objects.install(mode, place, mailbox, patches)
    sharding.install(patches)
    communication_buffers.install(mode.meter, patches)
    gathered_parameters.install(mode.meter, patches)
    rank_roles.install(roles, patches)
    deepspeed_checks.install(patches)
    rank_checkpoints.install(place, patches)
    if place.world_size > 1 and not mailbox.open:
        pipeline_stages.install(patches)
    one_process.install(mode, place, patches)
    return communicators
