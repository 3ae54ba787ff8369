"""Tensors in fewer bytes: bits, integers of few bits with a scale per group, and the largest of each group.

All of it is made of plain torch operations on one-dimensional tensors, a part at a time, so that what they need while
they work stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from vramfit.techniques.support.saved import Kept, Packed, in_backward, packing

_PART = 1 << 22  # elements worked on at a time: 16 MiB in float32
_TINY = 1e-30  # its inverse is finite


class Compressed(Protocol):
    """A one-dimensional tensor in fewer bytes."""

    def restore(self) -> torch.Tensor:
        """The tensor, or what is left of it."""
        ...


class Bits:
    """Booleans, eight in a byte; exact.

    Byte j of n holds elements j, n + j, 2 n + j and so on, so that every operation runs along memory.
    """

    __slots__ = ("_packed", "_rest")

    def __init__(self, flags: torch.Tensor) -> None:
        self._packed, self._rest = pack_small(flags.view(torch.uint8), 1)

    def restore(self) -> torch.Tensor:
        """The booleans."""
        return unpack_small(self._packed, self._rest, 1).view(torch.bool)


class Signs:
    """Where a result of ReLU lets gradients through. What is restored has ones there, and zeros elsewhere.

    Its backward pass, ``threshold_backward(grad, result, 0)``, gives the gradient where not ``result <= 0`` and zero
    elsewhere (aten/src/ATen/native/cuda/ActivationThresholdKernel.cu), NaN included: of the result it reads no more.
    """

    __slots__ = ("_bits", "_dtype")

    def __init__(self, flat: torch.Tensor) -> None:
        self._bits, self._dtype = Bits(flat.le(0).logical_not_()), flat.dtype

    def restore(self) -> torch.Tensor:
        """Ones and zeros."""
        return self._bits.restore().to(self._dtype)


class Groups:
    """Floating-point numbers as integers of few bits between the least and the largest of their group.

    Args:
        flat: finite numbers.
        bits: 8, 4 or 2.
        group: how many share a scale, 8 bytes for each.
    """

    __slots__ = ("_bits", "_codes", "_dtype", "_group", "_low", "_rest", "_step", "_tail")

    def __init__(self, flat: torch.Tensor, bits: int, group: int) -> None:
        self._bits, self._group, self._dtype = bits, group, flat.dtype
        count, levels = flat.numel() // group, (1 << bits) - 1
        rows, self._tail = flat[: count * group].view(count, group), flat[count * group :].clone()
        codes = torch.empty(count, group, dtype=torch.uint8, device=flat.device)
        self._low = torch.empty(count, 1, dtype=torch.float32, device=flat.device)
        self._step = torch.empty_like(self._low)
        for part in _parts(count, group):
            least, most = torch.aminmax(rows[part], dim=1, keepdim=True)
            low = least.float()
            step = (most.float() - low).div_(levels)
            above = torch.sub(rows[part], low)  # before it is scaled: it is exact where the range is small
            half = torch.full_like(low, 0.5)
            codes[part] = torch.addcmul(
                half, above, step.clamp_min(_TINY).reciprocal_()
            )  # cut off, so rounded
            self._low[part], self._step[part] = low, step
        if bits == 8:
            self._codes, self._rest = codes.view(-1), codes.new_empty(0)
        else:
            self._codes, self._rest = pack_small(codes.view(-1), bits)

    def restore(self) -> torch.Tensor:
        """The numbers, each up to half a step away."""
        codes = self._codes if self._bits == 8 else unpack_small(self._codes, self._rest, self._bits)
        rows, count = codes.view(-1, self._group), codes.numel()
        flat = torch.empty(count + self._tail.numel(), dtype=self._dtype, device=codes.device)
        out = flat[:count].view_as(rows)
        for part in _parts(*rows.shape):
            if self._dtype is torch.float32:
                torch.addcmul(self._low[part], rows[part], self._step[part], out=out[part])
            else:
                out[part] = torch.addcmul(self._low[part], rows[part], self._step[part])
        flat[count:] = self._tail
        return flat


class LargestOfGroup:
    """Of each group the numbers of largest magnitude; the others become zero.

    Args:
        flat: the numbers.
        keep: the part of each group that is kept.
        group: how many make a group, at most 32768; 256 and less need one byte per kept index, more need two.
    """

    __slots__ = ("_count", "_indices", "_tail", "_values", "_width")

    def __init__(self, flat: torch.Tensor, keep: float, group: int) -> None:
        count, kept = flat.numel() // group, max(1, round(keep * group))
        self._count, self._width = count, group
        rows, self._tail = flat[: count * group].view(count, group), flat[count * group :].clone()
        dtype = torch.uint8 if group <= 256 else torch.int16
        self._indices = torch.empty(count, kept, dtype=dtype, device=flat.device)
        self._values = torch.empty(count, kept, dtype=flat.dtype, device=flat.device)
        for part in _parts(count, group):
            numbers = rows[part]
            indices = numbers.abs().topk(kept, 1, sorted=False).indices
            self._indices[part], self._values[part] = indices, numbers.gather(1, indices)

    def restore(self) -> torch.Tensor:
        """The largest numbers, and zeros."""
        length = self._count * self._width
        flat = self._values.new_zeros(length + self._tail.numel())
        rows = flat[:length].view(self._count, self._width)
        for part in _parts(self._count, self._width):
            rows[part].scatter_(1, self._indices[part].long(), self._values[part])
        flat[length:] = self._tail
        return flat


def pack_small(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes that hold numbers below ``2 ** bits``, and the last numbers, too few to fill one byte each.

    Args:
        values: one-dimensional, of type uint8.
        bits: 1, 2 or 4.
    """
    lanes = 8 // bits
    length = values.numel() // lanes
    packed = values[:length].clone()
    for lane in range(1, lanes):
        packed.add_(values[lane * length : (lane + 1) * length], alpha=1 << lane * bits)
    return packed, values[lanes * length :].clone()


