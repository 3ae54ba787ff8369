"""What became of one script, read from the report, the exit code and what it printed; and the table of all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Ending(Enum):
    """How a run came to its end."""

    ITSELF = "by itself"
    STEPS = "by --steps"
    TIME = "by --time"
    LIMIT = "stopped by the benchmark"
    FAILED = "failed"
    NO_CARD = "used no card"
    NOT_INSTALLED = "packages do not install"
    NOT_PREPARED = "not prepared"


_ENDS = {"end": Ending.ITSELF, "steps": Ending.STEPS, "time": Ending.TIME}

UNUSED = "did not use the card"
"""What the report says of a program that used none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one script."""

    name: str
    ending: Ending
    exit_code: int | None = None
    seconds: float = 0.0
    fits: bool | None = None
    used_bytes: int | None = None
    """Peak of reserved bytes and the context."""
    ops: int | None = None
    cause: str = ""
    """Why there is no verdict, in a line."""
    warnings: tuple[str, ...] = ()
    command: str = ""

    @property
    def has_verdict(self) -> bool:
        """Whether it ended with a verdict, by itself or by the steps that were asked for."""
        return self.ending in (Ending.ITSELF, Ending.STEPS)

    @property
    def counts(self) -> bool:
        """Whether it belongs to those that should have a verdict: packages installed, a card in use."""
        return self.ending not in (Ending.NOT_INSTALLED, Ending.NO_CARD)

    def to_json(self) -> dict[str, Any]:
        """As values for ``json``."""
        return asdict(self) | {"ending": self.ending.value}


def from_json(values: dict[str, Any]) -> Outcome:
    """The outcome that ``to_json`` gave."""
    kept = values | {"ending": Ending(values["ending"]), "warnings": tuple(values["warnings"])}
    return Outcome(**kept)


def load(folder: Path) -> dict[str, Outcome]:
    """What earlier runs found, by name."""
    found = {}
    for path in sorted(folder.glob("*.outcome.json")):
        outcome = from_json(json.loads(path.read_text(encoding="utf-8")))
        found[outcome.name] = outcome
    return found


def save(folder: Path, outcome: Outcome) -> None:
    """Keep an outcome: written beside, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{outcome.name}.part"
    part.write_text(json.dumps(outcome.to_json(), indent=1), encoding="utf-8")
    part.rename(folder / f"{outcome.name}.outcome.json")


def judge(
    name: str,
    command: str,
    exit_code: int,
    seconds: float,
    report: dict[str, Any] | None,
    printed: str,
    was_stopped: bool,
) -> Outcome:
    """The outcome of a run that was started; ``report`` is its JSON report, if it wrote one."""
    common: dict[str, Any] = {
        "name": name,
        "exit_code": exit_code,
        "seconds": round(seconds, 1),
        "command": command,
    }
    if report is None:
        ending = Ending.LIMIT if was_stopped else Ending.FAILED
        return Outcome(ending=ending, cause=_last_words(printed), **common)
    fits = report["fits"]
    common |= {
        "fits": fits,
        "used_bytes": report["peak"]["reserved_bytes"] + report["outside_pytorch_bytes"],
        "ops": report["ops"],
        "warnings": tuple(sorted({warning["code"] for warning in report["warnings"]})),
    }
    error = " ".join((report["error"] or "").split())[:300]
    if was_stopped:
        return Outcome(ending=Ending.LIMIT, cause=error, **common)
    if report.get("outcome") == "unused" or (exit_code == 0 and UNUSED in printed):
        return Outcome(ending=Ending.NO_CARD, **common)
    if exit_code in (0, 3) and fits is not None:
        return Outcome(ending=_ENDS.get(report.get("end", "end"), Ending.FAILED), **common)
    return Outcome(ending=Ending.FAILED, cause=error or _last_words(printed), **common)


def _last_words(printed: str) -> str:
    """The last line that says something of an error, else the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or line.startswith("!")]
    return (telling or lines or ["it printed nothing"])[-1][:300]


GOAL = 0.97
"""Share of the scripts whose packages install that should end with a verdict."""


def table(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as a Markdown table."""
    lines = [
        "| script | verdict | peak, MiB | exit code | seconds | ended | cause of failure |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for outcome in outcomes:
        used = "" if outcome.used_bytes is None else f"{outcome.used_bytes / 2**20:,.0f}"
        code = "" if outcome.exit_code is None else str(outcome.exit_code)
        lines.append(
            f"| {outcome.name} | {_verdict(outcome)} | {used} | {code} | {outcome.seconds:.1f} "
            f"| {outcome.ending.value} | {_cell(outcome.cause)} |"
        )
    return "\n".join(lines)


def share(outcomes: Sequence[Outcome]) -> float:
    """Share with a verdict among those whose packages install and that use a card; 1 if there are none."""
    counted = [outcome for outcome in outcomes if outcome.counts]
    return sum(outcome.has_verdict for outcome in counted) / len(counted) if counted else 1.0


def summary(outcomes: Sequence[Outcome]) -> str:
    """How many ended how, and who did not."""
    counted = [outcome for outcome in outcomes if outcome.counts]
    good = [outcome for outcome in counted if outcome.has_verdict]
    itself = sum(outcome.ending is Ending.ITSELF for outcome in good)
    lines = [
        f"{len(good)} of {len(counted)} scripts ({share(outcomes):.1%}) ended with a verdict: {itself} by themselves, "
        f"{len(good) - itself} by --steps."
    ]
    for ending, said in (
        (Ending.NO_CARD, "used no card, so there is nothing to tell"),
        (Ending.NOT_INSTALLED, "have packages that do not install here"),
    ):
        if names := [outcome.name for outcome in outcomes if outcome.ending is ending]:
            lines.append(f"{len(names)} {said}: {', '.join(names)}.")
    if failures := [outcome for outcome in counted if not outcome.has_verdict]:
        lines.append("Without a verdict:")
        lines += [f"- {failed.name}, {failed.ending.value}: {failed.cause}" for failed in failures]
    return "\n".join(lines)


def _verdict(outcome: Outcome) -> str:
    if not outcome.has_verdict:
        return ""
    return "fits" if outcome.fits else "does not fit"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:160]
