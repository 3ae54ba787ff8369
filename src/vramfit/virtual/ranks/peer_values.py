"""What is known of values that come from other ranks: they are taken to equal this rank's.

A collective reduces, gathers or exchanges what all ranks hold. One of them runs here, so the others are taken to hold
the same: a sum over n ranks is n times this rank's value, a mean, a maximum or a minimum is the value itself, what is
gathered is this rank's part n times. That holds for batches of one size, for counts of processes and for settings. It
does not hold for what a program means to differ from rank to rank: rank numbers, ragged batches, tokens sent to
experts. Only small values are followed at all (shadow.py), and so only these can decide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.distributed import ReduceOp

from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.virtual.data_dependent.expectations import NOTHING, WATCHED
from vramfit.virtual.data_dependent.shadow import may_be_known, may_carry
from vramfit.virtual.op_runner import OpRunner

_BY_NAME = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.AVG,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}


def named_reduction(name: str) -> ReduceOp.RedOpType:
    """The reduction that functional collectives name by a word."""
    return _BY_NAME.get(name.lower(), ReduceOp.SUM)


class PeerValues:
    """Moves known values as collectives do. See the docstring of this module."""

    def __init__(self, mode: OpRunner) -> None:
        self._mode = mode

    def forget(self, tensor: torch.Tensor) -> None:
        """Nothing is known of the values of a tensor any more."""
        if type(tensor) is not FakeTensor:
            return  # what a real tensor holds, it holds
        mode = self._mode
        mode.shadows.forget(tensor)
        mode.shading.masks.forget(tensor)
        mode.shading.fills.forget(tensor)
        if tensor.dtype in WATCHED:
            mode.meter.expect(tensor, None)

    def reduce(self, tensor: torch.Tensor, op: ReduceOp.RedOpType, ranks: int) -> None:
        """Let a tensor hold the reduction over ranks that all hold what it holds."""
        if ranks == 1 or op in (ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.BAND, ReduceOp.BOR):
            return
        if op == ReduceOp.PREMUL_SUM:
            self.forget(tensor)  # torch keeps the factor to itself
            return
        values = self.look(tensor)
        if type(tensor) is FakeTensor:
            self._mode.shading.fills.forget(tensor)
            self._mode.shading.masks.forget(tensor)
            if tensor.dtype in WATCHED:
                self._mode.meter.expect(tensor, None)
        if values is None or values.dtype is torch.bool:
            return
        if op is ReduceOp.SUM or op == ReduceOp.SUM:
            values.mul_(ranks)
        elif op == ReduceOp.PRODUCT:
            values.pow_(ranks)
        elif op == ReduceOp.BXOR and ranks % 2 == 0:
            values.zero_()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Let a tensor hold what another of as many elements, or of fewer that come several times, holds."""
        values = self.look(source)
        expected = NOTHING
        if type(source) is FakeTensor and source.dtype in WATCHED:
            expected = self._mode.meter.expected(source)
        if values is None or not values.numel() or target.numel() % values.numel():
            self.forget(target)
        else:
            times = target.numel() // values.numel()
            flat = values.reshape(-1)
            repeated = flat if times == 1 else flat.expand(times, -1).reshape(-1)
            self._write(target, repeated.reshape(target.shape).to(target.dtype), self._guessed(source))
        if type(target) is FakeTensor and target.dtype in WATCHED and expected is not NOTHING:
            self._mode.meter.expect(target, replace(expected, exact=False, total=None))

    def part(self, target: torch.Tensor, source: torch.Tensor, position: int, parts: int) -> None:
        """Let a tensor hold one of so many equal parts of another along its first dimension, over and over."""
        values = self.look(source)
        if values is None or values.numel() % parts or not values.numel():
            self.forget(target)
            return
        one = values.reshape(-1).chunk(parts)[position]
        if target.numel() % one.numel():
            self.forget(target)
            return
        times = target.numel() // one.numel()
        repeated = one if times == 1 else one.expand(times, -1).reshape(-1)
        self._write(target, repeated.reshape(target.shape).to(target.dtype), self._guessed(source))

    def pick(self, target: torch.Tensor, sources: Sequence[torch.Tensor], position: int) -> None:
        """Let a tensor hold what one of several tensors holds; nothing is known where there are none."""
        if position < len(sources) and sources[position].numel() == target.numel():
            self.copy(target, sources[position])
        else:
            self.forget(target)

    # -- real tensors and shadows of virtual ones ------------------------------------------------------------

    def look(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The known values of a tensor, to be changed in place; None where they are not known."""
        return self._mode.shadows.view(tensor) if type(tensor) is FakeTensor else tensor.detach()

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Let a tensor hold values that are assumed."""
        self.forget(target)
        self._write(target, values, True)

    def _guessed(self, tensor: torch.Tensor) -> bool:
        shadow = self._mode.shadows.find(tensor) if type(tensor) is FakeTensor else None
        return shadow is not None and shadow.guessed

    def _write(self, target: torch.Tensor, values: torch.Tensor, guessed: bool) -> None:
        if type(target) is not FakeTensor:
            target.detach().copy_(values)
            return
        shadows = self._mode.shadows
        self._mode.shading.masks.forget(target)
        self._mode.shading.fills.forget(target)
        if (shadow := shadows.find(target)) is not None:
            held = shadows.view(target)
            assert held is not None
            held.copy_(values)
            shadow.guessed |= guessed
        elif _whole(target) and (may_carry(target) or may_be_known(target) or target.dtype is torch.uint8):
            shadows.set(target, values, guessed=guessed)  # pickled objects are known whatever their size
        elif target.dtype is torch.uint8:
            # Objects of all ranks are gathered into parts of one fresh tensor, of which the rest holds nothing yet.
            whole = torch.UntypedStorage(target.untyped_storage().nbytes())
            shadows.share(target, whole, guessed=guessed)
            held = shadows.view(target)
            assert held is not None
            held.copy_(values)


def _whole(tensor: torch.Tensor) -> bool:
    return tensor.storage_offset() == 0 and tensor.nbytes == tensor.untyped_storage().nbytes()
