"""Questions of other libraries that are meant for something else than the virtual GPU.

transformers asks whether a tensor is fake to learn that a graph is being traced, and then looks at no values: it
makes masks that a card would skip, which turns fused attention with ``is_causal`` into attention with a mask. On the
virtual GPU a fake tensor stands for a real one (``transformers/utils/import_utils.py``: ``is_tracing``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from vramfit.patching import PatchStack
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.torch_patches import bitsandbytes, tracing

Change = Callable[[ModuleType], None]


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Change the libraries that are imported already, and the others when they are."""

    def no_tracing(module: ModuleType) -> None:
        original = vars(module).get("is_fake_tensor")
        if original is None:
            return

        def is_fake_tensor(value: Any) -> bool:
            ours = isinstance(value, FakeTensor) and value.fake_mode is mode.fake
            return not ours and bool(original(value))

        patches.set(module, "is_fake_tensor", is_fake_tensor)

    changes: dict[str, Change] = {
        "transformers.utils.import_utils": no_tracing,
        **bitsandbytes.changes(mode, patches),
        **tracing.writers(mode, patches),
    }
    after_import(changes, patches)
    bitsandbytes.prepare(patches)


def after_import(changes: dict[str, Change], patches: PatchStack) -> None:
    """Change modules by name: those that are imported already, and the others once they have been executed."""
    for name, change in changes.items():
        if (module := sys.modules.get(name)) is not None:
            change(module)
    finder = _AfterImport(changes)
    sys.meta_path.insert(0, finder)
    patches.call(lambda: sys.meta_path.remove(finder))


class _AfterImport(MetaPathFinder):
    """Finds what the other finders find, and has modules changed once they have been executed."""

    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is to be changed; None for all others, which the next finder looks for."""
        change = self._changes.get(fullname)
        if change is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                change_after(spec, change)
                return spec
        return None


def change_after(spec: ModuleSpec, change: Change) -> None:
    """Have a module changed once it has been executed."""
    loader = spec.loader
    if loader is None:
        return
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        change(module)

    vars(loader)["exec_module"] = exec_module  # a loader belongs to one spec
