"""The rows of the table: what is to be worked out, under which key it is kept, and what was found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from study_files import keep, kept

from frontier_parts.peers import AUTO_SAC, Peer, peers_of
from frontier_parts.subjects import MIB, Subject

PLAN, CUT_PLAN = "plan", "plan, batch may be cut"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One way, and for those that take one its budget.

    Attributes:
        peer: a way of others that has settings rather than a budget.
        solver: whether it is torch's auto-SAC; else without a peer it is a plan of vramfit.
        cut: whether the plan may cut the batch.
        budget: bytes above parameters and gradients; None asks a plan for the lowest peak.
    """

    peer: Peer | None = None
    solver: bool = False
    cut: bool = False
    budget: int | None = None

    @property
    def kind(self) -> str:
        """Of the ways."""
        if self.peer is not None:
            return self.peer.kind
        if self.solver:
            return AUTO_SAC
        return CUT_PLAN if self.cut else PLAN

    @property
    def chunked(self) -> bool:
        """Whether the loss is cut by hand."""
        return self.peer is not None and bool(self.peer.chunks)

    @property
    def name(self) -> str:
        """For people."""
        if self.peer is not None:
            return self.peer.name
        asked = "lowest peak" if self.budget is None else f"{self.budget // MIB} MiB"
        return f"{self.kind}, {asked}"

    @property
    def key(self) -> str:
        """It all, as text."""
        peer = None if self.peer is None else asdict(self.peer)
        return json.dumps({"peer": peer, "solver": self.solver, "cut": self.cut, "budget": self.budget})

    @classmethod
    def of(cls, key: str) -> Row:
        """The row of a key."""
        told = json.loads(key)
        peer = told.pop("peer")
        return cls(**told, peer=None if peer is None else Peer(**peer))


def settings(subject: Subject) -> Iterator[Row]:
    """The rows that need no budget, the plain program first."""
    for peer in peers_of(subject):
        yield Row(peer=peer)


def budgeted(subject: Subject, peak: int) -> Iterator[Row]:
    """The rows that need budgets, which come from the plain program's peak."""
    budgets = subject.budgets(peak)
    for cut in (False, True):
        yield Row(cut=cut)
        for budget in budgets:
            yield Row(budget=budget, cut=cut)
    for budget in budgets[::2]:
        yield Row(solver=True, budget=budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A row that was worked out.

    Attributes:
        subject: its name.
        row: it.
        value: what `worker` found.
    """

    subject: str
    row: Row
    value: dict[str, Any]

    @property
    def peak(self) -> int | None:
        """Measured, in bytes above parameters and gradients; None where it failed."""
        peak: int | None = self.value.get("peak_bytes")
        return peak

    @property
    def flops(self) -> int:
        """Of a step."""
        flops: int = self.value["flops"]
        return flops


class Kept:
    """What is known already: a file of one line for each row.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found: dict[tuple[str, str], Found] = {}
        for told in kept(path):
            self._take(told)

    def _take(self, told: dict[str, Any]) -> None:
        row = Row.of(told["row"])
        self._found[told["subject"], row.key] = Found(subject=told["subject"], row=row, value=told["found"])

    def get(self, subject: str, row: Row) -> Found | None:
        """What was found of a row."""
        return self._found.get((subject, row.key))

    def of(self, subject: str) -> list[Found]:
        """All that was found of a subject."""
        return [found for found in self._found.values() if found.subject == subject]

    def add(self, subject: str, row: Row, value: dict[str, Any]) -> Found:
        """Keep a row at once."""
        told = {"subject": subject, "row": row.key, "found": value}
        keep(self.path, told)
        self._take(told)
        return self._found[subject, row.key]
