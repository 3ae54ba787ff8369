"""What a plan holds, and its file: TOML written to be read by people, and read back with each value checked."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import tomlkit
from tomlkit.items import Table

from vramfit.errors import UsageError
from vramfit.masking import mask_text
from vramfit.plain import decode
from vramfit.techniques import (
    Choice,
    Numerics,
    check_together,
    find_technique,
    setting_from_plain,
    setting_to_plain,
)
from vramfit.units import format_bytes
from vramfit.writing import write_text

SCHEMA = "vramfit.plan/2"

CUMULATIVE_SCHEMA = "vramfit.plan/1"
"""Of files in which what a technique saves and costs counts beyond those before it; such figures are left out."""

_COUNT = "technique_count"
"""The key by which a file that was cut off between two techniques is known."""

_KEYS = frozenset(
    {
        *("schema", "notes", "compared", "aim", "before", "after", "solved", "technique"),
        *("rejected", "freedom", _COUNT),
    }
)

T = TypeVar("T")
P = TypeVar("P", bound="PlanContents")

_INLINE = 4
"""A list of more strings than this is written a line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFigures:
    """What a step needs.

    Attributes:
        peak_allocated_bytes: most bytes that tensors hold at once.
        peak_reserved_bytes: most bytes that torch's allocator holds.
        total_bytes: what the device has to have: reserved, and the CUDA context.
        host_bytes: most that was pinned on the host, and what else techniques hold there.
        step_seconds: estimated; 0 where it did not come to the end of a step.
        step_flops: of a step; 0 where nobody counted them.
        retries: how often torch's allocator empties its cache in each step, since the device has no memory left.
        retry_seconds: what that costs, as part of `step_seconds`.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    total_bytes: int
    host_bytes: int = 0
    step_seconds: float = 0.0
    step_flops: int = 0
    retries: int = 0
    retry_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanStep:
    """One technique of a plan, with what removing it alone would change.

    Attributes:
        choice: the technique with its setting.
        saves_bytes: how much more the device's total would be without it; negative where it would be less. None where
            that was not run, or does not run.
        costs_seconds: how much quicker a step would be without it; negative where it would be slower. None as above.
    """

    choice: Choice
    saves_bytes: int | None = None
    costs_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherWay:
    """What a plan was compared with: a recipe, or another combination of techniques.

    Attributes:
        name: a recipe's own, such as ``full checkpointing``; else its techniques in words.
        why: why it is not the plan, in words.
        numerics: how far its results may differ.
        total_bytes: that the device has to have; 0 where it did not run.
        step_seconds: estimated; 0 where it did not run.
        fits: whether it stays within the budget.
        predicted: whether the figures are predictions; else they are those of a run.
    """

    name: str
    why: str
    numerics: Numerics = Numerics.ROUNDING
    total_bytes: int = 0
    step_seconds: float = 0.0
    fits: bool = False
    predicted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTarget:
    """What a plan was made for.

    Attributes:
        device: name of the card, or ``CPU``.
        budget_bytes: what the program may take of the device, the CUDA context included.
        margin_bytes: of the budget, left free on purpose.
        host_budget_bytes: memory of the host that may be spent; 0 where none was given.
        numerics: how far results may differ.
        objective: ``throughput``, ``memory``, or a size that was made as large as possible.
        sizes: of the batch.
        target: the workload, as ``FILE.py:NAME``; empty where it came from Python, or from a program.
        program: the command line of the program, where it was planned for one.
        model: the class of the model of that program which the techniques are for; empty for a workload.
        model_parameters: its elements.
        trained_parameters: of them, those that an optimizer has.
        torch: its version.
    """

    device: str
    budget_bytes: int
    margin_bytes: int = 0
    host_budget_bytes: int = 0
    numerics: Numerics = Numerics.ROUNDING
    objective: str = "throughput"
    sizes: Mapping[str, int] = field(default_factory=dict)
    target: str = ""
    program: tuple[str, ...] = ()
    model: str = ""
    model_parameters: int = 0
    trained_parameters: int = 0
    torch: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverStats:
    """How the plan was found.

    Attributes:
        status: of the solver, in words.
        gap: how far its cost may be above the best possible, as a part of it; None where no solver was needed.
        seconds: that the solver took.
        runs: how many runs on the device the search took.
        remembered: how many more were there from an earlier search.
        search_seconds: all in all.
        first_plan_seconds: after which there was a plan that fits; None without one.
        stopped: why the search did not come to its end: ``time`` or ``interrupted``; None where it did.
    """

    status: str = ""
    gap: float | None = None
    seconds: float = 0.0
    runs: int = 0
    remembered: int = 0
    search_seconds: float = 0.0
    first_plan_seconds: float | None = None
    stopped: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanContents:
    """What the file of a plan holds.

    Attributes:
        entries: the techniques, in the order in which they count.
        aim: what it was made for.
        before: the plain program; on a device that it does not fit, as if the device were large enough.
        notes: what a reader should know, a sentence each.
        compared: what the plan's gradients were compared with: which model, and how many examples of it; empty where
            they were not, and None where nobody tried, as in plans that people write.
        rejected: what was tried and is not the plan, the quickest of those that fit first.
        freedom: recipes that change results more than was allowed, run for the comparison alone.
    """

    entries: tuple[PlanStep, ...]
    aim: PlanTarget
    before: PlanFigures
    after: PlanFigures
    solved: SolverStats = field(default_factory=SolverStats)
    notes: tuple[str, ...] = ()
    compared: str | None = None
    rejected: tuple[OtherWay, ...] = ()
    freedom: tuple[OtherWay, ...] = ()

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The techniques with their settings."""
        return tuple(entry.choice for entry in self.entries)


