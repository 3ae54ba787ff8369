"""A stage of a pipeline that runs alone: it goes by its own knowledge of shapes, as if the others had voted like it.

Stages agree on whether each knows the shapes of what it is sent (torch/distributed/pipelining/stage.py,
``_warmup_forward_vote``). One that was told (``input_args``, ``output_args``) runs alone. One that was not asks its
neighbour, which does not run: an error says so (mailbox.py).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import change_after_import


def install(patches: PatchStack) -> None:
    """Let the votes of all stages be this one's."""

    def own_vote(module: ModuleType, patches: PatchStack) -> None:
        mode = vars(module).get("InferenceMode")
        if mode is None or not distributed.stage_forward_vote.exists:
            return  # older torch asks without a vote
        forward, backward = distributed.stage_forward_vote.get(), distributed.stage_backward_result.get()

        def forward_vote(self: Any, has_backward: bool, received_acc: Any = None) -> torch.Tensor:
            forward(self, has_backward, received_acc)
            self._own_vote = 0 if mode.needs_dynamic(self._user_meta, has_backward) else 1
            return _vote(self)

        def backward_result(self: Any, received_result: Any = None) -> torch.Tensor:
            backward(self, received_result)
            return _vote(self)

        distributed.stage_forward_vote.replace(patches, forward_vote)
        distributed.stage_backward_result.replace(patches, backward_result)

    change_after_import(distributed.PIPELINES, {distributed.STAGES: own_vote}, patches)


def _vote(stage: Any) -> torch.Tensor:
    return torch.tensor([stage._own_vote], dtype=torch.int32, device=stage.device)
