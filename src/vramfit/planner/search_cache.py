"""What a search saw of a workload, kept for the next search for it: a line of JSON for each run.

NOTE [Trust]: the file begins with everything that a run depends on, as far as it can be known: the workload's name, the
card, the allocator's settings, versions of Python and of all packages, vramfit's own source. Then come the files of the
user's that were read so far, by their hash. If any of it is another, nothing of the file is believed. And the plain
program is run in each search all the same: if it is not the same to the byte and to the microsecond as the one that is
remembered, nothing is believed either. What a run gives does not depend on the budget; what a plan takes within one is
kept with it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from vramfit.planner.devices.cost import StepCost
from vramfit.planner.micro_batch_trial import MicroBatchVerdict
from vramfit.planner.search_evidence import Evidence, digest_of
from vramfit.planner.step_profiler import StepInterval, StepProfile
from vramfit.techniques import (
    BlockOp,
    Choice,
    ModelBlock,
    Profile,
    find_technique,
    setting_from_plain,
    setting_to_plain,
)
from vramfit.techniques.core.model_profile import Saved
from vramfit.techniques.micro_batching import MicroBatchingSetting


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """A combination as it ran.

    Attributes:
        profile: with its model; None where it did not run.
        step: the profile of its step; None where it did not run.
        failed: why it did not run; empty where that needs no reason.
    """

    profile: Profile | None
    step: StepProfile | None
    failed: str = ""


@dataclass(slots=True)
class Runs:
    """Runs of searches for the same workload, sizes and card.

    Attributes:
        profiled: combinations without a limit of memory, by their key.
        costs: plans within a budget, with the budget and the seconds of the optimizer as well.
        micro_batching: what is known of cutting the workload's batches; None where nobody asked, or the time was over.
        count: runs of all searches so far.
    """

    profiled: dict[Hashable, ProfiledRun] = field(default_factory=dict)
    costs: dict[Hashable, StepCost] = field(default_factory=dict)
    micro_batching: MicroBatchVerdict | None = None
    count: int = 0


Plain: TypeAlias = dict[str, Any]

SCHEMA = "vramfit.search/1"


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedStep:
    """A combination as it was profiled.

    Attributes:
        figures: the fields of its profile that are numbers.
        failed: why it is left out, empty where that needs no reason; None where it ran.
    """

    step: StepProfile | None
    figures: Mapping[str, Any]
    failed: str | None = None


@dataclass(slots=True)
class SearchCache:
    """What was seen, in a file that the next search reads.

    Attributes:
        used: records that stood in for a run.
    """

    file: Path
    evidence: Evidence
    used: int = 0
    _known: dict[str, Plain] = field(default_factory=dict)
    _files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Believe what is in the file, or begin anew."""
        records = self._read()
        if records is None:
            self.forget()
            return
        for record in records:
            if record["kind"] == "file":
                self._files[record["path"]] = record["digest"]
            else:
                self._known[record["key"]] = record

    def _read(self) -> list[Plain] | None:
        """All whole records; None where they are not to be believed."""
        try:
            lines = self.file.read_text(encoding="utf-8").splitlines()
            records = [json.loads(line) for line in lines if line.endswith("}")]
        except (OSError, ValueError):
            return None
        if not records or records[0] != self._head():
            return None
        files = [record for record in records[1:] if record["kind"] == "file"]
        if any(digest_of(Path(record["path"])) != record["digest"] for record in files):
            return None
        return records[1:]

    def _head(self) -> Plain:
        return {"schema": SCHEMA, **json.loads(json.dumps(self.evidence.head))}

    def forget(self) -> None:
        """Begin anew: something is not as it was."""
        self._known.clear()
        self._files.clear()
        self.file.write_text(json.dumps(self._head()) + "\n", encoding="utf-8")

    # -- records -------------------------------------------------------------------------------------------------

    def step(self, choices: Iterable[Choice], fine: bool, sizes: Mapping[str, int]) -> CachedStep | None:
        """How a combination was profiled; None where it was not."""
        record = self._known.get(_key("sight", choices, sizes, fine))
        if record is None:
            return None
        self.used += 1
        seen = record["observation"]
        return CachedStep(
            step=None if seen is None else _step(seen),
            figures=record["figures"],
            failed=record["failed"],
        )

    def add_step(
        self, choices: Iterable[Choice], fine: bool, sizes: Mapping[str, int], cached: CachedStep
    ) -> None:
        """Keep how a combination was profiled."""
        seen = None if cached.step is None else _plain_step(cached.step)
        values = {"observation": seen, "figures": dict(cached.figures), "failed": cached.failed}
        self._add("sight", _key("sight", choices, sizes, fine), values)

    def agrees(self, choices: Iterable[Choice], sizes: Mapping[str, int], cached: CachedStep) -> bool:
        """Whether a combination was seen to be just that, where it was seen at all."""
        record = self._known.get(_key("sight", choices, sizes, False))
        if record is None or cached.step is None:
            return True
        now = {"observation": _plain_step(cached.step), "figures": dict(cached.figures)}
        before = {name: record[name] for name in now}
        return bool(json.loads(json.dumps(now)) == before)

    def offers(
        self,
        choices: Iterable[Choice],
        fine: bool,
        sizes: Mapping[str, int],
        host_bytes: int,
        names: Iterable[str],
    ) -> tuple[Choice, ...] | None:
        """What techniques of these names offered for a combination; None where one of them was not asked."""
        record = self._known.get(_key("offers", choices, sizes, [fine, host_bytes]))
        wanted = frozenset(names)
        if record is None or not wanted <= set(record["asked"]):
            return None
        known = ((find_technique(name), setting) for name, setting in record["offers"] if name in wanted)
        return tuple(
            Choice(technique=one, setting=setting_from_plain(one, setting)) for one, setting in known
        )

    def add_offers(
        self,
        choices: Iterable[Choice],
        fine: bool,
        sizes: Mapping[str, int],
        host_bytes: int,
        names: Iterable[str],
        offers: Iterable[Choice],
    ) -> None:
        """Keep what techniques offer for a combination: those of these names were asked."""
        plain = [[choice.name, setting_to_plain(choice.setting)] for choice in offers]
        values = {"asked": list(names), "offers": plain}
        self._add("offers", _key("offers", choices, sizes, [fine, host_bytes]), values)

    def cost(
        self, choices: Iterable[Choice], sizes: Mapping[str, int], budget: int | None, tail: float
    ) -> StepCost | None:
        """What a run within a budget took; None where there was none."""
        record = self._known.get(_key("price", choices, sizes, [budget, tail]))
        if record is None:
            return None
        self.used += 1
        return StepCost(**record["price"])

    def add_cost(
        self,
        choices: Iterable[Choice],
        sizes: Mapping[str, int],
        budget: int | None,
        tail: float,
        cost: StepCost,
    ) -> None:
        """Keep what a run within a budget took."""
        self._add("price", _key("price", choices, sizes, [budget, tail]), {"price": asdict(cost)})

    def micro_batching(self, sizes: Mapping[str, int], *, by_name: bool) -> MicroBatchVerdict | None:
        """What a trial found of cutting batches; None where there was none."""
        record = self._known.get(_key("cutting", (), sizes, by_name))
        if record is None:
            return None
        self.used += 1
        setting = record["setting"]
        found = None if setting is None else setting_from_plain(find_technique("micro-batching"), setting)
        assert found is None or isinstance(found, MicroBatchingSetting)
        return MicroBatchVerdict(found, record["note"], record["known"], tuple(record["encoders"]))

    def add_micro_batching(
        self, sizes: Mapping[str, int], micro_batching: MicroBatchVerdict, *, by_name: bool
    ) -> None:
        """Keep what a trial found."""
        setting = None if micro_batching.setting is None else setting_to_plain(micro_batching.setting)
        values = {
            "setting": setting,
            "note": micro_batching.note,
            "known": micro_batching.known,
            "encoders": micro_batching.encoders,
        }
        self._add("cutting", _key("cutting", (), sizes, by_name), values)

    def _add(self, kind: str, key: str, values: Plain) -> None:
        record = {"kind": kind, "key": key, **values}
        self._known[key] = json.loads(json.dumps(record))
        lines = []
        for path, digest in self.evidence.files().items():
            if self._files.get(path) != digest:
                self._files[path] = digest
                lines.append({"kind": "file", "path": path, "digest": digest})
        with self.file.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(line) + "\n" for line in (*lines, record))


