"""The protocol of a technique, and a workload with techniques applied.

A technique says where it could be applied, what it promises of the results, and how it is put onto a program.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import total_ordering
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from vramfit.errors import UsageError
from vramfit.plain import decode
from vramfit.techniques.core.attached_program import AttachedProgram, AttachStage
from vramfit.techniques.core.model_profile import Profile
from vramfit.workload import State, Workload, call_model, to_device


@total_ordering
class Numerics(Enum):
    """How far results may differ from the plain program's, from the strictest level on.

    Attributes:
        BITWISE: every value and every gradient is the same, bit for bit.
        ROUNDING: the same mathematics in the same precision, summed in another order.
        PRECISION: fewer bits somewhere: bfloat16, tf32, states of an optimizer in 8 bits.
        APPROXIMATE: other mathematics: compressed activations, projected gradients, another optimizer.
    """

    BITWISE = "bitwise"
    ROUNDING = "rounding"
    PRECISION = "precision"
    APPROXIMATE = "approximate"

    def __lt__(self, other: Numerics) -> bool:
        """Whether this level promises more than the other."""
        order = list(Numerics)
        return order.index(self) < order.index(other)

    @classmethod
    def parse(cls, text: str) -> Numerics:
        """The level of that name.

        Raises:
            UsageError: there is no such one.
        """
        try:
            return cls(text.strip().lower())
        except ValueError:
            names = ", ".join(level.value for level in cls)
            raise UsageError(f"{text!r} is not a level of numerics", f"Give one of {names}") from None


@dataclass(frozen=True, slots=True)
class Promise:
    """What one setting of a technique promises of the results.

    Attributes:
        note: what exactly may differ, in one sentence without a full stop; empty where nothing does.
    """

    numerics: Numerics
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopChange:
    """What a setting of a technique changes of the training loop, so that a loop of a program's own cannot have it.

    Attributes:
        what: it does, in words that follow the technique's name.
        instead: what to do, as an error's hint.
    """

    what: str
    instead: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where and how strongly a technique is applied. Each technique has its own, with plain values alone."""


S = TypeVar("S", bound=Setting)


class Technique(ABC, Generic[S]):
    """A change to a program that lowers its memory.

    Attributes:
        name: the field's standard term, as a plan names it.
        summary: what it does, in one line.
        numerics: the most that any of its settings may change in the results; `promise` is of one setting.
        phase: when it is attached.
        follows: the name of the technique that a plan's search considers, and tables show, right before this one; None
            for the first of all, empty where any place after the others will do.
        quickens: whether it may make a step quicker by itself, and not only by the memory that it leaves to others.
        on_request: whether a plan considers it only where it is named among the allowed ones.
        least: the least that its settings change: a plan that may not change so much does not ask it.
        redraws: whether random layers draw other numbers than in the plain program, of the same distribution.
        excludes: names of techniques that it cannot be combined with, each with the reason.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    numerics: ClassVar[Numerics]
    phase: ClassVar[AttachStage]
    setting_type: ClassVar[type[Setting]]
    follows: ClassVar[str | None] = ""
    quickens: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
    least: ClassVar[Numerics] = Numerics.BITWISE
    redraws: ClassVar[bool] = False
    excludes: ClassVar[Mapping[str, str]] = types.MappingProxyType({})

    @abstractmethod
    def options(self, profile: Profile) -> Iterable[S]:
        """The settings that could pay for a workload, the mildest first; none where it does not apply."""

    @abstractmethod
    def attach(self, live: AttachedProgram, setting: S) -> None:
        """Put the technique onto a live program, in place.

        Everything that it changes is given to ``live.on_undo``, so that `AttachedProgram.undo` leaves the program as it
        was.

        Raises:
            UsageError: it cannot be applied to this program; nothing has been changed then.
        """

    def promise(self, setting: S) -> Promise:  # noqa: ARG002  # settings of some promise less than others
        """What this setting may change in the results."""
        return Promise(self.numerics)

    def loop_change(self, setting: S) -> LoopChange | None:  # noqa: ARG002  # of few techniques it depends on it
        """What this setting changes of the training loop; None where a loop that knows nothing of it can have it."""
        return None

    def describe(self, setting: S) -> str:
        """The setting in words, for tables: what is not the default, as ``name value``."""
        changed = setting_to_plain(setting)
        return ", ".join(f"{name.replace('_', ' ')} {_words(value)}" for name, value in changed.items())

    def apply(self, workload: Workload, setting: S) -> Workload:
        """A new workload with the technique; the given one is not changed.

        Raises:
            UsageError: it cannot be combined with what the workload has already.
        """
        return with_choice(workload, Choice(technique=self, setting=setting))


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A technique with the setting that was chosen."""

    technique: Technique[Any]
    setting: Setting

    @property
    def name(self) -> str:
        """The technique's name."""
        return self.technique.name

    @property
    def stage(self) -> AttachStage:
        """When it is attached."""
        return self.technique.phase

    def attach_to(self, live: AttachedProgram) -> None:
        """Put the technique onto a live program, as `Technique.attach` says."""
        self.technique.attach(live, self.setting)

    @property
    def loop_change(self) -> LoopChange | None:
        """What it changes of the training loop; None where a loop that knows nothing of it can have it."""
        return self.technique.loop_change(self.setting)

    @property
    def words(self) -> str:
        """The name with the setting: ``micro-batching (count 4)``."""
        words = self.technique.describe(self.setting)
        return f"{self.name} ({words})" if words else self.name

    @property
    def promise(self) -> Promise:
        """What it may change in the results."""
        return self.technique.promise(self.setting)


