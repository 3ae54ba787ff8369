"""Finds the channels of a model that can only be removed together, by watching the functions of one forward pass.

NOTE [Groups]: a linear layer or convolution makes channels, and what follows takes them: activations and batch norms as
they are, a sum of two tensors both at once, the next layer as columns of its weight. A group is a set of places in
parameters, buffers and attributes with one entry for each channel. Functions are watched where the program calls them
(`TorchFunctionMode`), with the parameters themselves as arguments. A group is fixed where a function is not known to
treat channels one by one (norms over channels, products, reshaping into heads, joining and splitting), where the model
returns the tensor, and where a parameter is used twice or by anything else: what is not understood is not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vramfit.workload import Batch, call_model
from vramfit.workload.containers import tensors_in


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelPlace:
    """Where a parameter or buffer has an entry for each channel.

    Attributes:
        name: of the parameter or buffer in the model.
        dim: the dimension.
        each: entries for one channel, side by side: the pixels that a flattened map has of it.
        makes: whether the layer makes the channels, and does not take them.
    """

    name: str
    dim: int
    each: int = 1
    makes: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelGroup:
    """Channels that can only be removed together.

    Attributes:
        size: how many there are.
        places: where they are.
    """

    size: int
    places: tuple[ChannelPlace, ...]

    @property
    def name(self) -> str:
        """The first layer that makes the channels."""
        return next(place.name for place in self.places if place.makes).rpartition(".")[0]


@dataclass(slots=True)
class _Group:
    size: int
    places: list[ChannelPlace] = field(default_factory=list)
    fixed: bool = False
    joined: _Group | None = None

    def root(self) -> _Group:
        found = self
        while found.joined is not None:
            found = found.joined
        return found


@dataclass(frozen=True, slots=True)
class _Label:
    """Which channels a dimension of a tensor has; `each` entries for one of them."""

    group: _Group
    dim: int
    each: int = 1


def channel_groups(model: nn.Module, batch: Batch) -> list[ChannelGroup]:
    """The groups of channels that can be removed, in the order in which a forward pass makes them.

    Args:
        model: in evaluation mode.
        batch: what it is called with.
    """
    watch = _Watch(model)
    with torch.no_grad(), watch:
        result = call_model(model, batch)
    for tensor in tensors_in(result):
        watch.fix(tensor)
    return [
        ChannelGroup(size=group.size, places=tuple(dict.fromkeys(group.places)))
        for group in watch.groups
        if group.joined is None
        and not group.fixed
        and any(place.makes for place in group.places)
        and any(not place.makes and place.dim == 1 for place in group.places)
    ]


_EACH = frozenset(
    {
        *(
            "relu",
            "relu_",
            "relu6",
            "gelu",
            "silu",
            "silu_",
            "sigmoid",
            "sigmoid_",
            "tanh",
            "tanh_",
            "elu",
            "mish",
        ),
        *(
            "leaky_relu",
            "hardtanh",
            "hardswish",
            "hardsigmoid",
            "softplus",
            "dropout",
            "dropout2d",
            "abs",
            "neg",
        ),
        *(
            "square",
            "sqrt",
            "exp",
            "clamp",
            "erf",
            "float",
            "half",
            "bfloat16",
            "to",
            "type_as",
            "contiguous",
        ),
        *(
            "clone",
            "detach",
            "max_pool1d",
            "max_pool2d",
            "max_pool3d",
            "avg_pool1d",
            "avg_pool2d",
            "avg_pool3d",
        ),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d"),
        *("interpolate", "_max_pool2d", "boolean_dispatch", "pow", "__pow__"),
    }
)
"""Functions that treat channels one by one and leave them where they are."""

_TWO = frozenset(
    {
        *(
            "add",
            "add_",
            "__add__",
            "__radd__",
            "__iadd__",
            "sub",
            "__sub__",
            "mul",
            "mul_",
            "__mul__",
            "__rmul__",
        ),
        *("__imul__", "div", "__truediv__", "maximum", "minimum"),
    }
)
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
_LOOKS = frozenset({"size", "dim", "numel", "is_floating_point", "stride", "storage_offset", "element_size"})
"""Functions that read no values."""


class _Watch(TorchFunctionMode):
    """Follows channels through functions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.groups: list[_Group] = []
        self._names: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._names[id(tensor)] = name
        self._labels: dict[int, tuple[torch.Tensor, _Label]] = {}
        self._uses: dict[int, _Group] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function and follow what it does."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _LOOKS or (name == "__get__" and not isinstance(result, torch.Tensor)):
            return result
        rule = self._rule(name)
        if not rule(result, args, kwargs):
            for tensor in tensors_in((args, kwargs)):
                self.fix(tensor)
        return result

    def fix(self, tensor: torch.Tensor) -> None:
        """Leave the channels of a tensor, and those of a parameter, as they are."""
        if (label := self._label(tensor)) is not None:
            label.group.root().fixed = True
        if (group := self._uses.get(id(tensor))) is not None:
            group.root().fixed = True
        elif id(tensor) in self._names:  # it is fixed also where a later layer makes channels by it
            group = _Group(size=0, fixed=True)
            self._uses[id(tensor)] = group

    def _rule(self, name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]:
        if name == "linear":
            return self._linear
        if name in _CONVOLUTIONS:
            return self._convolution
        if name == "batch_norm":
            return self._batch_norm
        if name in _EACH:
            return self._one_by_one
        if name in _TWO:
            return self._two
        return self._flattened if name in ("flatten", "reshape", "view") else _unknown

    # -- rules: whether a call was understood ------------------------------------------------------------------------

    def _linear(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return self._layer(result, given, result.dim() - 1)

    def _convolution(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = dict(zip(names, args, strict=False)) | kwargs
        channels = 1 if result.dim() == given["weight"].dim() else 0
        return given.get("groups", 1) == 1 and self._layer(result, given, channels)

    def _layer(self, result: Any, given: dict[str, Any], dim: int) -> bool:
        """A layer that takes the channels of its input as columns of its weight, and makes others as its rows."""
        source, weight, bias = given["input"], given["weight"], given.get("bias")
        own = [one for one in (weight, bias) if one is not None]
        if any(id(one) not in self._names or id(one) in self._uses for one in own):
            return False
        made = _Group(size=weight.shape[0])
        self.groups.append(made)
        for one in own:
            made.places.append(ChannelPlace(name=self._names[id(one)], dim=0, makes=True))
            self._uses[id(one)] = made
        taken = self._label(source)
        if taken is not None:
            if taken.dim != (source.dim() - 1 if weight.dim() == 2 else dim):
                return False
            taken.group.root().places.append(
                ChannelPlace(name=self._names[id(weight)], dim=1, each=taken.each)
            )
        self._set(result, _Label(made, dim))
        return True

    def _batch_norm(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training")
        given = dict(zip(names, args, strict=False)) | kwargs
        label = self._label(given["input"])
        own = [one for one in (given.get(name) for name in names[1:5]) if one is not None]
        if label is None or label.each != 1 or any(id(one) not in self._names for one in own):
            return False
        if any(id(one) in self._uses for one in own):
            return False
        for one in own:
            self._uses[id(one)] = label.group.root()
            label.group.root().places.append(ChannelPlace(name=self._names[id(one)], dim=0))
        self._set(result, label)
        return True

    def _one_by_one(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        source: Any = args[0] if args else kwargs.get("input")
        others = [one for one in tensors_in((args[1:], kwargs)) if one is not source]
        label = self._label(source)
        if label is None or any(self._label(one) is not None for one in others):
            return label is None and not others
        if not isinstance(result, torch.Tensor) or result.dim() != source.dim():
            return False
        if result.shape[label.dim] != source.shape[label.dim]:
            return False
        self._set(result, label)
        return True

    def _two(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        tensors = list(tensors_in((args, kwargs)))
        labels = [self._label(one) for one in tensors]
        known = [one for one in labels if one is not None]
        if not known:
            return not any(id(one) in self._names for one in tensors)
        first = known[0]
        from_end = result.dim() - next(t for t, one in zip(tensors, labels, strict=True) if one).dim()
        for tensor, label in zip(tensors, labels, strict=True):
            same = tensor.dim() == result.dim() and tensor.shape == result.shape
            if label is None:
                at = first.dim - (result.dim() - tensor.dim())
                if id(tensor) in self._names or (0 <= at < tensor.dim() and tensor.shape[at] != 1):
                    return False
            elif not same or label.dim != first.dim or label.each != first.each or from_end:
                return False
        for other in known[1:]:
            _join(first.group, other.group)
        self._set(result, first)
        return True

    def _flattened(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Reshaping that leaves the channels' dimension whole, or flattens a map behind it."""
        del kwargs
        source = args[0]
        label = self._label(source)
        if label is None:
            return id(source) not in self._names
        before, after = list(source.shape), list(result.shape)
        if label.dim == source.dim() - 1 and after[-1] == before[-1]:
            self._set(result, _Label(label.group, result.dim() - 1, label.each))
            return True
        behind = 1
        for size in before[label.dim + 1 :]:
            behind *= size
        whole = after[: label.dim] == before[: label.dim] and len(after) == label.dim + 1
        if whole and after[label.dim] == before[label.dim] * behind:
            self._set(result, _Label(label.group, label.dim, label.each * behind))
            return True
        return False

    def _label(self, tensor: Any) -> _Label | None:
        found = self._labels.get(id(tensor))
        return None if found is None else found[1]

    def _set(self, tensor: torch.Tensor, label: _Label) -> None:
        self._labels[id(tensor)] = (tensor, label)  # kept, so that no other tensor gets its id


def _unknown(_result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    del args, kwargs
    return False


def _join(one: _Group, other: _Group) -> None:
    first, second = one.root(), other.root()
    if first is second:
        return
    first.places += second.places
    first.fixed = first.fixed or second.fixed or first.size != second.size
    second.joined = first


def entries(place: ChannelPlace, channels: torch.Tensor) -> torch.Tensor:
    """Numbers of a place's entries for some channels."""
    steps = torch.arange(place.each, device=channels.device)
    return (channels[:, None] * place.each + steps).flatten()


def places_of(groups: list[ChannelGroup]) -> Iterator[ChannelPlace]:
    """The places of all groups."""
    for group in groups:
        yield from group.places
