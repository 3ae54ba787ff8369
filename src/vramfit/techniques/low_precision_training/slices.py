"""Parameters in bfloat16 as pieces of a limited size that an optimizer updates in float32, one chunk after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from vramfit.techniques.support.optimizer_exchange import is_separable

# Beside the parameters a chunk holds about 28 bytes an element: weights, gradients and states in float32, random bits,
# and what the optimizer's foreach kernels need. A 128th of the parameters keeps that below a quarter of a byte for each
# parameter; fewer than 4 million elements would be more launches than work.
_SMALLEST_CHUNK = 4 << 20
_CHUNKS = 128
_ALIGNED = 4  # elements of float32 that a vectorised kernel takes at once

# Each element's update depends on its own gradient and state alone, so that a parameter may be cut anywhere.
_ELEMENTWISE = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


@dataclass(frozen=True, eq=False, slots=True)
class Slice:
    """Elements of a parameter.

    Attributes:
        group: index of the optimizer's group that the parameter is in.
        parameter: it.
        start: the first element.
        stop: the element after the last.
    """

    group: int
    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        """Whether it is the parameter as a whole."""
        return self.stop - self.start == self.parameter.numel()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor that is shaped as the parameter: a view."""
        return tensor if self.whole else tensor.view(-1)[self.start : self.stop]


def is_elementwise(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether a state of a parameter of that shape is a floating number for each element."""
    return (
        name != "step"  # a scalar, as the parameter may be
        and not is_traceable_wrapper_subclass(value)  # codes of a low-bit optimizer stay as they are
        and isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape == shape
    )


def resting_dtype(parameter: torch.Tensor, *, half_states: bool) -> torch.dtype:
    """The dtype that such states have between steps; those of a scalar are too few to save, and may be counters."""
    return torch.bfloat16 if half_states and parameter.dim() > 0 else torch.float32


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """Slices on one device that are updated together.

    Attributes:
        slices: they.
    """

    slices: tuple[Slice, ...]

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with an element for each element of the slices, and a few between them; without values."""
        total = sum(map(_aligned, self.slices))
        return self.slices[0].parameter.new_empty(total, dtype=dtype)

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each slice's part of such a tensor, in the parameter's shape where it is the whole parameter."""
        found, start = [], 0
        for piece in self.slices:
            part = flat[start : start + piece.stop - piece.start]
            found.append(part.view(piece.parameter.shape) if piece.whole else part)
            start += _aligned(piece)
        return found


def chunks_of(
    optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[int, torch.Tensor]]
) -> Iterator[Chunk]:
    """Parameters, each with the index of its group, in chunks; several small ones together, large ones cut.

    A parameter is cut only where the optimizer treats each element on its own. An optimizer that is not known to treat
    each parameter on its own gets all of a device at once.
    """
    limit = max(_SMALLEST_CHUNK, sum(parameter.numel() for _, parameter in parameters) // _CHUNKS)
    if not is_separable(optimizer):
        limit = sum(parameter.numel() for _, parameter in parameters)
    chunk: list[Slice] = []
    room = limit
    for group, parameter in parameters:
        count = parameter.numel()
        step = limit if _may_be_cut(optimizer, parameter) else count
        for start in range(0, count, max(1, step)):
            piece = Slice(group, parameter, start, min(start + step, count))
            if chunk and (piece.stop - piece.start > room or chunk[0].parameter.device != parameter.device):
                yield Chunk(tuple(chunk))
                chunk, room = [], limit
            chunk.append(piece)
            room -= piece.stop - piece.start
    if chunk:
        yield Chunk(tuple(chunk))


def _may_be_cut(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    tensors = (parameter, parameter.grad, *optimizer.state.get(parameter, {}).values())
    return type(optimizer) in _ELEMENTWISE and all(
        tensor.layout is torch.strided and tensor.is_contiguous()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def _aligned(piece: Slice) -> int:
    return -(-(piece.stop - piece.start) // _ALIGNED) * _ALIGNED
