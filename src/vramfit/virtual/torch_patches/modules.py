"""``nn.Parameter`` and ``nn.Module``: parameters are virtual from birth, and keep their identity when they move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from vramfit.capture.attribution import ProgramPhase
from vramfit.compiled_through import watched
from vramfit.patching import PatchStack
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.layers import module_apply
from vramfit.torch_internals.tensor_objects import make_subclass
from vramfit.trace import Category
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.tensor_subclasses import is_wrapper
from vramfit.virtual.torch_patches.identity import is_virtual

_DESTINATION = "_vramfit_destination"


def install(mode: OpRunner, patches: PatchStack) -> None:
    """Make parameters virtual, move them in place, and follow which module runs."""
    _patch_lazy(mode, patches)
    _patch_parameter(mode, patches)
    _patch_apply(mode, patches)
    _patch_call(mode, patches)


def _patch_parameter(mode: OpRunner, patches: PatchStack) -> None:
    """A CPU parameter becomes virtual when it is created, so that a large model needs no host memory."""
    original = nn.Parameter.__new__

    def new(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
        if (
            type(data) in (torch.Tensor, nn.Parameter)
            and data.device.type == "cpu"
            and data.layout is torch.strided
        ):
            real = data.detach()
            data = mode.wrap(real)
            if mode.page_locked.holds(real):
                mode.page_locked.stand_for(data.untyped_storage(), real.untyped_storage())
        if cls is not nn.Parameter and type(data) is FakeTensor:
            return make_subclass(cls, data, requires_grad)  # keeps the class, as torch does
        parameter: Any = original(cls, data, requires_grad)
        if isinstance(parameter, torch.Tensor):
            mode.meter.tag(parameter, Category.PARAMETERS)
        return parameter

    patches.set(nn.Parameter, "__new__", new)
    _patch_rebuild(patches)


def _patch_rebuild(patches: PatchStack) -> None:
    """``type(parameter)(data, **parameter.__dict__)``, by which big-model loaders rebuild a parameter elsewhere.

    The type of a virtual parameter is FakeTensor, whose constructor wants a mode, or takes the device of the old
    parameter for that of the new one. A FakeTensor made from a tensor stands for the parameter that the program sees.
    """
    original = FakeTensor.__new__

    def new(cls: type, first: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(first, torch.Tensor):
            return original(cls, first, *args, **kwargs)
        requires_grad = kwargs.get("requires_grad", args[0] if args else True)
        return nn.Parameter(first, requires_grad=bool(requires_grad))

    patches.set(FakeTensor, "__new__", staticmethod(new))


def _patch_apply(mode: OpRunner, patches: PatchStack) -> None:
    """Move parameters by their data: ``Module._apply`` would swap fake ones, and refuses (it sees weak references)."""
    modules = mode.meter.modules

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        if not modules.knows(self):
            modules.name_tree(self)
        if recurse:
            for child in self.children():
                child._apply(fn)
        for key, parameter in self._parameters.items():
            if parameter is None:
                continue
            if _is_lazy(parameter):
                _note_move(parameter, fn)
            else:
                _move_parameter(mode, self, key, parameter, fn)
        for key, buffer in self._buffers.items():
            if buffer is None:
                continue
            if _is_lazy(buffer):
                _note_move(buffer, fn)
            else:
                self._buffers[key] = moved = fn(buffer)
                if type(moved) is FakeTensor:
                    mode.meter.tag(moved, Category.PARAMETERS, mode.meter.modules.path_of(self))
        return self

    module_apply.replace(patches, apply)


def _move_parameter(
    mode: OpRunner,
    module: nn.Module,
    key: str,
    parameter: torch.Tensor,
    fn: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with torch.no_grad():
        applied = keep_virtual(mode, fn, parameter)
    if applied is not parameter:
        if is_virtual(mode, parameter) and is_virtual(mode, applied):
            parameter.data = applied
        elif is_wrapper(parameter) and is_wrapper(applied):
            torch.utils.swap_tensors(parameter, nn.Parameter(applied, parameter.requires_grad))
        else:  # from meta, or built before the virtual GPU: as torch does where data cannot be set
            gradient = parameter.grad
            parameter = module._parameters[key] = nn.Parameter(applied, parameter.requires_grad)
            parameter.grad = gradient
    if parameter.grad is not None:
        with torch.no_grad():
            gradient = keep_virtual(mode, fn, parameter.grad)
        if gradient is not parameter.grad:
            # A gradient must match its parameter's device: torch checks it when it is set.
            parameter.grad = None
            parameter.grad = gradient
            mode.meter.tag(gradient, Category.GRADIENTS)
    mode.meter.tag(parameter, Category.PARAMETERS, mode.meter.modules.path_of(module))


def _is_lazy(tensor: torch.Tensor) -> bool:
    return is_lazy(tensor)


def _note_move(lazy: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Remember where an uninitialized parameter or buffer is sent, and its dtype: there is nothing to move yet."""
    device, dtype = lazy.__dict__.get(_DESTINATION, (lazy.device, lazy.dtype))
    moved = fn(torch.empty(0, device=device, dtype=dtype))
    lazy.__dict__[_DESTINATION] = moved.device, moved.dtype


def _patch_lazy(mode: OpRunner, patches: PatchStack) -> None:
    """Lazy modules: a parameter becomes virtual when its shape is known, and stays the object that it was."""

    def materialize(
        self: torch.Tensor,
        shape: Any,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sent = self.__dict__.pop(_DESTINATION, (self.device, self.dtype))
        with torch.no_grad():
            data = torch.empty(
                shape, device=sent[0] if device is None else device, dtype=sent[1] if dtype is None else dtype
            )
        is_parameter = isinstance(self, UninitializedParameter)
        if is_parameter and type(data) is torch.Tensor and data.device.type == "cpu":
            data = mode.wrap(data)
        whole = data
        if type(data) is FakeTensor:
            # The same memory under a tensor to which no memo of FakeTensorMode refers: it can be swapped.
            view = torch.empty(0, dtype=data.dtype, device="meta").set_(
                data.untyped_storage(), 0, data.shape, data.stride()
            )
            whole = mode.describer.factory.make(view, data.device)
            if is_parameter:
                whole._is_param = True
                whole.requires_grad_(self.requires_grad)
        # A real tensor's data cannot be set to a fake one's.
        torch.utils.swap_tensors(self, whole)
        if type(self) is FakeTensor:
            mode.meter.tag(self, Category.PARAMETERS)

    patches.set(UninitializedParameter, "materialize", materialize)
    patches.set(UninitializedBuffer, "materialize", materialize)


def keep_virtual(
    mode: OpRunner, fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    """Apply a conversion to a virtual tensor without making it real, even where it moves to the host."""
    applied = fn(tensor)
    if type(tensor) is FakeTensor and type(applied) is torch.Tensor and applied.device.type == "cpu":
        return mode.wrap(applied)
    return applied


def _patch_call(mode: OpRunner, patches: PatchStack) -> None:
    """Keep a stack of running modules, and see the forward phase begin."""
    modules, phases = mode.meter.modules, mode.meter.phases

    def enter(module: nn.Module) -> None:
        if modules.enter(module) and current_graph_task_id() == -1:
            phases.begin(ProgramPhase.FORWARD)
            mode.guesses.new_phase()

    def leave() -> None:
        if modules.leave() and current_graph_task_id() == -1:
            phases.on_rest()

    call = watched(nn.Module.__call__, enter, leave)
    mode.meter.stacks.follow_modules(modules, call.__code__)
    patches.set(nn.Module, "__call__", call)