def write_plan(path: str | os.PathLike[str], plan: PlanContents) -> None:
    """Write a plan; its workload is named by the path from the plan's folder, so that both can move together.

    Raises:
        WriteError: the file cannot be written.
    """
    target = beside(plan.aim.target, Path(path).parent)
    write_text(Path(path), plan_to_toml(replace(plan, aim=replace(plan.aim, target=target))))


def beside(target: str, folder: Path) -> str:
    """``FILE.py:NAME`` with the file's path as seen from a folder; as it is where there is no such file here."""
    file, _, name = target.rpartition(":")
    if not file or not Path(file).is_file():
        return target
    try:
        path = os.path.relpath(Path(file).resolve(), folder.resolve())
    except ValueError:  # another drive of Windows
        return target
    return f"{Path(path).as_posix()}:{name}"


def from_beside(target: str, folder: Path) -> str:
    """The other way: the path as seen from here; as it is where the folder has no such file."""
    file, _, name = target.rpartition(":")
    if not file or not (folder / file).is_file():
        return target
    return f"{os.path.normpath(folder / file)}:{name}"


def plan_to_toml(plan: PlanContents) -> str:
    """The text of the file."""
    document = tomlkit.document()
    document.add(
        tomlkit.comment(
            "A plan of vramfit. Apply it with vramfit.Plan.load(FILE), try it with vramfit verify FILE."
        )
    )
    document["schema"] = SCHEMA
    document[_COUNT] = len(plan.entries)
    if plan.notes:
        document["notes"] = _plain_list(list(plan.notes))
    if plan.compared is not None:
        document["compared"] = plan.compared
    document["aim"] = _table(plan.aim)
    document["before"] = _table(plan.before)
    document["after"] = _table(plan.after)
    document["solved"] = _table(plan.solved)
    for name, tables in (
        ("technique", [_entry(entry, promised=plan.compared != "") for entry in plan.entries]),
        ("rejected", [_table(other) for other in plan.rejected]),
        ("freedom", [_table(other) for other in plan.freedom]),
    ):
        if tables:
            document[name] = tomlkit.aot()
            for table in tables:
                document[name].append(table)
    return mask_text(tomlkit.dumps(document))


