"""Finds out what a loop's step moves besides gradients, and notes it before each attempt.

NOTE [What a step moves]: containers are noted before every step, a copy of references. Copies of tensors cost memory
and time, so only those are copied that a step writes. Which these are shows in the first steps: the count of writes of
every tensor in reach, and a sum over its bits in the very first step, for writes by ``.data``, which are not counted.
Until then, buffers and small tensors are copied. A tensor that is written for the first time in an attempt that fails
was not copied: then the step is not called again, since it would begin from something else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.runtime.state.declared import DeclaredState
from vramfit.runtime.state.reach import Reached, reached_from
from vramfit.runtime.state.state_notes import StateNote, Unrestored, version_of
from vramfit.torch_internals.fake_tensors import FakeTensor
from vramfit.torch_internals.layers import NormBase

_CONTAINERS = 512
"""Containers of each kind that are noted before every step: some 0.1 us each."""

_AT_FIRST, _IN_ALL = 1 << 20, 64 << 20
"""Bytes of a tensor that is copied before the first step although nobody knows yet if it is written, and of all."""

_TINY, _TINY_ONES = 4096, 32
"""Bytes of a tensor that is always copied, and how many of them."""

_MOST_WATCHED = 4096


class WatchedNote:
    """A note of one step, with what is told by value alone.

    Args:
        note: what is put back.
        own: versions of the trained parameters.
        sums: over the bits of tensors, in the first step.
        declared: copies of states by ``state_dict``.
    """

    def __init__(
        self,
        note: StateNote,
        own: list[tuple[torch.Tensor, int]],
        sums: dict[int, int],
        declared: list[tuple[Any, Any]],
    ) -> None:
        self.note, self.own, self.sums, self._declared = note, own, sums, declared

    def restore(self) -> list[Unrestored]:
        """Put back all that is noted; what cannot be put back is returned."""
        left = self.note.restore()
        DeclaredState.restore(self._declared)
        copied = self.note.tensors.holds
        written = [one for one, version in self.own if version_of(one) != version and not copied(one)]
        return left + [Unrestored(what=f"a parameter of shape {tuple(one.shape)}") for one in written]


class StepWatch:
    """See NOTE [What a step moves].

    Args:
        model: that the step trains.
        optimizer: of the step; what its own ``step`` moves is not looked at.
        roots: functions and objects that a step calls and names.
        declared: state that the program names.
        device: where the model computes.

    Attributes:
        steps: that went well.
        problems: what a step was seen to move and that cannot be put back, in words.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        roots: Iterable[Any],
        declared: DeclaredState,
        device: torch.device,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._roots, self._declared = list(roots), declared
        self.problems: list[str] = []
        self._moved: dict[int, torch.Tensor] = {}
        self._moved_arrays: dict[int, Any] = {}
        self.steps = 0
        self._look()

    def note(self) -> WatchedNote:
        """What is there now."""
        first = self.steps == 0
        note = StateNote(
            self._reached,
            self._values,
            self._watched,
            self._device,
            limit=None if first else _CONTAINERS,
            arrays=self._arrays,
        )
        own = [(one, version_of(one)) for one in self._parameters]
        sums = {}
        if first:
            sums = {id(one): bits_of(one) for one in (*self._watched, *self._parameters)}
        return WatchedNote(note, own, sums, self._declared.noted())

    def after_step(self, noted: WatchedNote) -> list[str]:
        """Compare what is there after a step that went well with what was there before.

        Returns:
            what is newly known to move and cannot be put back, in words.
        """
        self.steps += 1
        moved = noted.note.tensors.written()
        moved += [one for one, version in noted.own if version_of(one) != version]
        moved += [
            one
            for one in (*self._watched, *self._parameters)
            if id(one) in noted.sums and bits_of(one) != noted.sums[id(one)]
        ]
        if self.steps == 1:
            moved += noted.note.tensors.differing()
        unknown = {id(one): one for one in moved if id(one) not in self._moved}
        self._moved |= unknown
        if self.steps == 1:
            arrays = [array for array, before in noted.note.arrays if array.tobytes() != before.tobytes()]
            self._moved_arrays = {id(array): array for array in arrays}
        streams = noted.note.moved_streams()
        if unknown or self.steps & (self.steps - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...
            self._look()
        words = [f"a {type(stream).__name__} that the step draws from" for stream in streams]
        new = [one for one in dict.fromkeys(words) if one not in self.problems]
        self.problems += new
        return new

    def unrepeatable(self, noted: WatchedNote) -> str:
        """What an attempt changed in a module in such a way that the module cannot run twice; empty if nothing.

        Statistics of norm layers are left alone by the second run, and torch's generators are set for it.
        """
        if noted.note.generators.host_moved():
            return "random numbers of Python or NumPy are drawn in the step"
        for name, module in self._model.named_modules():
            if isinstance(module, NormBase):
                continue
            if noted.note.containers.has_changed((vars(module), module._buffers)):
                return f"{name or 'the model'} changes its attributes"
            if any(noted.note.tensors.has_written(one) for one in module.buffers(recurse=False)):
                return f"{name or 'the model'} writes a buffer"
        return ""

    def _look(self) -> None:
        """Follow everything, and decide what is copied."""
        optimizer, model = self._optimizer, self._model
        groups = optimizer.param_groups
        trained = (
            one for one in model.parameters() if one.requires_grad
        )  # frozen ones may be averages of these
        own = dict.fromkeys([*trained, *(one for group in groups for one in group["params"])])
        gradients = [one.grad for one in own if one.grad is not None]
        kept_out = [optimizer, optimizer.state, groups, *own, *gradients, *self._declared.apart]
        reached = reached_from([model, *self._roots, *self._declared.walked], without=kept_out)
        reached.mappings += groups
        reached.tensors += [
            value for group in groups for value in group.values() if isinstance(value, torch.Tensor)
        ]
        declared = reached_from(self._declared.walked, without=kept_out)
        self._parameters = list(own)
        self._reached = reached
        watched = [one for one in reached.tensors if one.layout is torch.strided][:_MOST_WATCHED]
        there = set(map(id, (*watched, *own)))
        self._moved = {key: one for key, one in self._moved.items() if key in there}
        certain = {**self._moved, **{id(one): one for one in declared.tensors}}
        self._values = [*certain.values(), *self._likely(watched, certain)]
        copied = set(map(id, self._values))
        self._watched = [one for one in watched if id(one) not in copied]
        self._arrays = self._some_arrays(reached, declared)

    def _likely(
        self, watched: Sequence[torch.Tensor], certain: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Tensors that are copied although they were not seen to be written: before the first step, and tiny ones."""
        rest = [one for one in watched if id(one) not in certain]
        if self.steps:
            return [one for one in rest if one.nbytes <= _TINY and not one.requires_grad][:_TINY_ONES]
        buffers = set(map(id, self._model.buffers()))
        likely, left = [], _IN_ALL
        for one in rest:
            if one.nbytes <= left and (one.nbytes <= _AT_FIRST or id(one) in buffers):
                likely.append(one)
                left -= one.nbytes
        return likely

    def _some_arrays(self, reached: Reached, declared: Reached) -> list[Any]:
        certain = {**self._moved_arrays, **{id(one): one for one in declared.arrays}}
        most = _TINY if self.steps else _AT_FIRST
        rest = [one for one in reached.arrays if id(one) not in certain and one.nbytes <= most]
        return [*certain.values(), *rest[: None if not self.steps else _TINY_ONES]]


def bits_of(tensor: torch.Tensor) -> int:
    """A check sum over a tensor's bits; 0 where it has none to read, or not in one piece."""
    plain = tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor) and type(tensor) in _KINDS
    if not plain or not tensor.is_contiguous() or not tensor.numel() or tensor.is_complex():
        return 0
    with torch.no_grad():
        return zlib.adler32(tensor.detach().view(-1).view(torch.uint8).numpy().data)


_KINDS = (torch.Tensor, nn.Parameter)
