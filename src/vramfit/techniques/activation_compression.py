"""Saved activations in fewer bytes: exact masks, and approximate numbers.

All of it is made of plain torch operations on one-dimensional tensors, a part at a time, so that what they need while
they work stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from vramfit.errors import UsageError
from vramfit.techniques.activation_offload import chosen_modules
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.techniques.core.technique import Numerics, Promise, Setting, Technique
from vramfit.techniques.support.saved import (
    Found,
    Kept,
    Packed,
    StoragePlace,
    StorageSpan,
    held_storages,
    hooks_outside,
    in_backward,
    is_leaf_of_training,
    is_plain,
    packing,
    span,
    storage_key,
)

# -- Tensors in fewer bytes: bits, integers of few bits with a scale per group, and the largest of each
# group.


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


_KIB = 1 << 10
# Operations that save a mask, the sign of their result, or indices.
_MASKED_OPS = {
    "native_dropout",
    "relu",
    "relu_",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
    "masked_fill",
}
_MASKED_LAYERS = (nn.ReLU, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, *POOLS)


class Method(Enum):
    """How saved tensors are made smaller.

    Attributes:
        MASKS: booleans and the results of ReLU as bits, indices of max-pooling in short integers; exact.
        QUANTIZED: floating-point numbers as integers too, with a scale per group.
        TOP_K: of floating-point numbers the largest of each group alone.
    """

    MASKS = "masks"
    QUANTIZED = "quantized"
    TOP_K = "top-k"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCompressionSetting(Setting):
    """Which activations, and how.

    Attributes:
        modules: names of the submodules whose saved tensors are compressed; empty for the whole model.
        bits: of a quantized number: 8, 4 or 2.
        group: how many numbers share a scale or are compared, at most 32768.
        keep: the part of each group that top-k keeps, above 0 and at most 1.
        min_bytes: smaller tensors stay as they are.
    """

    modules: tuple[str, ...] = ()
    method: Method = Method.MASKS
    bits: int = 8
    group: int = 256
    keep: float = 0.25
    min_bytes: int = 64 * _KIB


class ActivationCompression(Technique[ActivationCompressionSetting]):
    """What autograd saves is stored in fewer bytes until the backward pass reads it. The forward pass is not changed.

    Masks cost nothing in the results. A boolean (dropout's mask on a card, ``masked_fill``) takes a bit in place of a
    byte. Of ReLU's result the backward pass reads the sign alone, a bit in place of two or four bytes; it pays where
    nobody else saves that result: before dropout, an addition, a concatenation. Where the next layer saves it, bits are
    dropped again, and not made in later steps. Indices of max-pooling fit 2 bytes, or 4, in place of 8.

    Quantized, activations take ``bits / 8 + 8 / group`` bytes per number in place of 2 or 4, and the gradients of
    weights are computed from numbers up to half a step of their group off (Chen et al. 2021, ActNN, arXiv:2104.14129;
    Liu et al. 2022, GACT, arXiv:2206.11357, both with groups and, other than here, with stochastic rounding). Numbers
    have to be finite. Top-k keeps the largest of each group with their indices; the gradients of weights are biased.
    Over 50 steps of four small models, losses were apart by at most 0.02 % of their fall with 8 bits, 0.2 % with 4,
    and 23 % with half of the numbers kept; over 40 steps of fourteen, by up to 54 % with a quarter kept. Try top-k on
    the loss curve first.

    It costs time: made of plain torch operations, 8 bits move about 30 bytes for each float32 number that is saved. In
    simulation on an RTX 4090, GPT-2 small with a batch of 8 x 512 takes 193 ms for a step in place of 126, with 4.8 GiB
    in place of 8.0: more time than recomputing its blocks, less than moving them over the link. It pays for what is
    dear to recompute.
    """

    name: ClassVar[str] = "activation-compression"
    summary: ClassVar[str] = "saved tensors take fewer bytes until the backward pass"
    numerics: ClassVar[Numerics] = Numerics.APPROXIMATE
    phase: ClassVar[AttachStage] = AttachStage.CONTEXT
    setting_type = ActivationCompressionSetting
    follows: ClassVar[str | None] = "activation-offload"

    def options(self, profile: Profile) -> Iterable[ActivationCompressionSetting]:
        """Masks where some are saved; then 8 and 4 bits in the blocks, and top-k."""
        if not profile.trains:
            return
        saves_masks = any(op.name in _MASKED_OPS for block in profile.blocks for op in block.ops) or any(
            isinstance(module, _MASKED_LAYERS) for module in profile.model.modules()
        )
        if saves_masks:
            yield ActivationCompressionSetting()
        modules = tuple(block.path for block in profile.blocks)
        for bits in (8, 4):
            yield ActivationCompressionSetting(modules=modules, method=Method.QUANTIZED, bits=bits)
        yield ActivationCompressionSetting(modules=modules, method=Method.TOP_K)

    def promise(self, setting: ActivationCompressionSetting) -> Promise:
        """See `Technique.promise`."""
        if setting.method is Method.MASKS:
            return Promise(Numerics.BITWISE)
        if setting.method is Method.QUANTIZED:
            note = f"gradients of weights are computed from activations in {setting.bits} bits"
        else:
            note = f"gradients of weights are computed from the largest {setting.keep:.0%} of the activations"
        return Promise(Numerics.APPROXIMATE, note)

    def attach(self, live: AttachedProgram, setting: ActivationCompressionSetting) -> None:
        """See `Technique.attach`."""
        _check(setting)
        modules = chosen_modules(live.model, setting.modules, self.name)
        pools = {pool: None for module in modules for pool in module.modules() if isinstance(pool, POOLS)}
        for pool in pools:
            live.surround(pool, ShortIndices())
        for module in modules:
            live.surround(module, Compressing(setting))


def _check(setting: ActivationCompressionSetting) -> None:
    if setting.bits not in (2, 4, 8):
        raise UsageError(f"bits of activation-compression is {setting.bits}", "Give 8, 4 or 2")
    if not (8 <= setting.group <= 32768 and setting.group % 8 == 0):
        raise UsageError(
            f"group of activation-compression is {setting.group}", "Give a multiple of 8 up to 32768"
        )
    if not 0 < setting.keep <= 1:
        raise UsageError(
            f"keep of activation-compression is {setting.keep}", "Give a part of 1, such as 0.25"
        )


class Stored:
    """What stands for a stretch of a storage."""

    __slots__ = ("__weakref__", "_form", "start", "stop")

    def __init__(self, stretch: StorageSpan, form: Compressed) -> None:
        self.start, self.stop, self._form = stretch.start, stretch.stop, form

    def restore(self) -> torch.Tensor:
        """The stretch."""
        return self._form.restore()


class Small:
    """What the graph holds of a compressed tensor."""

    __slots__ = ("_place", "_stored")

    def __init__(self, stored: Stored, place: StoragePlace) -> None:
        self._stored, self._place = stored, place

    def unpack(self) -> torch.Tensor:
        """The tensor, or what is left of it."""
        return self._place.of(self._stored.restore(), self._stored.start)


class Shared:
    """What the graph holds of a tensor that another saves too, perhaps in another shape."""

    __slots__ = ("_kept", "_place")

    def __init__(self, tensor: torch.Tensor, place: StoragePlace) -> None:
        self._kept, self._place = Kept(tensor), place

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        place = self._place
        return self._kept.unpack().as_strided(place.shape, place.stride, place.offset)


class Sign:
    """What the graph holds of a result of ReLU: bits, or the result while somebody else saves it anyway."""

    __slots__ = ("__weakref__", "_held", "_place", "number")

    def __init__(self, stored: Stored, place: StoragePlace, number: int) -> None:
        self._held: Packed = Small(stored, place)
        self._place = place
        self.number = number

    def give_up(self, tensor: torch.Tensor) -> None:
        """Another saves the result itself, or a view of it: bits would be in addition."""
        self._held = Shared(tensor, self._place)

    def unpack(self) -> torch.Tensor:
        """Ones and zeros, or the result."""
        return self._held.unpack()


class Compressing:
    """Surrounds a module whose saved tensors are compressed."""

    def __init__(self, setting: ActivationCompressionSetting) -> None:
        self._setting = setting
        self._in_vain: set[int] = (
            set()
        )  # results of ReLU, by the order in which they are saved, that others save too
        self._begin()

    def _begin(self) -> None:
        self._relus = 0
        self._alone = hooks_outside() is None
        self._found: Found[Stored] = Found()
        self._signs: Found[Sign] = Found()

    def __getstate__(self) -> dict[str, Any]:
        """What was saved in a step under way belongs to this object alone."""
        return {"_setting": self._setting, "_in_vain": self._in_vain}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.__dict__.update(state)
        self._begin()

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass under hooks."""
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        self._begin()
        held = held_storages(module, args, kwargs)
        with packing(partial(self._take, held, in_backward())):
            return forward(*args, **kwargs)

    def _take(self, held: frozenset[int], recomputing: bool, tensor: torch.Tensor) -> Packed | None:
        if not is_plain(tensor) or is_leaf_of_training(tensor) or storage_key(tensor) in held:
            return None
        first, last = span(tensor)
        if (last - first) * tensor.element_size() < self._setting.min_bytes:
            return None
        if _saved_by_relu(tensor) and tensor.numel() == last - first:
            return self._take_signs(tensor, recomputing)
        form = self._form(tensor)
        if form is None:
            self._share(tensor)
            return None
        if recomputing:  # what is recomputed is needed at once
            return Kept(tensor)
        stored = self._found.of(tensor, lambda known: known.start <= first and last <= known.stop)
        if stored is None:
            stretch = StorageSpan(tensor)
            stored = Stored(stretch, form(stretch.flat))
            self._found.add(tensor, stored)
        return Small(stored, StoragePlace(tensor))

    def _form(self, tensor: torch.Tensor) -> Callable[[torch.Tensor], Compressed] | None:
        setting = self._setting
        if tensor.dtype is torch.bool:
            return Bits
        if setting.method is Method.MASKS or not tensor.is_floating_point() or tensor.shape[-1:] == (1,):
            return None  # with a last dimension of 1: statistics of a norm
        if setting.method is Method.QUANTIZED:
            return partial(Groups, bits=setting.bits, group=setting.group)
        return partial(LargestOfGroup, keep=setting.keep, group=setting.group)

    def _take_signs(self, tensor: torch.Tensor, recomputing: bool) -> Packed | None:
        number = self._relus
        self._relus += 1
        if self._alone and number in self._in_vain:
            return None
        if recomputing:
            return Kept(tensor)
        stretch = StorageSpan(tensor)
        sign = Sign(Stored(stretch, Signs(stretch.flat)), StoragePlace(tensor), number)
        self._signs.add(tensor, sign)
        return sign

    def _share(self, tensor: torch.Tensor) -> None:
        """Let ReLU hold the result too, if another saves it on the card: hooks outside may send it elsewhere."""
        sign = self._signs.of(tensor, lambda _: True) if self._alone else None
        if sign is not None:
            sign.give_up(tensor)
            self._in_vain.add(sign.number)


def _saved_by_relu(tensor: torch.Tensor) -> bool:
    """Whether it is ReLU itself that saves its result now: its node has none yet. Others save it later."""
    node = tensor.grad_fn
    if type(node).__name__ != "ReluBackward0":
        return False
    saved = node._raw_saved_result  # type: ignore[union-attr]
    return getattr(saved, "data", saved) is None
