"""Notes in the trace what a rank is of its program: groups, its stages of a pipeline, with whom it shares experts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from torch.distributed import distributed_c10d

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import change_after_import
from vramfit.trace import EXPERT_RANKS, PIPELINE_STAGES, PROCESS_GROUPS, TraceBuilder
from vramfit.virtual.ranks.made_groups import MadeGroups


class RankRoles:
    """What a rank turns out to be."""

    def __init__(self, builder: TraceBuilder) -> None:
        self._meta = builder.meta
        self._stages: set[int] = set()
        self._exchanges: set[int] = set()
        self._groups = MadeGroups()

    def groups(self, made: Iterable[Sequence[int]]) -> None:
        """The program makes process groups of these ranks of the world, each in the group's order."""
        for ranks in made:
            self._groups.add(ranks)
        if text := self._groups.text:
            self._meta[PROCESS_GROUPS] = text
        else:
            self._meta.pop(PROCESS_GROUPS, None)

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
    """Note the stages and the groups that a program makes, until the patches are undone."""
    _note_groups(roles, patches)

    def pipeline(module: ModuleType, patches: PatchStack) -> None:
        base = distributed.stage_base.get()
        original = base.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            roles.stage(self.stage_index, self.num_stages)

        patches.set(base, "__init__", init)

    change_after_import(distributed.PIPELINES, {distributed.STAGES: pipeline}, patches)


def _note_groups(roles: RankRoles, patches: PatchStack) -> None:
    """Every rank makes all groups, also those that it is no member of."""
    original = distributed_c10d.new_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if (ranks := given.get("ranks")) is not None:
            roles.groups([sorted(ranks) if given.get("sort_ranks", True) else ranks])
        return group

    patches.rebind([(original, new_group)])