def _entry(entry: PlanStep, *, promised: bool) -> Table:
    """The table of a technique; what was not compared is no promise of the plan's."""
    table = tomlkit.table()
    promise = entry.choice.promise
    table.add(tomlkit.comment(entry.choice.technique.summary))
    table["name"] = entry.choice.name
    if promised:
        table["promise"] = promise.numerics.value
        if promise.note:
            table["promise"].comment(promise.note)
    else:
        table.add(
            tomlkit.comment(f"{promise.numerics.value} by construction, not compared: see vramfit verify")
        )
    if entry.saves_bytes is not None:
        table["saves_bytes"] = entry.saves_bytes
        table["saves_bytes"].comment(format_bytes(entry.saves_bytes))
    if entry.costs_seconds is not None:
        table["costs_seconds"] = entry.costs_seconds
    setting = tomlkit.table()
    for name, value in setting_to_plain(entry.choice.setting).items():
        setting[name] = _item(value)
    table["setting"] = setting
    return table


def _table(value: Any) -> Table:
    table = tomlkit.table()
    for one in dataclasses.fields(value):
        found = getattr(value, one.name)
        if found is None:
            continue
        if isinstance(found, Numerics):
            found = found.value
        table[one.name] = _item(found)
        if one.name.endswith("_bytes"):
            table[one.name].comment(format_bytes(found))
    return table


def _item(value: Any) -> Any:
    if isinstance(value, list):
        return _plain_list(value)
    if isinstance(value, Mapping):
        table = (
            tomlkit.table() if any(isinstance(v, list) for v in value.values()) else tomlkit.inline_table()
        )
        for key, item in value.items():
            table[key] = _item(item)
        return table
    return value


def _plain_list(values: list[Any]) -> Any:
    array = tomlkit.array()
    array.extend(values)
    return array.multiline(len(values) > _INLINE)


def read_plan(path: str | os.PathLike[str], kind: type[P]) -> P:
    """Read a plan.

    Args:
        kind: `PlanContents`, or what has more on top of it.

    Raises:
        UsageError: there is no such file, or it is not a plan; the message says where.
    """
    file = Path(path)
    if file.suffix == ".py":
        raise UsageError(
            f"{file} is a program, not a plan", f"Make its plan: vramfit plan --gpu NAME -o plan.toml {file}"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"there is no plan {file}", "Make one with vramfit plan FILE.py:NAME -o PLAN"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}", "Give a file that vramfit plan wrote") from error
    found = plan_from_toml(text, kind, name=str(file))
    target = from_beside(found.aim.target, file.parent)
    return replace(found, aim=replace(found.aim, target=target))


