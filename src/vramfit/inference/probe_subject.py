"""A model to be probed: a copy of it in float64, run on inputs of any size, without a trace in the model itself."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vramfit.torch_internals.dispatch import disable_current_modes
from vramfit.workload.containers import tensors_in

_MOST_BYTES = 8 << 30
"""Of a copy's parameters in float64."""


class ProbeStoppedError(Exception):
    """The probe would take longer or more than allowed; its text says what."""


class ProbeSubject:
    """A model in float64 on the CPU (or on its card) with generic weights.

    Weights without values (of the virtual GPU, or on the meta device) are drawn, and so are those that are zero: a
    layer that begins as the identity would hide what it reads.

    Args:
        model: a module or a method of one, which is copied, or a function.
        example: what it is called with: a tensor, or a tuple or dict of arguments. The first floating tensor of the
            most dimensions is the one whose size is varied.
        seconds: how long all runs may take together.

    Raises:
        ProbeStoppedError: the example has no tensor with spatial dimensions, or the model cannot be copied.
    """

    def __init__(self, model: Callable[..., Any], example: Any, *, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._seconds = seconds
        self.called: set[str] = set()
        self._last = (0.0, 1)
        with disable_current_modes():
            owner = getattr(model, "__self__", model)
            copied = float64_copy(owner) if isinstance(owner, nn.Module) else owner
            self.module = copied if isinstance(copied, nn.Module) else None
            self.model = (
                model if copied is owner else copied if owner is model else getattr(copied, model.__name__)
            )
            self.device = _device_of(self.module)
            self._args, self._kwargs = _arguments(example)
            given = [*tensors_in((self._args, self._kwargs))]
            spatial = [one for one in given if one.dim() >= 3 and one.is_floating_point()]
            if not spatial:
                raise ProbeStoppedError("its input has no spatial dimensions")
            self._varied = max(spatial, key=lambda one: one.dim())
        self.shape = tuple(self._varied.shape)
        self.dims = len(self.shape) - 2

    def inputs(self, sizes: Sequence[int], *, batch: int = 1, seed: int = 0) -> torch.Tensor:
        """A random input of these spatial sizes, the same for the same seed."""
        with disable_current_modes():
            generator = torch.Generator().manual_seed(seed)
            shape = (batch, self.shape[1], *sizes)
            return torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1

    def run(self, given: torch.Tensor, *, norms: bool = True) -> list[torch.Tensor]:
        """The output tensors for an input.

        Args:
            norms: whether norms normalise; False leaves their weights alone, so that what remains is the rest.

        Raises:
            ProbeStoppedError: the time is over.
            Exception: whatever the model raises for this size.
        """
        began = time.monotonic()
        # Attention takes the square of the extent.
        expected = self._last[0] * max(1.0, given.numel() / self._last[1]) ** 2
        if began + expected > self._until:
            raise ProbeStoppedError(f"the probe would take more than {self._seconds:g} s")
        with contextlib.ExitStack() as stack:
            stack.enter_context(disable_current_modes())
            stack.enter_context(torch.no_grad())
            devices = [self.device] if self.device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices=devices))
            stack.enter_context(CallWatch(self.called, norms=norms))
            torch.manual_seed(0)
            if self.module is not None:
                stack.enter_context(kept_buffers(self.module))
            args = _exchanged(self._args, self._varied, given, self.device)
            kwargs = _exchanged(self._kwargs, self._varied, given, self.device)
            found = [one.detach().cpu() for one in tensors_in(self.model(*args, **kwargs))]
            self._last = time.monotonic() - began, given.numel()
            return found


# -- copies -------------------------------------------------------------------------------------------------------


