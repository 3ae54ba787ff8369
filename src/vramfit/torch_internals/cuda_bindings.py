"""``cuda.bindings``, a package through which torch's own Python calls the CUDA runtime and driver.

It comes with builds for CUDA (Requires-Dist of torch 2.10 and later). torch takes it for what it has no function of
its own for: nodes of graphs and their annotations, green contexts, managed memory.
"""

from __future__ import annotations

from types import ModuleType

from vramfit.patching import PatchStack, after_import

_WITH_BINDINGS = (
    "torch.cuda._utils",
    "torch.cuda.graphs",
    "torch.cuda._graph_annotations",
    "torch.cuda.green_contexts",
)
"""Modules that look for the package when they are imported."""

# The names that they bind it to, None where it is not installed.
_NAMES = (
    "_cuda_driver",
    "_cuda_runtime",
    "_cuda_bindings_driver",
    "_cuda_bindings_runtime",
    "_drv",
    "_rt",
)
_INSTALLED = "_HAS_CUDA_BINDINGS"


def hide(patches: PatchStack) -> None:
    """Let torch find ``cuda.bindings`` as not installed: what needs it says so, or does without."""

    def change(module: ModuleType) -> None:
        hide_in(module, patches)

    after_import(dict.fromkeys(_WITH_BINDINGS, change), patches)


def hide_in(module: ModuleType, patches: PatchStack) -> None:
    """Let a module that has looked for ``cuda.bindings`` already have found nothing."""
    for name in _NAMES:
        if vars(module).get(name) is not None:
            patches.set(module, name, None)
    if vars(module).get(_INSTALLED):
        patches.set(module, _INSTALLED, False)
