"""The parameters of a layer that may live elsewhere than on the card, and where its modules look for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

ALIGNMENT = 512
"""Bytes that tensors on a card begin at multiples of, as the caching allocator places them (kMinBlockSize in
c10/cuda/CUDACachingAllocator.cpp), so that kernels find them aligned as ever."""


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a module has a parameter.

    Attributes:
        number: of the parameter, among those of its layer.
    """

    owner: nn.Module
    name: str
    number: int


class LayerWeights:
    """The parameters of a layer, each once, and the places where its modules look for them.

    Args:
        module: the layer.
        names: of its parameters in it.

    Attributes:
        parameters: each once.
        places: all of them, of which several may show one parameter.
        nbytes: of the parameters.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.parameters: list[nn.Parameter] = []
        self.places: list[ParameterPlace] = []
        numbers: dict[int, int] = {}
        for name in names:
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            parameter: nn.Parameter = owner._parameters[last]  # type: ignore[assignment]
            if id(parameter) not in numbers:
                numbers[id(parameter)] = len(self.parameters)
                self.parameters.append(parameter)
            self.places.append(ParameterPlace(owner, last, numbers[id(parameter)]))
        self.nbytes = sum(parameter.nbytes for parameter in self.parameters)

    def versions(self) -> list[int]:
        """How often each parameter was written to; what was made in inference mode is written to by nobody later."""
        return [0 if one.is_inference() else one._version for one in self.parameters]

    def show(self, tensors: list[Any]) -> None:
        """Let the modules see these tensors, by the numbers of the parameters."""
        for place in self.places:
            place.owner._parameters[place.name] = tensors[place.number]


def uses(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every place where a parameter is, but those of recurrent layers, which keep a list of their own."""
    found = []
    for path, owner in module.named_modules():
        if isinstance(owner, nn.RNNBase):
            continue
        for name, parameter in owner._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                found.append((f"{path}.{name}" if path else name, parameter))
    return found


def own_names(model: nn.Module, layers: Iterable[nn.Module]) -> list[tuple[str, ...]]:
    """The names, in each layer, of the parameters that nothing outside of it has."""
    everywhere = Counter(id(parameter) for _, parameter in uses(model))
    found = []
    for layer in layers:
        here = uses(layer)
        inside = Counter(id(parameter) for _, parameter in here)
        found.append(tuple(name for name, p in here if inside[id(p)] == everywhere[id(p)]))
    return found


def parts(layer: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, nn.Module, tuple[str, ...]]]:
    """The modules inside a layer that have parameters of these: path, module, and the parameters' names in it."""
    names = tuple(names)
    for path, part in layer.named_modules():
        inside = tuple(name.removeprefix(f"{path}.") for name in names if name.startswith(f"{path}."))
        if path and inside and not isinstance(part, torch.jit.ScriptModule):
            yield path, part, inside


def laid_out(parameters: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Where tensors begin side by side in one block of the card, and the block's bytes."""
    offsets, end = [], 0
    for parameter in parameters:
        offsets.append(end)
        end += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def move_tensors(model: nn.Module, device: torch.device, goes: Callable[[torch.Tensor], bool]) -> None:
    """Move those tensors of a model that go, the parameters staying the objects that they are."""
    hidden: list[tuple[dict[str, Any], str, Any]] = []
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and not goes(tensor):
                    hidden.append((held, name, tensor))
    try:
        for held, name, _ in hidden:
            held[name] = None
        model.to(device)
    finally:
        for held, name, tensor in hidden:
            held[name] = tensor


def shaped(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor over bytes with the shape and dtype of another, and its strides where these leave no gaps."""
    flat = memory[: like.nbytes].view(like.dtype)
    if like.is_contiguous() or torch.empty_like(like, device="meta").stride() != like.stride():
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride())
