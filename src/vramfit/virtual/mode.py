"""The dispatch mode: which ops go to the virtual card, what they allocate there, and what they return.

NOTE [Routing]
Every aten op of the program arrives here, below autograd and autocast.

1. An op that touches neither a ``cuda`` device nor a fake tensor runs for real on the CPU, exactly as without us.
2. Any other op runs on fake tensors and computes nothing. Real CPU tensors among its arguments are wrapped first.
3. Copies from the card to the host give real CPU tensors (fake_impls/host.py), so that what follows is real again.
4. Small results carry true values (shadow.py), on which the op runs too.
5. An op that torch cannot describe without running it is named in an error, never run.

``FakeTensorMode`` does the shape work. It is called, not entered: our mode is the only one on the stack, and torch
takes it off while it handles an op, so whatever FakeTensorMode does inside is unseen, as a kernel's inside should be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vramfit.capture.ops import OpTable, identity, kinds_among, tensors_in
from vramfit.gpus import find_gpu
from vramfit.patching import PatchStack
from vramfit.torch_internals import cuda_device, dispatch
from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.torch_internals.dispatch import DispatchKey, OpOverload
from vramfit.torch_internals.fake_tensors import FakeTensor, FakeTensorMode, device_of
from vramfit.torch_internals.pytree import tree_leaves
from vramfit.trace import Category, TraceBuilder
from vramfit.virtual.checks import check_arguments
from vramfit.virtual.describe import DynamicSizes, SparseOperation, key_of
from vramfit.virtual.fake_impls import LATE, RULES, custom, sparse
from vramfit.virtual.foreign.foreign_calls import handler_of
from vramfit.virtual.machine import Machine
from vramfit.virtual.meter import Meter
from vramfit.virtual.op_call import OpCall
from vramfit.virtual.op_runner import OpRunner
from vramfit.virtual.tensor_subclasses import Twins
from vramfit.virtual.torch_cuda import invalid_device
from vramfit.virtual.workspaces import Workspaces

_PRIM_DEVICE = torch.ops.prim.device.default
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
_ADD = torch.ops.aten.add.Tensor
_task = current_graph_task_id
_DENSE_KEYS = (DispatchKey.CompositeExplicitAutograd, DispatchKey.CUDA)
"""Where an operator over functions has what runs on a card; those that draw random numbers have it for cards alone."""


class VirtualMode(OpRunner):
    """Routes ops to the virtual card or to the CPU. See NOTE [Routing]."""

    supports_higher_order_operators = (
        True  # they are named in an error of ours rather than refused in one of torch's
    )

    def __init__(self, machine: Machine, meter: Meter, workspaces: Workspaces) -> None:
        super().__init__(machine, meter, workspaces, OpTable(RULES, LATE, handler_of))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    # -- routing -------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Route one op. See NOTE [Routing]."""
        if func is _PRIM_DEVICE:
            kind = type(args[0])
            if kind is FakeTensor:
                return device_of(args[0])
            return self.twins.device_of(args[0]) if kind in self.twins else func(*args)
        kwargs = kwargs or {}
        info = self.ops.met.get(identity(func))
        if info is not None and info.plans and (info.direct or (info.direct_forward and _task() == -1)):
            tensors: list[FakeTensor] = []
            key = key_of(args, kwargs, tensors)
            if key is not None:
                plan = info.plans.get(key)
                if (
                    plan is not None
                    and self._holds(plan, tensors)
                    and not (func is _ADD and self._accumulates(args))
                ):
                    return self._repeat(plan, OpCall(func, info, args, kwargs), tensors, None)
        on_card = False
        fake, real = kinds_among(args)
        if kwargs:
            fake_too, real_too = kinds_among(kwargs.values())
            fake, real = fake or fake_too, real or real_too
            device = kwargs.get("device")
            if device is not None and device.type == "cuda":
                on_card = True
                kwargs = {**kwargs, "device": self._existing(device)}
        if not (fake or on_card):
            # In inference mode ``to.device`` arrives whole, with the device by its place.
            on_card = any(type(value) is torch.device and value.type == "cuda" for value in args)
        if types and not _PLAIN_TYPES.issuperset(types):
            if self.twins.among(types):
                with self.twins.as_fake((*tensors_in(args), *tensors_in(tuple(kwargs.values())))):
                    return self.__torch_dispatch__(func, _others(types, self.twins), args, kwargs)
            if _has_wrapper(types):
                return NotImplemented  # it takes itself apart and comes back
        if not isinstance(func, OpOverload):
            nested = on_card or any(type(leaf) is FakeTensor for leaf in tree_leaves((args, kwargs)))
            return self._higher_order(func, args, kwargs, on_card=nested)
        if not (fake or on_card):
            return self._on_host(func, args, kwargs)
        info = self.ops[func]
        if info.handler is not None:
            if self.meter.follows_use:
                self.meter.use(tensors_in(args))
            return info.handler(self, OpCall(func, info, args, kwargs))
        if info.composite:
            # Below autograd's keys, at which torch takes composite ops apart, they arrive whole: in inference mode,
            # on tensors made in it, inside a kernel and inside operators over functions.
            with self:
                parts = dispatch.take_apart(func, args, kwargs)
            if parts is not NotImplemented:
                return parts
        call = OpCall(func, info, args, kwargs)
        check_arguments(call)
        return self.run(call, real=real)

    def _higher_order(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, on_card: bool
    ) -> Any:
        """Operators over functions (out_dtype, cond, scan): on a card, the ops that torch makes of them there."""
        if not on_card:
            return func(*args, **kwargs)
        for key in _DENSE_KEYS:
            if (dense := func.py_kernels.get(key)) is not None:
                with self, _unnoticed(dense):
                    return dense(*args, **kwargs)
        return self._outlined(func, args, kwargs)

    def _outlined(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator over functions of which only the results can be told: what it needs meanwhile is not counted.

        Raises:
            NotImplementedError: torch does not say what it gives either.
        """
        message = f"the virtual GPU has no rule for the higher-order operator {func} yet"
        describe = func.python_key_table.get(FakeTensorMode)
        if describe is None:
            self.machine.warn("op-without-rule", message)
            raise NotImplementedError(f"vramfit: {message}")
        self.machine.warn(
            "op-without-rule", f"{message}: its results are counted, and not what it needs meanwhile"
        )
        out = describe(self.fake, *args, **kwargs)
        for tensor in tensors_in(out if isinstance(out, tuple) else (out,)):
            if type(tensor) is FakeTensor and tensor.fake_device.type == "cuda":
                self.meter.adopt(tensor, str(func))
        return out

    def _existing(self, device: torch.device) -> torch.device:
        """The device that a program means: the current one where it gives no number.

        Raises:
            RuntimeError: there is no such device; the error is the card's.
        """
        count = len(self.machine.devices)
        if count == 0:
            cuda_device.initialize()  # "No CUDA GPUs are available"
        index = self.machine.current_device if device.index is None else device.index
        if index >= count:
            raise invalid_device()
        return device if device.index is not None else torch.device("cuda", index)

    def _on_host(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
            out = func(*args, **kwargs)
            self.page_locked.pin(out)
            return out
        info = self.ops[func]
        if info.handler is not None and getattr(info.handler, "on_host", False):
            return info.handler(self, OpCall(func, info, args, kwargs))
        return func(*args, **kwargs)

    def run(self, call: OpCall, *, real: bool = True, category: Category | None = None) -> Any:
        """As `OpRunner.run`; sparse tensors and custom operators that torch cannot describe have rules here."""
        try:
            return super().run(call, real=real, category=category)
        except SparseOperation:
            return sparse.run(self, call)
        except DynamicSizes:
            return custom.run(self, call)


def _others(types: Any, twins: Twins) -> tuple[type, ...]:
    """The classes that are no twins, which stand for FakeTensor."""
    return tuple(t for t in types if t not in twins)


@contextmanager
def _unnoticed(dense: Any) -> Iterator[None]:
    """Hide our mode from the plain form of an operator over functions: several insist that there is no mode."""
    with PatchStack() as patches:
        if dispatch.CURRENT_MODE in dense.__globals__:
            patches.item(dense.__globals__, dispatch.CURRENT_MODE, lambda: None)
        yield


def _has_wrapper(types: Any) -> bool:
    """Whether a tensor class of the program has a dispatch of its own (quantised tensors, DTensor)."""
    plain = torch.Tensor.__torch_dispatch__
    return any(t not in _PLAIN_TYPES and t.__torch_dispatch__ is not plain for t in types)


_measured: tuple[int, int] | None = None


def exclusive_counts() -> tuple[int, int] | None:
    """Use counts of a tensor and of its storage when only the engine holds it; None where no sum was seen.

    Measured once per process, by a tiny backward pass on a virtual card of its own in which one sum is exclusive by
    construction. See NOTE [Gradients summed in place] in vramfit/capture/gradient_sums.py.
    """
    global _measured
    if _measured is None:
        with PatchStack() as patches:
            cuda_device.gpu_context.replace(patches, lambda *_: None)
            cuda_device.lazy_initialization.replace(patches, lambda *_: None)
            machine = Machine([find_gpu("24GiB")], alloc_conf="", visible="0", context_bytes=0)
            meter = Meter(machine, TraceBuilder())
            mode = VirtualMode(machine, meter, Workspaces(machine, meter))
            mode.observed_counts = []
            with mode, torch.inference_mode(False), torch.enable_grad():  # the caller may have turned it off
                leaf = torch.empty(4, 4, device="cuda:0", requires_grad=True)
                product = leaf * 2.0
                (product.sin() + product.cos()).sum().backward()
            if mode.observed_counts:
                _measured = mode.observed_counts[-1]
    return _measured
