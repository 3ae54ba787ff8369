"""DeepSpeed's checks that ranks agree: the first rank's numbers are taken to be this rank's, as all values are.

Under ZeRO-3 each rank compares numbers of its parameters with those that rank 0 broadcasts
(deepspeed/runtime/zero/utils.py: ``assert_ints_same_as_other_ranks``). All but rank 0 fill the tensor that receives
them with -1: with nobody there to send, these would come out as a disagreement.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch

from vramfit.patching import PatchStack, after_import


def install(patches: PatchStack) -> None:
    """Let this rank broadcast its own numbers in rank 0's place."""

    def own_numbers(module: ModuleType) -> None:
        if not hasattr(module, "assert_lst_len_same_as_other_ranks"):
            return  # before 0.6

        def broadcast(numbers: int | list[int]) -> torch.Tensor:
            device = module.get_accelerator().device_name(os.environ["LOCAL_RANK"])
            tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
            module.dist.broadcast(tensor, src=module.dist.get_rank(), async_op=False)  # of its own numbers
            return tensor

        def same_length(lst: list[int]) -> None:
            broadcast(len(lst))

        def first_ranks(lst: list[int]) -> list[int]:
            broadcast(lst)
            return list(lst)

        patches.set(module, "assert_lst_len_same_as_other_ranks", same_length)
        patches.set(module, "get_lst_from_rank0", first_ranks)

    after_import({"deepspeed.runtime.zero.utils": own_numbers}, patches)