# -- settings as what TOML and JSON can hold ---------------------------------------------------------------------


def setting_to_plain(setting: Any) -> dict[str, Any]:
    """A setting as what TOML and JSON can hold; defaults are left out."""
    plain = {}
    for field in fields(setting):
        value = getattr(setting, field.name)
        if value != _default(field):
            plain[field.name] = _as_plain(value)
    return plain


def setting_from_plain(technique: Technique[S], plain: Mapping[str, Any]) -> S:
    """A setting of a technique from what TOML and JSON can hold.

    Raises:
        UsageError: a name is unknown, a value is not one of those possible, or one is missing.
    """
    kind = cast(type[S], technique.setting_type)
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(plain) - set(known))
    if unknown:
        raise UsageError(
            f"{technique.name} has no setting {unknown[0]!r}", f"It has {', '.join(known) or 'none'}"
        )
    for name, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{name} of {technique.name} is {value}", "Give a number")
    hints = typing.get_type_hints(kind)
    values = {
        name: decode(value, hints[name], f"{name} of {technique.name}") for name, value in plain.items()
    }
    for name, field in known.items():
        if name not in values and _default(field) is dataclasses.MISSING:
            raise UsageError(f"{technique.name} needs the setting {name!r}", "Give it")
    return kind(**values)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _as_plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_as_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    return value


def _words(plain: Any) -> str:
    if isinstance(plain, list):
        shown = ", ".join(map(str, plain[:3]))
        return shown if len(plain) <= 3 else f"{shown} and {len(plain) - 3} more"
    return str(plain)


# -- workloads with techniques ---------------------------------------------------------------------------------------

_LIVE = "vramfit"


@dataclass(frozen=True, kw_only=True, slots=True)
class AppliedWorkload(Workload):
    """A workload with techniques.

    Attributes:
        base: the plain workload.
        choices: the techniques and their settings.
    """

    base: Workload
    choices: tuple[Choice, ...]

    def start(self, device: torch.device | str) -> State:
        """A fresh model and optimizer on a device, with the techniques attached."""
        model = self.make_model()
        live = AttachedProgram(model, lambda _parameters: self.make_optimizer(model), torch.device(device))
        live.attach(self.choices)
        return State(
            model=live.model, optimizer=live.optimizer, device=torch.device(device), extra={_LIVE: live}
        )

    def run_step(self, state: State, sizes: Mapping[str, int]) -> Any:
        """One step at these sizes, as the techniques want it."""
        if self.step is not None or self.loss is None:
            return Workload.run_step(self, state, sizes)
        live: AttachedProgram = state.extra[_LIVE]
        return live.train_step(self.loss, self.batch(**sizes), lambda batch: to_device(batch, state.device))

    def run_forward(self, state: State, sizes: Mapping[str, int]) -> Any:
        """What the model gives for a batch at these sizes, as the techniques want it."""
        live: AttachedProgram = state.extra[_LIVE]
        batch = live.prepared(self.batch(**sizes))
        if not live.host_inputs:
            batch = to_device(batch, state.device)
        with torch.no_grad():
            return live.surrounded(lambda: call_model(state.model, batch))


def live_of(state: State) -> AttachedProgram | None:
    """The techniques' side of a state; None for a plain workload's."""
    found: AttachedProgram | None = state.extra.get(_LIVE)
    return found


def with_choice(workload: Workload, choice: Choice) -> AppliedWorkload:
    """A workload with one technique more.

    Raises:
        UsageError: it is there already, or two exclude each other.
    """
    choices = workload.choices if isinstance(workload, AppliedWorkload) else ()
    base = workload.base if isinstance(workload, AppliedWorkload) else workload
    check_together((*choices, choice))
    parts = {field.name: getattr(base, field.name) for field in fields(Workload)}
    return AppliedWorkload(base=base, choices=(*choices, choice), **parts)


def with_choices(workload: Workload, choices: tuple[Choice, ...]) -> Workload:
    """A workload with several techniques.

    Raises:
        UsageError: two exclude each other.
    """
    for choice in choices:
        workload = with_choice(workload, choice)
    return workload


def check_together(choices: tuple[Choice, ...]) -> None:
    """Make sure that techniques can be combined.

    Raises:
        UsageError: one is there twice, or two exclude each other.
    """
    names = [choice.name for choice in choices]
    for index, choice in enumerate(choices):
        if choice.name in names[:index]:
            raise UsageError(f"{choice.name} appears twice", "Leave one out")
        for other in choices:
            if other is not choice and (why := choice.technique.excludes.get(other.name)):
                raise UsageError(
                    f"{choice.name} cannot be combined with {other.name}: {why}", "Leave one out"
                )
