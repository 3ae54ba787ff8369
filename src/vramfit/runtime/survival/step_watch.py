"""Finds out what a loop's step moves besides gradients, and notes it before each attempt.

NOTE [What a step moves]: containers are noted before every step, a copy of references. Copies of tensors cost memory
and time, so only those are copied that a step writes. Which these are shows in the first steps: the count of writes of
every tensor in reach, and check sums over bits, for arrays and for writes by ``.data``, which nobody counts: before and
after the first step, after the second, the fourth, the eighth. Until then, buffers and small tensors are copied. What
is written for the first time in an attempt that fails was not copied: then the step is not called again, since it would
begin from something else; nor is it where a check sum is another than when it was last taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from vramfit.runtime.survival.copy_places import FirstOnDevice
from vramfit.torch_internals.layers import NormBase
from vramfit.training_state.array_values import bytes_of_array
from vramfit.training_state.check_sums import CheckSums
from vramfit.training_state.container_kinds import MAPPING
from vramfit.training_state.declared import DeclaredState
from vramfit.training_state.reach import Reached, reached_from
from vramfit.training_state.scope import STEP
from vramfit.training_state.state_notes import FarNote, StateNote, Unrestored
from vramfit.training_state.tensor_values import version_of
from vramfit.units import format_bytes

_AT_FIRST, _IN_ALL = 1 << 20, 64 << 20
"""Bytes of a tensor that is copied before the first step although nobody knows yet if it is written, and of all."""

_TINY, _TINY_ONES = 4096, 32
"""Bytes of a tensor that is always copied, and how many of them."""


class WatchedNote:
    """A note of one step, with what only a comparison of values shows.

    Args:
        note: what is put back.
        own: versions of the trained parameters.
        silent: values that nobody copied, and whose writes nobody counts, as they were last seen.
        far: what very long containers hold, as it was last seen.
        declared: copies of states by ``state_dict``.
    """

    def __init__(
        self,
        note: StateNote,
        own: list[tuple[torch.Tensor, int]],
        silent: CheckSums,
        far: FarNote | None,
        declared: list[tuple[Any, Any]],
    ) -> None:
        self.note, self.own, self.silent, self.far, self._declared = note, own, silent, far, declared

    def restore(self) -> list[Unrestored]:
        """Put back all that is noted; what cannot be put back is returned."""
        left = self.note.restore()
        DeclaredState.restore(self._declared)
        copied = self.note.tensors.copy_of
        written = [one for one, version in self.own if version_of(one) != version and copied(one) is None]
        left += [Unrestored(what=f"a parameter of shape {tuple(one.shape)}") for one in written]
        left += [Unrestored(what=_in_words(one)) for one in self.silent.written()]
        if self.far is not None and self.far.differs():
            left.append(Unrestored(what=_FAR))
        return left


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
        self._silent = CheckSums()
        self._far: FarNote | None = None
        self.steps = 0
        self._look()

    def note(self) -> WatchedNote:
        """What is there now."""
        note = StateNote(
            self._reached,
            self._values,
            self._watched,
            self._device,
            arrays=self._arrays,
            copying=FirstOnDevice(),
        )
        own = [(one, version_of(one)) for one in self._parameters]
        if self.steps == 0:
            self._silent = CheckSums((*self._watched, *self._unseen_arrays, *self._parameters))
        return WatchedNote(note, own, self._silent, self._far, self._declared.noted())

    def after_step(self, noted: WatchedNote) -> list[str]:
        """Compare what is there after a step that went well with what was there before.

        Returns:
            what is newly known to move and cannot be put back, in words.
        """
        self.steps += 1
        moved = noted.note.tensors.written()
        moved += [one for one, version in noted.own if version_of(one) != version]
        looks = self.steps & (self.steps - 1) == 0  # after the 1st, 2nd, 4th, 8th, ...
        silent = noted.silent.written() if looks else []
        moved += [one for one in silent if isinstance(one, torch.Tensor)]
        far_moves = looks and noted.far is not None and noted.far.containers_differ()
        if looks and noted.far is not None:
            moved += noted.far.tensors_written()
        if self.steps == 1:
            moved += noted.note.tensors.differing()
        unknown = {id(one): one for one in moved if id(one) not in self._moved}
        self._moved |= unknown
        self._moved_arrays |= {id(one): one for one in silent if not isinstance(one, torch.Tensor)}
        if looks:
            self._moved_arrays |= {id(one): one for one in noted.note.arrays_written()}
        streams = noted.note.moved_streams()
        if unknown or looks:
            self._look()
            self._silent = CheckSums((*self._watched, *self._unseen_arrays))
        words = [f"a {type(stream).__name__} that the step draws from" for stream in streams]
        words += [_FAR] if far_moves else []
        if not self._reached.whole:
            words.append(
                f"perhaps one of the objects that were not looked at: more than {STEP.most:,} are in its reach"
            )
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
        for group in groups:
            reached.hold(MAPPING, group)
        reached.tensors += [
            value for group in groups for value in group.values() if isinstance(value, torch.Tensor)
        ]
        declared = reached_from(self._declared.walked, without=kept_out)
        self._parameters = list(own)
        self._reached = reached
        watched = [one for one in reached.tensors if one.layout is torch.strided]
        far = reached.far or Reached()
        there = set(map(id, (*watched, *own, *far.tensors)))
        self._moved = {key: one for key, one in self._moved.items() if key in there}
        certain = {**self._moved, **{id(one): one for one in declared.tensors}}
        self._values = [*certain.values(), *self._likely(watched, certain)]
        copied = set(map(id, self._values))
        self._watched = [one for one in watched if id(one) not in copied]
        self._arrays = self._some_arrays(reached, declared)
        copied = set(map(id, self._arrays))
        self._unseen_arrays = [one for one in reached.arrays if id(one) not in copied]
        self._far = None if reached.far is None else FarNote(far, without=self._moved)

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
        rest = [one for one in reached.arrays if id(one) not in certain and bytes_of_array(one) <= most]
        return [*certain.values(), *rest[: None if not self.steps else _TINY_ONES]]


_FAR = "something in a very long container"


def _in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"an array of {format_bytes(bytes_of_array(value))}"
