"""Puts the stand-ins that the user gave in the place of compiled functions, also of modules that cannot be loaded."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any

from vramfit.patching import PatchStack, change_after
from vramfit.virtual.foreign.fake_kernels import KERNELS, LISTENERS, FakeKernel
from vramfit.virtual.foreign.operators import note_launch, virtual_tensors
from vramfit.virtual.op_runner import OpRunner


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Put every stand-in in place: those that are registered, and those that will be."""

    def change(module: ModuleType) -> None:
        for kernel in KERNELS.values():
            if not kernel.is_operator and kernel.module == module.__name__:
                put(kernel, module)

    def put(kernel: FakeKernel, module: ModuleType) -> None:
        original = vars(module).get(kernel.attribute)
        replaced = stand_in(mode, kernel, original)
        if original is None:
            patches.set(module, kernel.attribute, replaced)
        else:
            patches.rebind([(original, replaced)])

    def hear(kernel: FakeKernel) -> None:
        if not kernel.is_operator and (module := sys.modules.get(kernel.module)) is not None:
            put(kernel, module)

    for kernel in KERNELS.values():
        hear(kernel)
    LISTENERS.append(hear)
    patches.call(lambda: LISTENERS.remove(hear))
    finder = _StandInFinder(change)
    sys.meta_path.insert(0, finder)

    def forget() -> None:
        sys.meta_path.remove(finder)
        for name in finder.made:  # a program on a real card must find that they are not installed
            sys.modules.pop(name, None)

    patches.call(forget)


def stand_in(mode: OpRunner, kernel: FakeKernel, original: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function that a program calls: the stand-in for virtual tensors, the original for others."""
    names = list(inspect.signature(kernel.function).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = virtual_tensors((args, kwargs))
        if not tensors and original is not None:
            return original(*args, **kwargs)
        out = kernel.function(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        written = virtual_tensors([given.get(name) for name in kernel.writes])
        note_launch(mode, kernel.name, tensors + virtual_tensors(out), written)
        return out

    return call


class _StandInFinder(MetaPathFinder):
    """Finds modules for which there are stand-ins; one that is not there, or is compiled, may be empty but for them."""

    def __init__(self, change: Callable[[ModuleType], None]) -> None:
        self._change = change
        self.made: list[str] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module with stand-ins, None for all others."""
        if not any(kernel.module == fullname for kernel in KERNELS.values() if not kernel.is_operator):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if isinstance(spec.loader, ExtensionFileLoader):
                return ModuleSpec(fullname, _Extension(self, spec), origin=spec.origin)
            change_after(spec, self._change)
            return spec
        return ModuleSpec(fullname, _Extension(self, None))

    def finish(self, module: ModuleType, *, made: bool) -> None:
        """Put the stand-ins into a module that was loaded, or made."""
        if made:
            self.made.append(module.__name__)
        self._change(module)


class _Extension(Loader):
    """Loads a compiled module if it can be loaded on this machine, else makes an empty one."""

    def __init__(self, finder: _StandInFinder, spec: ModuleSpec | None) -> None:
        self._finder = finder
        self._spec = spec
        self._loaded = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The compiled module; None, for an empty one, where it is not there or wants CUDA's libraries."""
        if self._spec is None or self._spec.loader is None:
            return None
        try:
            module = self._spec.loader.create_module(self._spec)
        except ImportError:
            return None
        self._loaded = True
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Initialise the module and put its stand-ins in."""
        if self._loaded and self._spec is not None and self._spec.loader is not None:
            self._spec.loader.exec_module(module)
        self._finder.finish(module, made=not self._loaded)