def _key(kind: str, choices: Iterable[Choice], sizes: Mapping[str, int], other: object) -> str:
    named = sorted([choice.name, repr(setting_to_plain(choice.setting))] for choice in choices)
    return json.dumps([kind, named, dict(sorted(sizes.items())), other])


# -- profiles as plain values --------------------------------------------------------------------------------------

_NO_FIGURES = ("model", "optimizer", "sizes", "blocks", "host_bytes")


class _Forgotten(nn.Module):
    """In place of a model that was not made."""


def figures_of(profile: Profile) -> Plain:
    """What a profile holds beside the model and what the request says."""
    names = (name for name in Profile.__slots__ if name not in _NO_FIGURES)
    return {name: _plain(getattr(profile, name)) for name in names}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def profile_from(
    figures: Mapping[str, Any], sizes: Mapping[str, int], host_bytes: int, step: StepProfile
) -> tuple[Profile, StepProfile]:
    """A profile without its model, and the step profile that goes with it."""
    values = dict(figures) | {"capability": tuple(figures["capability"])}
    profile = Profile(
        model=_Forgotten(),
        optimizer=None,
        sizes=dict(sizes),
        blocks=step.blocks,
        host_bytes=host_bytes,
        **values,
    )
    return profile, step


def is_remembered(profile: Profile) -> bool:
    """Whether its model was not made: techniques cannot look at it."""
    return isinstance(profile.model, _Forgotten)


