"""What ``vramfit doctor`` found, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from vramfit.doctor.card_accounting import CardAccount, account_lines, accounts
from vramfit.doctor.facts import Diagnosis, Finding, Severity
from vramfit.plain import to_plain
from vramfit.report.folding import broken
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.units import format_bytes

SCHEMA = "vramfit.doctor/1"

_STYLES = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "cyan",
    Severity.OK: "green",
}


@json_values.register(Diagnosis)
def _json_values(diagnosis: Diagnosis) -> dict[str, Any]:
    """The document of ``vramfit doctor --json``; see docs/doctor.md."""
    return {
        "schema": SCHEMA,
        "worst": diagnosis.worst.value,
        "counts": {severity.value: len(diagnosis.of(severity)) for severity in Severity},
        "findings": to_plain(diagnosis.findings),
        "cards": [_account(account) for account in accounts(diagnosis.facts)],
        "facts": to_plain(diagnosis.facts),
    }


@printed_as_lines(Diagnosis, widest=140)
def _all_lines(diagnosis: Diagnosis, width: int) -> Iterator[Text]:
    """The findings, the heaviest first, then where each card's bytes are."""
    for finding in diagnosis.findings:
        if finding.severity is not Severity.OK:
            for line in _lines(finding):
                yield from broken(line, width, indent=8)
    fine = diagnosis.of(Severity.OK)
    if fine:
        yield Text("as it should be", style=_STYLES[Severity.OK])
        for finding in fine:
            yield from broken(Text(f"  {finding.area.value}: {finding.finding}"), width, indent=4)
    for account in accounts(diagnosis.facts):
        yield Text()
        yield from _account_lines(account)
    yield Text()
    yield Text(_summary(diagnosis), style="bold")


def _lines(finding: Finding) -> Iterator[Text]:
    yield Text.assemble(
        (finding.severity.value, _STYLES[finding.severity]),
        f"  {finding.area.value}: ",
        (finding.finding, "bold"),
    )
    if finding.why:
        yield Text(f"  why   {finding.why}")
    if finding.fix:
        yield Text(f"  fix   {finding.fix}")


def _account_lines(account: CardAccount) -> Iterator[Text]:
    seen = "not seen by torch" if account.torch_index is None else f"cuda:{account.torch_index}"
    yield Text(f"GPU {account.index}, {account.name} ({seen})", style="bold")
    rows = [*account_lines(account), ("total", account.total)]
    longest = max(len(name) for name, _ in rows)
    for name, size in rows:
        yield Text(f"  {name:<{longest}}    {format_bytes(size):>10}")


def _summary(diagnosis: Diagnosis) -> str:
    counted = [
        f"{len(diagnosis.of(severity))} {severity.value}{'s' if len(diagnosis.of(severity)) != 1 else ''}"
        for severity in (Severity.ERROR, Severity.WARNING)
    ]
    return f"{', '.join(counted)}; {len(diagnosis.of(Severity.OK))} as it should be"


def _account(account: CardAccount) -> dict[str, Any]:
    return {
        "index": account.index,
        "name": account.name,
        "torch_index": account.torch_index,
        "total_bytes": account.total,
        "driver_reserved_bytes": account.driver_reserved,
        "other_processes_bytes": account.others,
        "context_bytes": account.own_context,
        "torch_reserved_bytes": account.own_reserved,
        "unaccounted_bytes": account.unaccounted,
        "free_bytes": account.free,
        "torch_total_bytes": account.torch_total,
    }
