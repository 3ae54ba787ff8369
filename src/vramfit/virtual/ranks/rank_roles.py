"""Notes in the trace what a rank is of its program: which stages of a pipeline, and with whom it shares experts."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import change_after_import
from vramfit.trace import EXPERT_RANKS, PIPELINE_STAGES, TraceBuilder


class RankRoles:
    """What a rank turns out to be."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._meta = builder.meta
        self._stages: set[int] = set()
        self._exchanges: set[int] = set()

    def exchanges(self, ranks: tuple[int, ...]) -> None:
        """It tells others how many tokens it sends them."""
        if not self._exchanges.issuperset(ranks):
            self._exchanges.update(ranks)
            self._meta[EXPERT_RANKS] = ",".join(map(str, sorted(self._exchanges)))

    def stage(self, index: int, stages: int) -> None:
        """It has a stage of a pipeline."""
        self._stages.add(index)
        self._meta[PIPELINE_STAGES] = f"{','.join(map(str, sorted(self._stages)))}/{stages}"


def install(roles: RankRoles, patches: PatchStack) -> None:
    """Note the stages that a program makes, until the patches are undone."""

    def pipeline(module: ModuleType, patches: PatchStack) -> None:
        base = distributed.stage_base.get()
        original = base.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            roles.stage(self.stage_index, self.num_stages)

        patches.set(base, "__init__", init)

    change_after_import(distributed.PIPELINES, {distributed.STAGES: pipeline}, patches)