def unpack_small(packed: torch.Tensor, rest: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers that `pack_small` was given."""
    lanes, length = 8 // bits, packed.numel()
    values = packed.new_empty(lanes * length + rest.numel())
    for lane in range(lanes):
        torch.bitwise_right_shift(packed, lane * bits, out=values[lane * length : (lane + 1) * length])
    values[: lanes * length].bitwise_and_((1 << bits) - 1)
    values[lanes * length :] = rest
    return values


def _parts(count: int, width: int) -> Iterator[slice]:
    rows = max(1, _PART // width)
    return (slice(start, start + rows) for start in range(0, count, rows))


# -- indices that max-pooling saves, in shorter integers -----------------------------------------------------------


POOLS = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)


class Narrow:
    """What the graph holds of indices that fit a shorter type."""

    __slots__ = ("_indices",)

    def __init__(self, indices: torch.Tensor, limit: int) -> None:
        self._indices = indices.to(torch.int16 if limit <= 1 << 15 else torch.int32)

    def unpack(self) -> torch.Tensor:
        """The indices, as they were."""
        return self._indices.to(torch.int64)


class ShortIndices:
    """Surrounds a max-pooling: its indices count the places of one channel (aten/src/ATen/native/Pool.h)."""

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass under hooks."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        pooled: torch.Tensor = args[0] if args else kwargs["input"]
        places = pooled.shape[-_dimensions(module) :].numel()
        if places > 1 << 31:
            return forward(*args, **kwargs)
        with packing(partial(self._take, places, in_backward())):
            return forward(*args, **kwargs)

    @staticmethod
    def _take(places: int, recomputing: bool, tensor: torch.Tensor) -> Packed | None:
        if tensor.dtype is not torch.int64:
            return None
        return Kept(tensor) if recomputing else Narrow(tensor, places)


def _dimensions(pool: nn.Module) -> int:
    for kind, dimensions in zip(POOLS, (1, 2, 3) * 2, strict=True):
        if isinstance(pool, kind):
            return dimensions
    raise TypeError(f"{type(pool).__name__} is no max-pooling")
