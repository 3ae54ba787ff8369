"""True values for small fake tensors: a *shadow* is a real CPU storage that follows a small virtual one.

A fake tensor computes nothing, yet programs look at small values: ``loss.item()``, a GradScaler's scale, step
counters, a generated token. So each virtual storage of at most `MAX_ELEMENTS` elements may carry a shadow, on which
every op that touches it runs too. Views need no care: they share the storage, so they share the shadow. Indices and
masks decide shapes and branches (which tokens stand for a picture, is anything padded?), so their shadows may have up
to `MAX_KNOWN` elements, as long as all of their values are true ones.

Where an op reads something without a shadow (a big activation), its small results are *guessed* (plausible_values.py).
A guess is marked, the mark follows whatever is computed from it, and whoever looks at one gets a warning.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vramfit.capture.ops import OpInfo
from vramfit.torch_internals.pytree import tree_map
from vramfit.virtual.data_dependent.expectations import WATCHED

MAX_ELEMENTS = 4096
MAX_KNOWN = 1 << 18
_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})


class Shadow(weakref.ref[torch.UntypedStorage]):
    """The real CPU storage behind one virtual storage. The weak reference itself notices when that is gone."""

    __slots__ = ("guessed", "key", "real")

    key: int
    real: torch.UntypedStorage
    guessed: bool


class ShadowStore:
    """All shadows of a virtual GPU, by the address of the storage that they follow."""

    def __init__(self) -> None:
        self._shadows: dict[int, Shadow] = {}

    def find(self, tensor: torch.Tensor) -> Shadow | None:
        """The shadow of a fake tensor's storage, if it has one."""
        if tensor.layout is not torch.strided:
            return None
        return self._shadows.get(tensor.untyped_storage()._cdata)

    def has_all(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether each of some strided fake tensors has a shadow."""
        shadows = self._shadows
        return all(tensor.untyped_storage()._cdata in shadows for tensor in tensors)

    def view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """A real CPU tensor with the fake one's dtype, shape and strides over the shadow; None without one."""
        shadow = self.find(tensor)
        if shadow is None:
            return None
        return _over(shadow.real, tensor)

    def count(self, tensor: torch.Tensor, *, guessed: bool = False) -> int | None:
        """How many elements of a fake tensor are not zero, repeated ones included; None where that is unknown."""
        shadow = self.find(tensor)
        if shadow is None or (shadow.guessed and not guessed):
            return None
        once, repeats = _over(shadow.real, tensor), 1
        for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            if not stride and size > 1:
                once, repeats = once.narrow(axis, 0, 1), repeats * size
        return int(once.count_nonzero()) * repeats

    def set(self, tensor: torch.Tensor, value: torch.Tensor, *, guessed: bool = False) -> None:
        """Give a fake tensor's (whole, small) storage the values of a real one of the same shape."""
        real = torch.UntypedStorage(tensor.untyped_storage().nbytes())
        self.share(tensor, real, guessed=guessed)
        target = _over(real, tensor)
        for axis, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
            if not stride and size > 1:  # an expanded dimension has one place for all its elements
                target, value = target.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
        target.copy_(value)

    def share(self, tensor: torch.Tensor, real: torch.UntypedStorage, *, guessed: bool = False) -> None:
        """Let a real CPU storage of the same bytes be the values of a fake tensor's storage, now and later."""
        storage = tensor.untyped_storage()
        shadow = Shadow(storage, self._drop)
        shadow.key = storage._cdata
        shadow.real = real
        shadow.guessed = guessed
        self._shadows[shadow.key] = shadow

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop the shadow of a tensor that was overwritten with unknown values."""
        if tensor.layout is torch.strided:
            self._shadows.pop(tensor.untyped_storage()._cdata, None)

    def _drop(self, shadow: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(shadow, Shadow)
        if self._shadows.get(shadow.key) is shadow:
            del self._shadows[shadow.key]


def may_carry(tensor: torch.Tensor) -> bool:
    """Whether a fresh fake tensor is small enough for a shadow, be it of guessed values."""
    if tensor.layout is not torch.strided:
        return False
    return 0 < tensor.numel() <= MAX_ELEMENTS and tensor.untyped_storage().nbytes() <= MAX_ELEMENTS * 16


def most_known(tensor: torch.Tensor) -> int:
    """Most elements that a tensor of this type may have and be followed by true values."""
    return MAX_KNOWN if tensor.dtype in WATCHED else MAX_ELEMENTS


def may_be_known(tensor: torch.Tensor) -> bool:
    """Whether a fresh fake tensor is small enough for a shadow of true values."""
    if tensor.numel() <= MAX_ELEMENTS or tensor.dtype not in WATCHED:
        return may_carry(tensor)
    if tensor.layout is not torch.strided:
        return False
    return tensor.numel() <= MAX_KNOWN and tensor.untyped_storage().nbytes() <= MAX_KNOWN * 8


def follows(info: OpInfo, out: Any, written: Sequence[torch.Tensor], kinds: Sequence[int]) -> bool:
    """Whether the shadows may change when a call like this one runs, or random numbers are consumed.

    Args:
        kinds: of each result, whether it is fresh (0): the storage of others may be of any size.
    """
    if info.random or any(t.numel() <= most_known(t) for t in written):
        return True
    if not info.fresh:
        return False
    results = out if isinstance(out, (list, tuple)) else (out,)
    return any(
        may_be_known(t) if kind == 0 else 0 < t.numel() <= most_known(t)
        for t, kind in zip(results, kinds, strict=True)
        if isinstance(t, torch.Tensor)
    )


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty(0, dtype=like.dtype, device="cpu")  # whatever the program's default device
    out.set_(storage, like.storage_offset(), like.size(), like.stride())
    return out


def map_tensors(function: Any, tree: Any) -> Any:
    """Apply ``function`` to each tensor of nested arguments."""
    kind = type(tree)
    if kind is tuple:
        return tuple([map_tensors(function, item) for item in tree])
    if kind is list:
        return [map_tensors(function, item) for item in tree]
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if kind in _LEAVES:
        return tree
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