# -- step profiles as plain values ----------------------------------------------------------------------------------


def _plain_step(step: StepProfile) -> Plain:
    """Equal lists of operations once: layers have the same."""
    tables: dict[tuple[BlockOp, ...], int] = {}
    blocks = []
    for block in step.blocks:
        values = {name: getattr(block, name) for name in ModelBlock.__slots__ if name != "ops"}
        blocks.append(values | {"ops": tables.setdefault(block.ops, len(tables))})
    figures = {
        name: getattr(step, name) for name in StepProfile.__slots__ if name not in ("blocks", "intervals")
    }
    return figures | {
        "blocks": blocks,
        "tables": [[_values(op) for op in ops] for ops in tables],
        "stretches": [
            [one.block, one.backward, one.peak_bytes, one.call, one.position] for one in step.intervals
        ],
    }


def _values(op: BlockOp) -> list[Any]:
    return [getattr(op, name) for name in BlockOp.__slots__]


def _step(plain: Mapping[str, Any]) -> StepProfile:
    values = dict(plain)
    tables = [tuple(_op(op) for op in ops) for ops in values.pop("tables")]
    blocks = tuple(
        ModelBlock(**one | {"ops": tables[one["ops"]], "saves": _saves(one)}) for one in values.pop("blocks")
    )
    intervals = tuple(StepInterval(*one) for one in values.pop("stretches"))
    return StepProfile(blocks=blocks, intervals=intervals, **values)


def _saves(plain: Mapping[str, Any]) -> tuple[Saved, ...]:
    return tuple(Saved(*one) for one in plain["saves"])


def _op(values: Sequence[Any]) -> BlockOp:
    named = dict(zip(BlockOp.__slots__, values, strict=True))
    return BlockOp(**named | {"reads": tuple(named["reads"])})
