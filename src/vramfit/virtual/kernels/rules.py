"""What rules of kernels are written with: tables by op, sizes, and the order in which temporaries come and go.

`Scratch` lets a rule read as torch's C++ does: a kernel takes and gives back one block after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vramfit.torch_internals.dispatch import OpOverload
from vramfit.virtual.op_call import Extras, OpCall

Rule = Callable[[OpCall], Extras | None]


def overloads(*names: str) -> list[OpOverload]:
    """The aten overloads of these names (``"mm"`` or ``"mm.out"``) that this torch release has."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if isinstance(op, OpOverload):
            found.append(op)
    return found


def table(rules: Mapping[tuple[str, ...] | str, Rule]) -> dict[OpOverload, Rule]:
    """Turn rules keyed by one or more op names into rules keyed by overload."""
    return {
        op: rule
        for names, rule in rules.items()
        for op in overloads(*((names,) if isinstance(names, str) else names))
    }


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a dense copy of a tensor."""
    return tensor.numel() * tensor.element_size()


def dense_copy(tensor: torch.Tensor | None) -> int:
    """Bytes of the contiguous copy of a tensor; 0 where it is contiguous already, or not there."""
    return 0 if tensor is None or tensor.is_contiguous() else nbytes(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def temporaries(*sizes: int, error_bytes: int = 0, error_below_bytes: int = 0) -> Extras | None:
    """Extras after the outputs; None when nothing is allocated."""
    kept = tuple(size for size in sizes if size)
    if not (kept or error_bytes):
        return None
    return Extras(after=kept, error_bytes=error_bytes, error_below_bytes=error_below_bytes)


def workspace(*sizes: int, error_bytes: int = 0, error_below_bytes: int = 0) -> Extras | None:
    """Extras before the outputs; None when nothing is allocated."""
    kept = tuple(size for size in sizes if size)
    if not (kept or error_bytes):
        return None
    return Extras(before=kept, error_bytes=error_bytes, error_below_bytes=error_below_bytes)


def given_back(number: int) -> int:
    """An entry of `Extras` that takes no block but gives one back: the ``number``-th of its list, from 1."""
    return -number


def round_up(value: int, multiple: int) -> int:
    """The next multiple at or above a value."""
    return -(-value // multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    """Quotient rounded up."""
    return -(-value // divisor)


class Scratch:
    """Blocks of one kernel in order of time; those not given back live until it returns.

    A size of 0 takes no block: it stands for a tensor that was not needed.
    """

    __slots__ = ("_entries", "_taken", "above", "below")

    def __init__(self) -> None:
        self._entries: list[int] = []
        self._taken = 0
        self.above = 0
        self.below = 0

    def take(self, nbytes: int) -> int:
        """Take a block; returns its number, 0 for none."""
        if nbytes <= 0:
            return 0
        self._entries.append(nbytes)
        self._taken += 1
        return self._taken

    def copy(self, tensor: torch.Tensor | None) -> int:
        """Take the block of a tensor's contiguous copy; none where it is contiguous already, or not there."""
        return self.take(dense_copy(tensor))

    def give(self, *blocks: int) -> None:
        """Give blocks back, in this order."""
        self._entries.extend(given_back(block) for block in blocks if block)

    def use(self, nbytes: int) -> None:
        """Take a block and give it back before the next one: storage of a library call."""
        self.give(self.take(nbytes))

    def doubt(self, error: tuple[int, int]) -> None:
        """Widen the error bar: how many bytes more and how many fewer a block may have.

        One block at a time decides the peak, so the widest counts.
        """
        self.above = max(self.above, error[0])
        self.below = max(self.below, error[1])

    @property
    def entries(self) -> tuple[int, ...]:
        """What `Extras` lists."""
        return tuple(self._entries)


def sequence(before: Scratch | None = None, after: Scratch | None = None) -> Extras | None:
    """Extras of blocks taken before and after an op's outputs; None when there are none."""
    parts = [part for part in (before, after) if part is not None]
    above, below = max(p.above for p in parts), max(p.below for p in parts)
    first = before.entries if before is not None else ()
    second = after.entries if after is not None else ()
    if not (first or second or above or below):
        return None
    return Extras(before=first, after=second, error_bytes=above, error_below_bytes=below)


def around_outputs(fill: Callable[[OpCall, Scratch, Scratch], None]) -> Rule:
    """The rule of a kernel that takes blocks before the op's outputs, and others after them."""

    def rule(call: OpCall) -> Extras | None:
        before, after = Scratch(), Scratch()
        fill(call, before, after)
        return sequence(before, after)

    return rule


def before_outputs(fill: Callable[[OpCall, Scratch], None]) -> Rule:
    """The rule of a kernel that takes all of its blocks before the op's outputs."""
    return around_outputs(lambda call, before, _: fill(call, before))


def after_outputs(fill: Callable[[OpCall, Scratch], None]) -> Rule:
    """The rule of a kernel that takes its blocks once the op's outputs are there."""
    return around_outputs(lambda call, _, after: fill(call, after))
