"""A model in bfloat16: its tensors cast in place, its inputs and outputs, and its islands in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from vramfit.techniques.core.surround import plain_class
from vramfit.techniques.low_precision_training.stochastic_rounding import join_, split
from vramfit.techniques.support.casting import HALVES, cast_tensors, device_type_of

_WIDER = frozenset({torch.float16, torch.float32, torch.float64})
_FLOAT32 = frozenset({torch.float32})
# Frequencies of rotary embeddings, in the models of transformers: angles are multiples of them, in float32.
_KEPT_BUFFERS = ("inv_freq", "original_inv_freq")


class HalfModel:
    """Casts the inputs of a model to bfloat16, and its outputs to float32 if the loss is to be computed in it.

    Inside autocast the outputs stay as they are, since autocast brings them to float32 in the losses that want it, and
    the model computes without it.
    """

    def __init__(self, *, float32_outputs: bool) -> None:
        self.float32_outputs = float32_outputs

    def __call__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward pass."""
        args, kwargs = cast_tensors((args, kwargs), _WIDER, torch.bfloat16)
        device = device_type_of(module, (args, kwargs))
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return forward(*args, **kwargs)
        outputs = forward(*args, **kwargs)
        return cast_tensors(outputs, HALVES, torch.float32) if self.float32_outputs else outputs


class MasterIsland:
    """Runs a module of float32 parameters on float32 inputs; its outputs are in bfloat16 again."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass."""
        if isinstance(module, _BatchNorm):  # its kernels take float32 parameters with inputs of 16 bits
            return forward(*args, **kwargs)
        args, kwargs = cast_tensors((args, kwargs), HALVES, torch.float32)
        return cast_tensors(forward(*args, **kwargs), _FLOAT32, torch.bfloat16)


class Casts:
    """Casts a model's tensors in place, each an object as before, and back.

    Args:
        keeps_lost_bits: whether to keep what trained parameters lose.

    Attributes:
        tensors: what was cast.
        remainders: lost bits by parameter, int16 (see NOTE [Two halves]).
    """

    def __init__(self, *, keeps_lost_bits: bool) -> None:
        self.remainders: dict[torch.Tensor, torch.Tensor] = {}
        self._keeps = keeps_lost_bits
        self.tensors: dict[torch.Tensor, None] = {}

    def cast(self, model: nn.Module, islands: Iterable[nn.Module]) -> None:
        """Cast all float32 parameters and buffers outside of islands to bfloat16."""
        kept = {id(tensor) for island in islands for tensor in (*island.parameters(), *island.buffers())}
        for tensor in _tensors(model):
            if tensor.dtype is torch.float32 and id(tensor) not in kept:
                if self._keeps and tensor.requires_grad:
                    half, self.remainders[tensor] = split(tensor.detach())
                else:
                    half = tensor.detach().to(torch.bfloat16)
                _put(tensor, half)
                self.tensors[tensor] = None
        _flatten(model)

    def undo(self, model: nn.Module) -> None:
        """Cast back, with the lost bits where they were kept."""
        while self.tensors:
            tensor, _ = self.tensors.popitem()
            wide = tensor.detach().to(torch.float32)
            lost = self.remainders.pop(tensor, None)
            if lost is not None:
                join_(wide, lost.to(wide.device))
            _put(tensor, wide)
        _flatten(model)


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation with parameters or statistics of its own, of whatever library."""
    return (
        "norm" in plain_class(module).__name__.lower()
        and next(module.children(), None) is None
        and any(tensor is not None for tensor in (*module.parameters(), *module.buffers()))
    )


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """All parameters and buffers, once each."""
    yield from model.parameters()
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] not in _KEPT_BUFFERS:
            yield buffer


def _put(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor other values of another dtype; its gradient follows."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = values
    if gradient is not None:
        tensor.grad = gradient.to(values.dtype)


def _flatten(model: nn.Module) -> None:
    """Lay the weights of recurrent layers out as cuDNN wants them, as ``Module.to`` does."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
