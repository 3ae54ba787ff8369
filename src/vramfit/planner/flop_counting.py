"""Counts the arithmetic of operations, and runs each as it would run where nothing counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vramfit.capture.gradient_sums import summed

Estimate: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, int], float]
"""The seconds of an operation, from itself, its arguments, its results and its FLOPs."""


class FlopMode(TorchDispatchMode):
    """Counts what torch's own counter counts, and holds nothing: that one's module hooks keep tensors alive.

    Args:
        estimate: the seconds of an operation, from itself, its arguments, its results and its FLOPs; None for no time.

    Attributes:
        total: FLOPs so far.
        seconds: estimated so far.
    """

    def __init__(self, estimate: Estimate | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._estimate = estimate
        self.total = 0
        self.seconds = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not wrap each call to keep its compiler away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count it."""
        kwargs = kwargs or {}
        out = called(func, args, kwargs)
        flops = flops_of(func, args, kwargs, out)
        self.total += flops
        if self._estimate is not None and func.namespace != "prim":
            self.seconds += self._estimate(func, args, kwargs, out, flops)
        return out


def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an operation; of a sum of gradients, in place where it would be without a mode."""
    total = summed(func, args, kwargs)
    return func(*args, **kwargs) if total is None else total


def flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    """Multiplications and additions as torch's own counter counts them, of in-place and ``out=`` forms too."""
    packet = func._overloadpacket
    if packet.__name__.endswith("_") and func.namespace == "aten":
        packet = getattr(torch.ops.aten, packet.__name__[:-1], packet)
    count: Callable[..., int] | None = flop_registry.get(packet)
    if count is None:
        return 0
    given = {name: value for name, value in kwargs.items() if name != "out"}
    try:
        return int(count(*args, **given, out_val=out))
    except (TypeError, AssertionError, ValueError, IndexError):
        return 0  # a form of the operation that the counter does not know


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation, or of a module: in lists, tuples and dicts.

    It is asked several times for every operation, which `torch.utils._pytree` with its registry is slow at.
    """
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from tensors_of(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_of(item)
