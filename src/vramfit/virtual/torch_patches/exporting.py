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

    after_import({"torch.export": export, "torch.distributed.pipelining._IR": pipelines}, patches)


def _aside(original: Callable[..., Any], outside: Outside) -> Callable[..., Any]:
    @functools.wraps(original)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with outside():
            return original(*args, **kwargs)

    return traced
