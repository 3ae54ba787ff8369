"""What became of the pairs: one line for each architecture, and for each pair."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

from rich.table import Table
from study_files import markdown_table

from random_budgets.workloads import ARCHITECTURES

_MIB = 1 << 20

_HEADS = (
    "architecture",
    "pairs",
    "honoured",
    "nothing fits",
    "measured / budget: median",
    "most",
    "measured / planned: least",
    "most",
    "extra FLOPs: median",
    "most",
    "s to plan: median",
    "most",
)


class Outcome(Enum):
    """What became of a pair."""

    HONOURED = "honoured"
    EXCEEDED = "exceeded"
    NOTHING_FITS = "nothing fits"
    """The planner said so."""
    FAILED = "failed"
    """Planning or running the plan raised an error."""


def outcome(result: dict[str, Any]) -> Outcome:
    """Judge a pair by what was measured."""
    if "error" in result:
        return Outcome.FAILED
    if not result["fits"]:
        return Outcome.NOTHING_FITS
    return Outcome.HONOURED if result["measured_bytes"] <= result["budget_bytes"] else Outcome.EXCEEDED


def summary(results: Sequence[dict[str, Any]]) -> str:
    """How many budgets were honoured, in a sentence."""
    found = [outcome(result) for result in results]
    parts = [f"{found.count(Outcome.HONOURED)} of {len(found)} budgets honoured"]
    parts += [f"{found.count(kind)} {kind.value}" for kind in Outcome if kind is not Outcome.HONOURED]
    return ", ".join(parts)


def _rows(results: Sequence[dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    groups = {name: [r for r in results if r["architecture"] == name] for name in ARCHITECTURES}
    for name, group in (*groups.items(), ("all", list(results))):
        if group:
            yield (name, *_figures(group))


def _figures(group: list[dict[str, Any]]) -> Iterable[str]:
    outcomes = [outcome(result) for result in group]
    yield str(len(group))
    yield str(outcomes.count(Outcome.HONOURED))
    yield str(outcomes.count(Outcome.NOTHING_FITS))
    run = [result for result in group if "measured_bytes" in result]
    if not run:
        yield from [""] * (len(_HEADS) - 4)
        return
    used = [result["measured_bytes"] / result["budget_bytes"] for result in run]
    yield f"{statistics.median(used):.1%}"
    yield f"{max(used):.2%}"
    planned = [result["measured_bytes"] / result["planned_bytes"] for result in run]
    yield f"{min(planned):.2%}"
    yield f"{max(planned):.2%}"
    extra = [result["extra_flops"] for result in run]
    yield f"{statistics.median(extra):+.1%}"
    yield f"{max(extra):+.1%}"
    seconds = [result["plan_seconds"] for result in run]
    yield f"{statistics.median(seconds):.0f}"
    yield f"{max(seconds):.0f}"


def terminal_table(results: Sequence[dict[str, Any]]) -> Table:
    """One line for each architecture."""
    page = Table(title="Budgets on metered CPU", title_justify="left")
    for index, head in enumerate(_HEADS):
        page.add_column(head, justify="right" if index else "left")
    for row in _rows(results):
        page.add_row(*row)
    return page


def pairs_table(results: Sequence[dict[str, Any]]) -> Table:
    """One line for each pair."""
    page = Table(title="Pairs", title_justify="left")
    for index, head in enumerate(_PAIR_HEADS):
        page.add_column(head, justify="right" if 1 < index < 9 else "left", no_wrap=index < 9)
    for result in results:
        page.add_row(*_pair(result))
    return page


_PAIR_HEADS = (
    "pair",
    "workload",
    "plain MiB",
    "low",
    "budget",
    "planned",
    "measured",
    "own meter",
    "extra FLOPs",
    "numerics",
    "outcome",
    "techniques",
)


def _pair(result: dict[str, Any]) -> tuple[str, ...]:
    def mib(name: str) -> str:
        return f"{result[name] / _MIB:.2f}" if name in result else ""

    shape = " ".join(f"{value} {name}" for name, value in (result["shape"] | result["sizes"]).items())
    return (
        str(result["number"]),
        f"{result['architecture']}: {shape}",
        *(mib(f"{name}_bytes") for name in ("plain", "low", "budget", "planned", "measured", "metered")),
        f"{result['extra_flops']:+.1%}" if "extra_flops" in result else "",
        result["numerics"],
        outcome(result).value,
        result.get("error") or ", ".join(result["techniques"]) or "the plain program",
    )


def page(results: Sequence[dict[str, Any]], versions: str, head: str) -> str:
    """The page for the documentation."""
    lines = ["# Budgets on metered CPU", "", head.format(versions=versions), ""]
    lines += [f"**{summary(results)}.**", ""]
    lines += markdown_table(_HEADS, _rows(results))
    lines += ["", "## The architectures", ""]
    lines += [f"- {name}: {architecture.words}" for name, architecture in ARCHITECTURES.items()]
    lines += ["", "## The pairs", ""]
    lines += markdown_table(_PAIR_HEADS, map(_pair, results))
    return "\n".join(lines) + "\n"