def plan_from_toml(text: str, kind: type[P], *, name: str = "the plan") -> P:
    """The plan that a text holds; a person who writes one may leave out the tables of figures.

    Args:
        kind: `PlanContents`, or what has more on top of it.

    Raises:
        UsageError: it is not a plan; the message says where.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f"{name} is not valid TOML: {error}", "Correct it, or make it anew with vramfit plan"
        ) from error
    if document.get("schema") not in (SCHEMA, CUMULATIVE_SCHEMA):
        raise UsageError(
            f"{name} is not a plan: its schema is {document.get('schema')!r}, not {SCHEMA!r}",
            "Give a file that vramfit plan wrote",
        )
    try:
        if unknown := sorted(set(document) - _KEYS):
            raise UsageError(f"it has an unknown key {unknown[0]!r}", f"It has {', '.join(sorted(_KEYS))}")
        found = kind(
            entries=tuple(_read_entry(entry) for entry in _tables(document, "technique")),
            aim=_read(PlanTarget, document.get("aim", {}), "aim"),
            before=_read(PlanFigures, document.get("before", {}), "before"),
            after=_read(PlanFigures, document.get("after", {}), "after"),
            solved=_read(SolverStats, document.get("solved", {}), "solved"),
            notes=decode(document.get("notes", []), tuple[str, ...], "notes"),
            compared=decode(document.get("compared"), str | None, "compared"),
            rejected=tuple(_read(OtherWay, one, "rejected") for one in _tables(document, "rejected")),
            freedom=tuple(_read(OtherWay, one, "freedom") for one in _tables(document, "freedom")),
        )
        check_together(found.choices)
        if document["schema"] == CUMULATIVE_SCHEMA:
            _check_sums(found)
            return replace(found, entries=tuple(PlanStep(choice=choice) for choice in found.choices))
        _check_count(found, document.get(_COUNT))
        return found
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", error.hint) from error


_CUT_OFF = "its techniques are not all there"


def _check_count(plan: PlanContents, count: Any) -> None:
    """Refuse a plan that lacks techniques, as a file does that was cut off between two of them.

    A person who writes one need not count.
    """
    if count is not None and count != len(plan.entries):
        raise UsageError(
            f"{_CUT_OFF}: {_COUNT} is {count}, and it lists {len(plan.entries)}",
            f"Copy the file again or make it anew; if you changed the list yourself, correct {_COUNT} or take it out",
        )


def _check_sums(plan: PlanContents) -> None:
    """The same for a file without a count, in which figures of techniques add up from before to after.

    Nothing can be told where all of them are missing, nor where they have no figures, since they were not run one by
    one or since a person wrote the plan.
    """
    before, after = plan.before, plan.after
    saved = sum(entry.saves_bytes or 0 for entry in plan.entries)
    seconds = before.step_seconds + sum(entry.costs_seconds or 0.0 for entry in plan.entries)
    known = any(entry.saves_bytes or entry.costs_seconds for entry in plan.entries) and before != after
    if not known or not before.total_bytes or not after.total_bytes:
        return
    bytes_agree = saved == before.total_bytes - after.total_bytes
    if not bytes_agree or not math.isclose(seconds, after.step_seconds, rel_tol=1e-6, abs_tol=1e-9):
        raise UsageError(
            f"{_CUT_OFF}: what they save and cost does not add up to the figures before and after",
            "Copy the file again or make it anew; if you changed the list yourself, take out saves_bytes and "
            "costs_seconds of every technique",
        )


def _tables(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = document.get(name, [])
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise UsageError(f"{name} is not a list of tables", f"Write [[{name}]] above each")
    return found


def _read_entry(table: Mapping[str, Any]) -> PlanStep:
    name = table.get("name")
    if not isinstance(name, str):
        raise UsageError("a technique has no name", 'Write name = "..." into its table')
    technique = find_technique(name)
    setting = table.get("setting", {})
    if not isinstance(setting, Mapping):
        raise UsageError(f"the setting of {name} is not a table", "Write [technique.setting] below it")
    rest = {key: value for key, value in table.items() if key in ("saves_bytes", "costs_seconds")}
    unknown = sorted(set(table) - {"name", "promise", "setting", *rest})
    if unknown:
        raise UsageError(f"{name} has an unknown key {unknown[0]!r}", "Settings go below [technique.setting]")
    figures = _values(PlanStep, rest, name)
    choice = Choice(technique=technique, setting=setting_from_plain(technique, setting))
    promised = choice.promise.numerics.value
    if (written := table.get("promise", promised)) != promised:
        raise UsageError(
            f"the promise of {name} is {written!r}, and with this setting it is {promised!r}",
            "Leave the line out, or correct the setting",
        )
    return PlanStep(choice=choice, **figures)


def _read(kind: type[T], table: Any, where: str) -> T:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where} is not a table", f"Write [{where}] above its values")
    values = _values(kind, table, where)
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            values.setdefault(one.name, "" if one.type == "str" else 0)
    return kind(**values)


def _values(kind: type, table: Mapping[str, Any], where: str) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in table.items():
        if name not in hints:
            raise UsageError(f"{where} has an unknown key {name!r}", f"It has {', '.join(hints)}")
        parsed = hints[name] is Numerics and isinstance(value, str)
        values[name] = Numerics.parse(value) if parsed else decode(value, hints[name], f"{name} of {where}")
        if kind is not PlanStep:  # what a technique saves and costs may be less than nothing
            _check_not_negative(values[name], f"{name} of {where}")
    return values


def _check_not_negative(value: Any, what: str) -> None:
    if isinstance(value, Mapping):
        for name, size in value.items():
            if size < 1:
                raise UsageError(f"{name} in {what} is {size}", "Sizes are whole numbers from 1 on")
    elif isinstance(value, int | float) and not value >= 0:
        raise UsageError(f"{what} is {value}", "It cannot be negative")
