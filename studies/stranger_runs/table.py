"""The table of what became of the scripts, the share with a verdict, and the failures by name and cause."""

from __future__ import annotations

from collections.abc import Sequence

from stranger_runs.outcome import Ending, Outcome

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
