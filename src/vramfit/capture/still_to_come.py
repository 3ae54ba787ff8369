"""What a program that ran out of memory would have asked for next, whatever its batch: a lower bound of all it needs.

A training step that runs out in its first forward pass has shown its parameters alone. Its gradients and the states of
its optimizer follow from them: each parameter that is trained gets a gradient of its own size, and the optimizers of
torch keep a known number of tensors of that size for it (`_STATES`, read from torch/optim/*.py, ``_init_group``). A
model on its way to the device shows what has not arrived. What the rest of the passes would add is not known.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from vramfit.torch_internals.autograd_engine import current_graph_task_id
from vramfit.trace import Category, StillToCome

_STATES: Mapping[type[Optimizer], tuple[int, tuple[str, ...]]] = {
    torch.optim.Adadelta: (2, ()),
    torch.optim.Adagrad: (1, ()),
    torch.optim.Adam: (2, ("amsgrad",)),
    torch.optim.Adamax: (2, ()),
    torch.optim.AdamW: (2, ("amsgrad",)),
    torch.optim.ASGD: (1, ()),
    torch.optim.Muon: (1, ()),
    torch.optim.NAdam: (2, ()),
    torch.optim.RAdam: (2, ()),
    torch.optim.RMSprop: (1, ("momentum", "centered")),
    torch.optim.Rprop: (2, ()),
    torch.optim.SGD: (0, ("momentum",)),
}
"""Tensors of a parameter's size that an optimizer keeps for it, and the options that add one each. What is not here is
taken to keep none."""

_TELLING = ("__init__", "_apply", "apply", "step", "to")
"""Functions whose first argument tells: `nn.Module._apply` and what stands in its place move a model."""


class _Moment(NamedTuple):
    """What the Python stack shows of the moment: a model being built or moved, or an optimizer's step."""

    building: bool
    moving: nn.Module | None
    dtype: torch.dtype | None
    stepping: bool


def still_to_come(
    here: Callable[[torch.Tensor], bool],
    trained: Iterable[torch.Tensor],
    tag: Callable[[torch.Tensor, Category], object],
) -> StillToCome:
    """Look at the program at the moment at which a request failed.

    Gradients and states that were made a moment ago are tagged here, so that nothing counts twice or is missed.

    Args:
        here: whether a tensor lies on the device that ran out.
        trained: the parameters on any device that require gradients.
        tag: notes what a tensor is for.
    """
    moment = _moment()
    parameters = [parameter for parameter in trained if parameter.requires_grad and here(parameter)]
    # A list: the collector knows a tuple that is growing too, and then it cannot grow.
    optimizers = list(_optimizers(here))
    in_backward = current_graph_task_id() != -1
    # Closures that an optimizer calls work with gradients, what it does itself works without.
    stepping = moment.stepping and not torch.is_grad_enabled() and not in_backward
    owned = {id(parameter) for _, group in optimizers for parameter in group["params"]}
    training = stepping or in_backward
    if not training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        training = any(id(parameter) in owned for parameter in parameters)
    for parameter in parameters:
        if parameter.grad is not None:
            tag(parameter.grad, Category.GRADIENTS)
    for optimizer, group in optimizers:
        for tensor in _states(optimizer, group):
            tag(tensor, Category.OPTIMIZER_STATE)
    gradients = sum(
        parameter.nbytes
        for parameter in parameters
        if parameter.grad is None
        and not _is_used_at_once(parameter)
        and (not owned or id(parameter) in owned)
    )
    states: dict[int, int] = {}
    for optimizer, group in optimizers:
        for parameter, amount in _missing(optimizer, group, here):
            # Of two optimizers of one parameter, one may be left over from before.
            states[id(parameter)] = max(amount, states.get(id(parameter), 0))
    return StillToCome(
        training=training,
        building=moment.building,
        stepping=stepping,
        parameters_bytes=0 if moment.moving is None else _left(moment.moving, moment.dtype, here),
        gradients_bytes=gradients if training else 0,
        states_bytes=sum(states.values()) if training else 0,
        optimizers=tuple(sorted({type(optimizer).__name__ for optimizer, _ in optimizers})),
    )


def _optimizers(here: Callable[[torch.Tensor], bool]) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
    """Each group of each optimizer that trains something here. Found by the garbage collector, which knows them all."""
    for found in gc.get_objects():
        if issubclass(type(found), Optimizer):
            for group in getattr(found, "param_groups", ()):
                if any(parameter.requires_grad and here(parameter) for parameter in group["params"]):
                    yield found, group


def _is_used_at_once(parameter: torch.Tensor) -> bool:
    """Whether a hook may use up a parameter's gradient before others are made: a step within the backward pass."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _missing(
    optimizer: Optimizer, group: Mapping[str, Any], here: Callable[[torch.Tensor], bool]
) -> Iterator[tuple[torch.Tensor, int]]:
    """Each parameter of a group, with the bytes of the states that it does not have yet."""
    count, options = _STATES.get(type(optimizer), (0, ()))
    each = count + sum(bool(group.get(option)) for option in options)
    for parameter in group["params"]:
        if parameter.requires_grad and here(parameter):
            held = sum(tensor.nbytes for tensor in _tensors(_state(optimizer, parameter)))
            yield parameter, max(0, each * parameter.nbytes - held)


def _state(optimizer: Optimizer, parameter: torch.Tensor) -> Any:
    """What an optimizer keeps for a parameter; None where it keeps nothing, or has no states of its own."""
    states = getattr(optimizer, "state", None)
    return states.get(parameter) if isinstance(states, Mapping) else None


def _states(optimizer: Optimizer, group: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The states that are there."""
    for parameter in group["params"]:
        yield from _tensors(_state(optimizer, parameter))


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    """The tensors of one state, without counters of steps."""
    if isinstance(state, Mapping):
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def _moment() -> _Moment:
    """Walk the stack outwards."""
    building, stepping = False, False
    moving: nn.Module | None = None
    dtype: torch.dtype | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        owner = (
            frame.f_locals.get(code.co_varnames[0]) if code.co_argcount and code.co_name in _TELLING else None
        )
        if isinstance(owner, nn.Module) and code.co_name != "step":
            building = True
            if code.co_name != "__init__":
                moving = owner  # the outermost one counts
            if code.co_name == "to":
                dtype = frame.f_locals.get("dtype")
        stepping = stepping or (isinstance(owner, Optimizer) and code.co_name == "step")
        frame = frame.f_back
    return _Moment(building, moving, dtype, stepping)


def _left(model: nn.Module, dtype: torch.dtype | None, here: Callable[[torch.Tensor], bool]) -> int:
    """Bytes of a model that are not on the device, in the precision in which the rest arrived or is to arrive."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    arrived = [tensor.element_size() for tensor in tensors if tensor.is_floating_point() and here(tensor)]
    size = min(arrived, default=dtype.itemsize if isinstance(dtype, torch.dtype) else None)
    return sum(
        tensor.numel() * (size if size is not None and tensor.is_floating_point() else tensor.element_size())
        for tensor in tensors
        if not here(tensor)
    )
