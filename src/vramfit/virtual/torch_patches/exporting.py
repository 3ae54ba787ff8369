"""``torch.export``, and pipelines that torch cuts out of a model with it: traced by torch alone, beside the card.

torch traces a program on fake tensors of its own, of symbolic sizes, and looks at every tensor on the way. Nothing of
that is on the card. The virtual card stands aside meanwhile, and what was exported runs on it as any module does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vramfit.patching import PatchStack
from vramfit.torch_internals import distributed
from vramfit.torch_internals.names import Feature, change_after_import
from vramfit.virtual.compiled.outside import Outside

_EXPORT = Feature("exporting programs")


def install(outside: Outside, patches: PatchStack) -> None:
    """Let programs be exported."""

    def export(module: ModuleType, patches: PatchStack) -> None:
        for name in ("export", "export_for_training"):
            if (original := vars(module).get(name)) is not None:
                patches.set(module, name, _aside(original, outside))

    def pipelines(module: ModuleType, patches: PatchStack) -> None:
        original = module.Pipe.from_tracing
        patches.set(module.Pipe, "from_tracing", staticmethod(_aside(original, outside)))

    def stages(module: ModuleType, patches: PatchStack) -> None:
        distributed.stage_move.replace(patches, _moved)

    change_after_import(_EXPORT, {"torch.export": export}, patches)
    changes = {distributed.PIPE: pipelines, distributed.STAGES: stages}
    change_after_import(distributed.PIPELINES, changes, patches)


def _moved(stage: Any) -> None:
    """Move a stage to its card: torch would leave it, since large parameters on the host are fake tensors here too."""
    if not any(parameter.is_meta for parameter in stage.submod.parameters()):
        stage.submod.to(stage.device)


def _aside(original: Callable[..., Any], outside: Outside) -> Callable[..., Any]:
    @functools.wraps(original)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with outside():
            return original(*args, **kwargs)

    return traced
