"""What runs in the place of foreign functions and operators, and what a kernel that did not run leaves behind.

The user's stand-ins take the place of compiled functions, also of modules that cannot be loaded. Operators that the
program registered run as Python on virtual tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from types import ModuleType
from typing import Any

import torch

from vramfit.patching import PatchStack, change_after
from vramfit.torch_internals.custom_ops import definition_of, triton_ops_to_kernels
from vramfit.torch_internals.dispatch import OpOverload
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.describe import OF_TORCH
from vramfit.virtual.foreign.fake_kernels import KERNELS, LISTENERS, FakeKernel
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import Handler, OpRunner
from vramfit.virtual.roofline import traffic_seconds

NOT_RUN = (
    "kernels that are not torch's were not run: what they write has no values, and what they may take of the card "
    "themselves (Triton's global scratch memory) is not counted"
)


def note_launch(
    mode: OpRunner, name: str, tensors: Iterable[torch.Tensor], written: Iterable[torch.Tensor]
) -> None:
    """Note that a kernel would have run.

    Args:
        written: what of this it writes; the values are not known any more.
    """
    mode.machine.warn("kernel-not-run", NOT_RUN, location=name)
    mode.meter.ops += 1
    seen = list(tensors)
    on_card = [tensor for tensor in seen if tensor.device.type == "cuda"]
    if on_card:
        device = on_card[0].device.index or 0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in on_card)
        seconds = traffic_seconds(moved, mode.machine.devices[device].spec, mode.machine.rates)
        mode.machine.advance(1e6 * seconds, device)
    for tensor in written:
        mode.shadows.forget(tensor)
        mode.meter.expect(tensor, None)


def virtual_tensors(tree: Any) -> list[torch.Tensor]:
    """Fake tensors among nested arguments; those that a descriptor or a view of Triton's wraps, too."""
    if isinstance(tree, FakeTensor):
        return [tree]
    if isinstance(tree, (list, tuple)):
        return [tensor for item in tree for tensor in virtual_tensors(item)]
    if isinstance(tree, dict):
        return [tensor for item in tree.values() for tensor in virtual_tensors(item)]
    base = getattr(tree, "base", None)  # triton.runtime.jit.TensorWrapper, triton.tools.tensor_descriptor
    return [base] if isinstance(base, FakeTensor) else []


# -- operators --------------------------------------------------------------------------------------------------


def handler_of(func: OpOverload) -> Handler | None:
    """How a program's operator runs; None where its fake implementation says all that can be known.

    A stand-in of the user comes first. Then the operator's own Python: it runs on a card too, and shows what it
    allocates on its way, where ``register_fake`` describes the results alone. Where the author gave both, the Python
    may call what cannot run (a compiled function), so the description is taken, except for ``triton_op``, whose
    description is its Python.
    """
    if func.namespace in OF_TORCH:
        return None
    name = func._schema.name
    overload = func._overloadname
    kernel = KERNELS.get(name if overload in ("", "default") else f"{name}.{overload}")
    if kernel is not None:
        return _described_by_user(kernel)
    definition = definition_of(name)
    if definition is None or (definition._abstract_fn is not None and name not in triton_ops_to_kernels):
        return None
    return _python(definition)


def _described_by_user(kernel: FakeKernel) -> Handler:
    def handle(mode: OpRunner, call: OpCall) -> Any:
        with mode:
            out = kernel.function(*call.args, **call.kwargs)
        names = [argument.name for argument in call.func._schema.arguments]
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        declared = {
            a.name for a in call.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        }
        written = virtual_tensors([given.get(name) for name in declared | kernel.writes])
        note_launch(mode, kernel.name, virtual_tensors((call.args, call.kwargs, out)), written)
        return out

    return handle


def _python(definition: Any) -> Handler:
    def handle(mode: OpRunner, call: OpCall) -> Any:
        implementation: Callable[..., Any] = definition._backend_fns.get("cuda") or definition._init_fn
        with mode:
            return implementation(*call.args, **call.kwargs)

    return handle


# -- functions --------------------------------------------------------------------------------------------------


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