def float64_copy(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A copy in float64 with values, on a device or each tensor on its own; the model's tensors stay as they are.

    Raises:
        ProbeStoppedError: it cannot be copied, or is too large.
    """
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}
    if sum(one.numel() * 8 for one in tensors.values()) > _MOST_BYTES:
        raise ProbeStoppedError("its weights are too large to copy")
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        # Plain tensors in the place of parameters, too: under a virtual GPU a new parameter would have no values.
        valued = _valued(tensor, generator)
        memo[key] = valued if device is None else valued.to(device)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ProbeStoppedError(f"it cannot be copied: {error}") from error


def _valued(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    is_real = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type != "meta"
    if not tensor.is_floating_point():
        if is_real:
            return tensor.detach().clone()
        return torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
    if is_real:
        found = tensor.detach().to(torch.float64, copy=True)
        if found.numel() and bool((found != 0).any()):
            return found
        device = found.device
    else:
        device = torch.device("cpu")
    shape = tuple(tensor.shape)
    reach = max(1, torch.Size(shape[1:]).numel())
    drawn = torch.rand(shape, generator=generator, dtype=torch.float64)
    # Positive where it may be a variance; of the size that keeps activations as large as they are.
    return (drawn if len(shape) < 2 else (drawn * 2 - 1) * (3.0 / reach) ** 0.5).to(device)


def _device_of(model: Any) -> torch.device:
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            return tensor.device
    return torch.device("cpu")


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Running statistics move in training mode: every run begins with the same."""
    before = [(one, one.clone()) for one in model.buffers()]
    try:
        yield
    finally:
        for one, value in before:
            one.copy_(value)


# -- arguments and outputs -------------------------------------------------------------------------------------------


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, list | tuple):
        return tuple(example), {}
    return (example,), {}


def _exchanged(value: Any, varied: torch.Tensor, given: torch.Tensor, device: torch.device) -> Any:
    """The arguments with another input, everything in float64, as many examples as the input has where it had one."""
    if value is varied:
        return given.to(device)
    if isinstance(value, torch.Tensor):
        shape, dtype = tuple(value.shape), value.dtype
        if type(value) is not torch.Tensor or value.device.type == "meta":
            value = torch.zeros(shape, dtype=dtype)
        if value.dim() and shape[0] == varied.shape[0] != given.shape[0]:
            value = value[:1].expand(given.shape[0], *shape[1:])
        return value.to(device=device, dtype=torch.float64 if dtype.is_floating_point else dtype)
    if isinstance(value, list | tuple):
        return type(value)(_exchanged(one, varied, given, device) for one in value)
    if isinstance(value, dict):
        return {name: _exchanged(one, varied, given, device) for name, one in value.items()}
    return value


# -- norms ----------------------------------------------------------------------------------------------------------

_NORM_PLACES = {"group_norm": 2, "instance_norm": 3, "batch_norm": 3}
"""Where each norm's weight stands among its arguments; the bias follows."""


class CallWatch(TorchFunctionMode):
    """Notes the names of what is called, keeps types at float64, and can leave statistics out of norms."""

    def __init__(self, called: set[str], *, norms: bool) -> None:
        super().__init__()
        self.called, self.norms = called, norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One call."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.called.add(name)
        if name in ("half", "bfloat16", "float") and args and isinstance(args[0], torch.Tensor):
            return args[0].double()
        if name == "to" and args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            low = (torch.float16, torch.bfloat16, torch.float32)
            args = tuple(torch.float64 if type(one) is torch.dtype and one in low else one for one in args)
            kwargs = {
                key: torch.float64 if one in low else one for key, one in kwargs.items() if one is not None
            }
        place = _NORM_PLACES.get(name)
        if self.norms or place is None:
            return func(*args, **kwargs)
        given = args[0] if args else kwargs["input"]
        if name == "batch_norm" and not (args[5] if len(args) > 5 else kwargs.get("training", False)):
            return func(*args, **kwargs)
        weight, bias = (
            args[at] if len(args) > at else kwargs.get(key)
            for at, key in ((place, "weight"), (place + 1, "bias"))
        )
        shape = (1, -1, *([1] * (given.dim() - 2)))
        if weight is not None:
            given = given * weight.view(shape)
        return torch.tanh(given if bias is None else given + bias.view(shape))
