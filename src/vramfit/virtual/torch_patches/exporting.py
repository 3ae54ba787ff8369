"""``torch.export``, and pipelines that torch cuts out of a model with it: traced by torch alone, beside the card.

torch traces a program on fake tensors of its own, of symbolic sizes, and looks at every tensor on the way. Nothing of
that is on the card. The virtual card stands aside meanwhile, and what was exported runs on it as any module does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from vramfit.patching import PatchStack, after_import
from vramfit.virtual.compiled.outside import Outside


def install(outside: Outside, patches: PatchStack) -> None:
    """Let programs be exported."""

    def export(module: ModuleType) -> None:
        for name in ("export", "export_for_training"):
            if (original := vars(module).get(name)) is not None:
                patches.set(module, name, _aside(original, outside))

    def pipelines(module: ModuleType) -> None:
        original = module.Pipe.from_tracing
        patches.set(module.Pipe, "from_tracing", staticmethod(_aside(original, outside)))

    def stages(module: ModuleType) -> None:
        patches.set(module._PipelineStage, "_move_submod_to_device", _moved)

    changes = {"torch.export": export, "torch.distributed.pipelining._IR": pipelines}
    after_import({**changes, "torch.distributed.pipelining.stage": stages}, patches)


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
