"""The protocol of a technique: where it could be applied, what it promises, and how it is put onto a program."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from vramfit.errors import UsageError
from vramfit.techniques.core.numerics import Numerics, Promise

if TYPE_CHECKING:
    from vramfit.techniques.core.live import AttachedProgram
    from vramfit.techniques.core.profile import Profile
    from vramfit.workload import Workload


class AttachStage(IntEnum):
    """When a technique is attached: each finds what the earlier ones made.

    Attributes:
        MODEL: the model is where it was made; its tensors may change dtype or be shared.
        PLACEMENT: in place of moving the model to the device as a whole.
        OPTIMIZER: the model is placed and the optimizer made, in a workload without state yet; it may be exchanged.
        LOSS: what computes the loss may be exchanged.
        FORWARD: forward passes of modules are surrounded, the inner ones first.
        CONTEXT: the forward pass of the whole model is surrounded.
        STEP: batches are split, losses scaled, steps taken otherwise.
    """

    MODEL = 0
    PLACEMENT = 1
    OPTIMIZER = 2
    LOSS = 3
    FORWARD = 4
    CONTEXT = 5
    STEP = 6


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
        setting_type: the dataclass of its settings.
        quickens: whether it may make a step quicker by itself, and not only by the memory that it leaves to others.
        on_request: whether a plan considers it only where it is named among the allowed ones.
        redraws: whether random layers draw other numbers than in the plain program, of the same distribution.
        excludes: names of techniques that it cannot be combined with, each with the reason.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    numerics: ClassVar[Numerics]
    phase: ClassVar[AttachStage]
    setting_type: ClassVar[type[Setting]]
    quickens: ClassVar[bool] = False
    on_request: ClassVar[bool] = False
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

    def describe(self, setting: S) -> str:
        """The setting in words, for tables: what is not the default, as ``name value``."""
        told = []
        for field in dataclasses.fields(setting):
            value = getattr(setting, field.name)
            if value != _default(field):
                told.append(f"{field.name.replace('_', ' ')} {_plain_text(value)}")
        return ", ".join(told)

    def apply(self, workload: Workload, setting: S) -> Workload:
        """A new workload with the technique; the given one is not changed.

        Raises:
            UsageError: it cannot be combined with what the workload has already.
        """
        from vramfit.techniques.core.applied import with_choice

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
    def words(self) -> str:
        """The name with the setting: ``micro-batching (count 4)``."""
        told = self.technique.describe(self.setting)
        return f"{self.name} ({told})" if told else self.name

    @property
    def promise(self) -> Promise:
        """What it may change in the results."""
        return self.technique.promise(self.setting)


def setting_to_plain(setting: Setting) -> dict[str, Any]:
    """A setting as what TOML and JSON can hold; defaults are left out."""
    plain = {}
    for field in dataclasses.fields(setting):
        value = getattr(setting, field.name)
        if value != _default(field):
            plain[field.name] = _as_plain(value)
    return plain


def setting_from_plain(technique: Technique[S], plain: Mapping[str, Any]) -> S:
    """A setting of a technique from what TOML and JSON can hold.

    Raises:
        UsageError: a name is unknown, or a value is none of those possible.
    """
    fields = {field.name: field for field in dataclasses.fields(technique.setting_type)}
    unknown = sorted(set(plain) - set(fields))
    if unknown:
        raise UsageError(
            f"{technique.name} has no setting {unknown[0]!r}", f"It has {', '.join(fields) or 'none'}"
        )
    hints = typing.get_type_hints(technique.setting_type)
    values = {name: _read(technique.name, name, value, hints[name]) for name, value in plain.items()}
    try:
        return typing.cast(S, technique.setting_type(**values))
    except TypeError as error:
        missing = [n for n, f in fields.items() if _default(f) is dataclasses.MISSING and n not in values]
        if not missing:
            raise
        raise UsageError(f"{technique.name} needs the setting {missing[0]!r}", "Give it") from error


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


def _plain_text(value: Any) -> str:
    plain = _as_plain(value)
    if isinstance(plain, list):
        shown = ", ".join(map(str, plain[:3]))
        return shown if len(plain) <= 3 else f"{shown} and {len(plain) - 3} more"
    return str(plain)


def _read(technique: str, name: str, value: Any, kind: Any) -> Any:
    """A plain value as the type that a setting's field has."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        return _read(technique, name, value, parts[0])
    if origin is tuple and isinstance(value, list | tuple):
        of = typing.get_args(kind)[0]
        return tuple(_read(technique, name, item, of) for item in value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise UsageError(f"{name} of {technique} is {value!r}", f"Give one of {known}") from None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is float and not math.isfinite(value):
        raise UsageError(f"{name} of {technique} is {value}", "Give a number")
    if isinstance(kind, type) and type(value) is kind:
        return value
    if (
        origin is not None
        and isinstance(origin, type)
        and isinstance(value, Mapping)
        and issubclass(origin, Mapping)
    ):
        of = typing.get_args(kind)[1]
        return {str(key): _read(technique, name, item, of) for key, item in value.items()}
    wanted = kind.__name__ if isinstance(kind, type) else str(kind)
    raise UsageError(f"{name} of {technique} is {value!r}", f"It has to be of type {wanted}")
