"""Runs out of memory where a test says so: at the n-th storage that torch's ops make."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Faults(TorchDispatchMode):
    """Raises in place of the n-th result with a storage of its own, as the op's allocator would.

    The op has computed by then and its results are dropped, so that what it drew and wrote into its arguments is done:
    harder than on a card, where most ops allocate before they write.

    Args:
        at: numbers of the allocations that fail, from 0.
    """

    def __init__(self, *at: int) -> None:
        super().__init__()
        self.at, self.seen, self.raised = set(at), 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        known = {one.untyped_storage()._cdata for one in leaves_of((args, kwargs))}
        if any(one.untyped_storage()._cdata not in known for one in leaves_of(made)):
            number, self.seen = self.seen, self.seen + 1
            if number in self.at:
                self.raised += 1
                del made
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. (a test's)")
        return made


def leaves_of(value: Any) -> list[torch.Tensor]:
    """The dense tensors of a structure."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return [leaf for leaf in found if leaf.layout is torch.strided]
