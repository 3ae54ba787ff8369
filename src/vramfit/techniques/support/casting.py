"""What the techniques of lower precision share: casts of inputs and outputs, where a pass runs, islands in float32."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.core.attached_program import AttachedProgram
from vramfit.techniques.core.surround import plain_class

HALVES = frozenset({torch.bfloat16, torch.float16})
# Frequencies of rotary embeddings, in the models of transformers: angles are multiples of them, in float32.
KEPT_BUFFERS = ("inv_freq", "original_inv_freq")


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """What `change` makes of each tensor in tuples, lists and dicts; everything else as it is.

    A container in which nothing changes is given back itself; of the others a copy is, so that a dict of a class of
    its own (an output of transformers) keeps its class and its attributes.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, tuple | list):
        items = [map_tensors(item, change) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, MutableMapping):
        found = {key: map_tensors(value, change) for key, value in tree.items()}
        if all(new is tree[key] for key, new in found.items()):
            return tree
        other = copy.copy(tree)
        for key, value in found.items():
            other[key] = value
        return other
    return tree


def cast_tensors(tree: Any, of: frozenset[torch.dtype], dtype: torch.dtype) -> Any:
    """The tensors of some dtypes as another, in the containers that `map_tensors` knows."""
    return map_tensors(tree, lambda tensor: tensor.to(dtype) if tensor.dtype in of else tensor)


def device_type_of(module: nn.Module, inputs: Any) -> str:
    """The kind of device that a forward pass runs on: an accelerator if an input or the first parameter is there.

    Asked anew for each pass: a copy of a module may run elsewhere than the module, and parameters that are brought
    for each pass rest on the CPU.
    """
    for tensor in (*_tensors(inputs), *_first(module)):
        if tensor.device.type != "cpu":
            return tensor.device.type
    return "cpu"


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, MutableMapping):
        yield from _tensors(list(tree.values()))


def _first(module: nn.Module) -> Iterator[torch.Tensor]:
    for parameter in module.parameters():
        yield parameter
        return


def surround_loss(live: AttachedProgram, dtype: torch.dtype) -> None:
    """Compute a workload's loss under autocast, as a loop written by hand does, until the undo."""
    recipe = _Recipe(live.device.type, dtype)
    live.loss_surroundings.append(recipe)
    live.on_undo(lambda: live.loss_surroundings.remove(recipe))


class _Recipe:
    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype

    def __call__(self, compute: Callable[[], Any]) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            return compute()


def find_islands(model: nn.Module, paths: tuple[str, ...], kinds: tuple[str, ...]) -> list[nn.Module]:
    """The modules of some paths and of some classes, once each, without those that lie inside another of them.

    Raises:
        UsageError: the model has no such module.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    classes = {plain_class(module).__name__ for module in known.values()}
    for given, there, what in ((paths, known, "module"), (kinds, classes, "module of class")):
        for name in given:
            if name not in there:
                near = difflib.get_close_matches(name, list(there), n=1)
                hint = f"Did you mean {near[0]}?" if near else "Name one that model.named_modules() shows"
                raise UsageError(f"the model has no {what} {name!r}", hint)
    chosen = [
        (path, module)
        for path, module in known.items()
        if path in paths or plain_class(module).__name__ in kinds
    ]
    inside = {id(inner) for _, module in chosen for inner in module.modules() if inner is not module}
    return list({id(module): module for _, module in chosen if id(module) not in inside}.values())


def router_kinds(model: nn.Module) -> tuple[str, ...]:
    """Names of the classes of a model's routers, which choose among experts: such as ``MixtralTopKRouter``.

    They cost next to nothing and are computed in float32 where all else is in half precision, for their logits and the
    loss that balances them cancel (Fedus et al., 2021, arXiv:2101.03961, section 2.4, "selective precision").
    """
    kinds = {plain_class(module).__name__ for module in model.modules()}
    return tuple(sorted(kind for kind in kinds if kind.endswith("Router")))


def is_norm(module: nn.Module) -> bool:
    """Whether it is a normalisation with parameters or statistics of its own, of whatever library."""
    return (
        "norm" in plain_class(module).__name__.lower()
        and next(module.children(), None) is None
        and any(tensor is not None for tensor in (*module.parameters(), *module.buffers()))
    )


def put_values(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor other values of another dtype; its gradient follows."""
    gradient, tensor.grad = tensor.grad, None
    tensor.data = values
    if gradient is not None:
        tensor.grad = gradient.to(values.dtype)


def flatten_recurrent(model: nn.Module) -> None:
    """Lay the weights of recurrent layers out as cuDNN wants them, as ``Module.to`` does."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
