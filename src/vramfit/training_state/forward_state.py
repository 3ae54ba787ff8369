"""What forward passes write beside gradients: noted before a pass, put back after it, and compared.

NOTE [State of a forward pass]: queues, counters, centres, codebooks and running means live in buffers, in attributes
of modules, in frozen parameters, in containers and objects that these hold, in generators, and in what a loss function
closes over or names. Some programs write such a tensor in place, some put another in its place, and ``.data`` hides a
write from autograd's count of versions. So the contents of containers are noted by reference, the values of tensors
by copies, and what was written is found by comparing values, each under its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vramfit.training_state.array_values import ArrayState
from vramfit.training_state.container_kinds import (
    BUFFERS,
    GLOBALS,
    MISSING,
    MODULE,
    PARAMETERS,
    ContainerKind,
)
from vramfit.training_state.program_code import called
from vramfit.training_state.random_generators import GeneratorState, is_generator
from vramfit.training_state.reach import (
    PLAIN,
    Label,
    Reached,
    attributes_reached,
    label_in_words,
    named_values,
    reached_in_turn,
)
from vramfit.training_state.scope import FORWARD
from vramfit.training_state.state_notes import ContainersNote, TensorsNote
from vramfit.training_state.tensor_values import same_tensors, version_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A value that a forward pass wrote.

    Attributes:
        before: the value at first; `MISSING` if there was none.
        after: the value afterwards; `MISSING` if it was deleted.
    """

    before: Any
    after: Any

    @property
    def in_place(self) -> bool:
        """Whether a tensor is the same one, written in place; known where values were not copied."""
        both = isinstance(self.before, _Reference) and isinstance(self.after, _Reference)
        return both and self.before.tensor is self.after.tensor

    @property
    def replaced(self) -> bool:
        """Whether another tensor stands in the place; known where values were not copied."""
        return isinstance(self.after, _Reference) and not self.in_place


def attribute_of(name: str) -> str:
    """The module's attribute that a value belongs to: ``head.stats`` of ``head.stats[count]``."""
    return name.partition("[")[0]


def only_written(
    passed: Callable[[frozenset[str]], tuple[Mapping[str, torch.Tensor], Mapping[str, Written]]],
    names: frozenset[str],
) -> bool:
    """Whether values are never read: a pass that begins with what another wrote there gives the same.

    Args:
        passed: takes a pass from the state that all begin with, and returns its gradients and what it wrote; the
            attributes that it is given are left as it wrote them.
        names: of attributes.
    """
    (grads, first), (others, second) = passed(names), passed(frozenset())

    def after(name: str, one: Mapping[str, Written], other: Mapping[str, Written]) -> Any:
        return one[name].after if name in one else other[name].before

    return (
        grads.keys() == others.keys()
        and all(same_values(grad, others[name]) for name, grad in grads.items())
        and all(
            same_values(after(name, first, second), after(name, second, first)) for name in (*first, *second)
        )
    )


def same_values(one: Any, other: Any) -> bool:
    """Whether two values are equal, bit for bit; NaN equals NaN."""
    if isinstance(one, GeneratorState) and isinstance(other, GeneratorState):
        return one.same(other)
    if isinstance(one, ArrayState) and isinstance(other, ArrayState):
        return one.same(other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return same_tensors(one, other)
    return type(one) is type(other) and bool(one == other or one != one)  # nan


class ForwardState:
    """The state of a model, and of what computes its loss, at one moment. See NOTE [State of a forward pass].

    Args:
        model: its buffers, frozen parameters and attributes, those of all its modules.
        loss: a function whose closure and globals are followed; None for the model alone.
        only: names of attributes of the model's modules, to note nothing but them; None for all.
        values: whether values of tensors are copied; otherwise only which tensors there are is noted, and how often
            each was written in place. What was written in place is then seen, and not put back.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any] | None = None,
        *,
        only: frozenset[str] | None = None,
        values: bool = True,
    ) -> None:
        self._model, self._loss, self._only, self._copied = model, loss, only, values
        reached = self._reached()
        self._labels: dict[tuple[ContainerKind, int], Label] = {
            (kind, id(owner)): label for kind, owner, label in reached.places
        }
        self._containers = ContainersNote(reached)
        named = dict(named_values(reached, FORWARD))
        self._live = {name: value for name, value in named.items() if not isinstance(value, PLAIN)}
        tensors = [value for value in self._live.values() if isinstance(value, torch.Tensor)]
        self._tensors = TensorsNote(tensors if values else ())
        self._values = {name: self._noted(value) for name, value in named.items()}

    def _reached(self) -> Reached:
        if self._only is not None:
            return attributes_reached(self._model, sorted(self._only), FORWARD)
        roots: list[tuple[Any, Label]] = [(self._model, "")]
        if self._loss is not None:
            roots.append((self._loss, called(self._loss)))
        return reached_in_turn(roots, FORWARD)

    def _noted(self, value: Any) -> Any:
        """A value as it is compared: a tensor that is noted by its copy, where values are copied."""
        if isinstance(value, torch.Tensor):
            if not self._copied:
                return _Reference(value, version_of(value))
            copy = self._tensors.copy_of(value)
            assert copy is not None
            return copy.values.expand_as(value) if copy.values.shape != value.shape else copy.values
        return _state_of(value)

    def value(self, name: str) -> Any:
        """A value as it was noted; `MISSING` where there was none."""
        return self._values.get(name, MISSING)

    def restore(self, skipped: frozenset[str] = frozenset()) -> None:
        """Put everything back, whether it was written in place or replaced; it can be done any number of times.

        Args:
            skipped: names of the model's attributes that stay as they are.
        """

        def left(kind: ContainerKind, owner: Any, kept: Any) -> Collection[Any] | None:
            if not skipped:
                return ()
            prefix = label_in_words(self._labels[kind, id(owner)])
            if attribute_of(prefix) in skipped:
                return None
            if kind not in (MODULE, BUFFERS, PARAMETERS, GLOBALS):
                return ()
            now = kind.contents(owner)
            return [key for key in {**kept, **now} if kind.name(prefix, key) in skipped]

        self._containers.restore(left)
        with torch.no_grad():
            for name, live in self._live.items():
                if attribute_of(name) in skipped:
                    continue
                if not isinstance(live, torch.Tensor):
                    self._values[name].restore(live)
                elif (copy := self._tensors.copy_of(live)) is not None:
                    copy.restore(compare=self._only is None)

    def written(self) -> dict[str, Written]:
        """What differs now, by name; tensors are copies."""
        found: dict[str, Written] = {}
        now = dict(named_values(self._reached(), FORWARD))
        for name in dict.fromkeys((*self._values, *now)):
            before = self._values.get(name, MISSING)
            after = now.get(name, MISSING)
            if isinstance(after, torch.Tensor) and not self._copied:
                after = _Reference(after, version_of(after))
            elif not isinstance(after, torch.Tensor) and after is not MISSING:
                after = _state_of(after)
            if not same_values(before, after):
                copied = after.detach().clone() if isinstance(after, torch.Tensor) else after
                found[name] = Written(before=before, after=copied)
        return found


@dataclass(frozen=True, slots=True)
class _Reference:
    """A tensor, and how often it had been written in place."""

    tensor: torch.Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference) and (
            self.tensor is other.tensor and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def _state_of(value: Any) -> Any:
    """A value as it is compared, of those that are no tensors."""
    if isinstance(value, PLAIN):
        return value
    return GeneratorState.of(value) if is_generator(value) else ArrayState.of(value)
