"""A calibration for people (tables) and for programs (JSON, docs/calibrate.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from rich.text import Text

from vramfit.calibrate.calibration_result import Calibration, OpComparison, OpVerdict, Tally
from vramfit.calibrate.records import OpRecord, to_text
from vramfit.gpus.measured_profile import Rates
from vramfit.plain import to_plain
from vramfit.report.folding import table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.report.text import signed
from vramfit.units import format_bytes

SCHEMA = "vramfit.calibrate/1"
_SHOWN = 30
_VERDICT_STYLES = {
    OpVerdict.WITHIN_BAR: "yellow",
    OpVerdict.DIFFERENT: "red",
    OpVerdict.ONLY_MEASURED: "magenta",
    OpVerdict.ONLY_PREDICTED: "magenta",
}


@printed_as_lines(Calibration, widest=sys.maxsize)
def _lines(found: Calibration, width: int) -> Iterator[Text]:
    """The tables of families, of first uses, of speeds and of disagreements."""
    about = found.about
    yield Text.assemble(
        (about.name, "bold"),
        f", {format_bytes(about.total_bytes)}, torch {about.torch}",
        f", CUDA {about.cuda}" if about.cuda else "",
        f", driver {about.driver}" if about.driver else "",
        " (the virtual GPU in the card's place)" if about.source == "virtual" else "",
    )
    tables = (
        (
            _FAMILIES,
            [_family(tally, found) for tally in (*found.families, found.total)] if found.families else [],
        ),
        (_GROWTHS, list(_growths(found))),
        (("Speed", "measured"), [] if found.rates is None else list(_speeds(found.rates))),
    )
    for heads, rows in tables:
        if rows:
            yield Text()
            yield from table(heads, rows, width)
    yield Text()
    yield from _disagreements(found.disagreements)
    yield from _failures(found)
    yield _conclusion(found)


_FAMILIES = (
    "Family",
    "cases",
    "failed",
    "ops",
    "exact",
    "same bytes",
    "in error bar",
    "different",
    "one side",
    "time",
)


def _family(tally: Tally, found: Calibration) -> list[Text]:
    """How the ops of a family compare, or of all."""
    count = tally.verdicts.get
    one_sided = count(OpVerdict.ONLY_MEASURED, 0) + count(OpVerdict.ONLY_PREDICTED, 0)
    cells = (
        tally.name,
        str(tally.cases),
        _or_blank(tally.failed),
        str(tally.calls),
        str(count(OpVerdict.EXACT, 0)),
        _or_blank(count(OpVerdict.SAME_BYTES, 0)),
        _or_blank(count(OpVerdict.WITHIN_BAR, 0)),
        _or_blank(count(OpVerdict.DIFFERENT, 0)),
        _or_blank(one_sided),
        "" if tally.time_ratio is None else f"{tally.time_ratio:.2f}x",
    )
    return [Text(cell, style="bold" if tally is found.total else "") for cell in cells]


def _or_blank(count: int) -> str:
    return str(count) if count else ""


_GROWTHS = ("First use of", "outside torch", "virtual GPU", "kept in torch", "virtual GPU")


def _growths(found: Calibration) -> Iterator[list[Text]]:
    """What the first use of each library takes, and what the virtual GPU has for it."""
    expected = {growth["name"]: growth for growth in found.expected_growths}
    for growth in found.growths:
        told: Mapping[str, Any] = expected.get(growth["name"], {})
        cells = (
            growth["name"],
            format_bytes(growth["outside"]),
            format_bytes(told["outside"]) if told else "",
            format_bytes(growth["kept"]),
            format_bytes(told["kept"]) if told else "",
        )
        yield [Text(cell) for cell in cells]


def _speeds(rates: Rates) -> Iterator[list[Text]]:
    """What was measured of the card and its link."""
    for dtype, rate in rates.flops.items():
        yield [Text(f"matrix product, {dtype}"), Text(f"{rate / 1e12:.1f} TFLOP/s")]
    if rates.bandwidth is not None:
        yield [Text("memory"), Text(f"{rates.bandwidth / 1e9:,.0f} GB/s")]
    if rates.launch_seconds is not None:
        yield [Text("smallest kernel"), Text(f"{rates.launch_seconds * 1e6:.1f} us")]
    for way, kinds in (("to the card", rates.to_card), ("to the host", rates.to_host)):
        for kind, rate in kinds.items():
            yield [Text(f"copy {way}, {kind}"), Text(f"{rate / 1e9:.1f} GB/s")]


def _disagreements(found: list[OpComparison]) -> Iterator[Text]:
    if not found:
        return
    yield Text(f"Disagreements ({len(found)}; the card's bytes less the predicted ones)", style="bold")
    for comparison in found[:_SHOWN]:
        yield Text.assemble(
            f"{signed(comparison.difference):>12}  ",
            (comparison.verdict.value, _VERDICT_STYLES.get(comparison.verdict, "")),
            f"  {comparison.op}  ",
            (comparison.case, "dim"),
        )
        yield Text(f"              {comparison.signature}", style="dim")
        for name, record in (("card", comparison.measured), ("told", comparison.predicted)):
            if record is not None:
                yield Text(f"              {name} {_steps(record)}")
    if len(found) > _SHOWN:
        yield Text(f"and {len(found) - _SHOWN} more: --json FILE has them all")


def _steps(record: OpRecord) -> str:
    text = to_text(record.steps) or "nothing"
    if record.first is not None:
        text += f", first {to_text(record.first)}"
    if record.above or record.below:
        text += f" (may be {format_bytes(record.above)} more, {format_bytes(record.below)} less)"
    return text


def _failures(found: Calibration) -> Iterator[Text]:
    for failure in found.failures.values():
        yield Text(f"not measured: {failure.case}: {failure.text} ({failure.kind})", style="yellow")
    for case, reason in found.unpredicted.items():
        yield Text(f"not predicted: {case}: {reason}", style="yellow")


def _conclusion(found: Calibration) -> Text:
    total = found.total
    if total.share is None:
        return Text("Nothing was compared.")
    text = (
        f"{total.exact} of {total.calls} ops exact in bytes ({_percent(total.exact, total.calls)}); of those that take "
        f"more than their results, {total.temporaries_exact} of {total.with_temporaries}"
    )
    if total.with_temporaries:
        text += f" ({_percent(total.temporaries_exact, total.with_temporaries)})"
    if found.left:
        text += f". {found.left} cases are left for the next run of the same command"
    return Text(f"{text}.", style="bold")


def _percent(part: int, whole: int) -> str:
    """A share that is 100 % only if nothing is missing."""
    share = 100 * part / whole
    return "100 %" if part == whole else f"{min(share, 99.9):.1f} %"


# -- JSON ----------------------------------------------------------------------------------------------------


@json_values.register(Calibration)
def _json_values(found: Calibration, profile: str | None) -> dict[str, Any]:
    """Everything as values that `json` can write. Sizes are bytes.

    Args:
        profile: the file that the profile was written to, None if it was not.
    """
    about = found.about
    return {
        "schema": SCHEMA,
        "source": about.source,
        "gpu": {"name": about.name, "total_bytes": about.total_bytes},
        "torch": about.torch,
        "cuda": about.cuda,
        "cudnn": about.cudnn,
        "driver": about.driver,
        "profile": profile,
        "journal": None if found.journal is None else str(found.journal),
        "left": found.left,
        "all": _tally(found.total),
        "families": {tally.name: _tally(tally) for tally in found.families},
        "first_uses": _first_uses(found),
        "rates": to_plain(found.rates),
        "disagreements": [_comparison(comparison) for comparison in found.disagreements],
        "cases": [
            {
                "name": name,
                "seconds": record.seconds,
                "estimated_seconds": found.predicted[name].seconds if name in found.predicted else None,
            }
            for name, record in found.measured.items()
        ],
        "failures": [
            {"case": failure.case, "kind": failure.kind, "reason": failure.text}
            for failure in found.failures.values()
        ],
        "unpredicted": [{"case": case, "reason": reason} for case, reason in found.unpredicted.items()],
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "cases": tally.cases,
        "failed": tally.failed,
        "ops": tally.calls,
        "exact_in_bytes": tally.exact,
        "share": tally.share,
        "with_temporaries": tally.with_temporaries,
        "with_temporaries_exact": tally.temporaries_exact,
        "verdicts": {verdict.name.lower(): count for verdict, count in tally.verdicts.items()},
        "time_ratio": tally.time_ratio,
    }


def _first_uses(found: Calibration) -> list[dict[str, Any]]:
    expected = {growth["name"]: growth for growth in found.expected_growths}
    return [
        {
            "name": growth["name"],
            "outside_bytes": growth["outside"],
            "kept_bytes": growth["kept"],
            "expected_outside_bytes": expected.get(growth["name"], {}).get("outside"),
            "expected_kept_bytes": expected.get(growth["name"], {}).get("kept"),
        }
        for growth in found.growths
    ]


def _comparison(comparison: OpComparison) -> dict[str, Any]:
    return {
        "op": comparison.op,
        "signature": comparison.signature,
        "case": comparison.case,
        "verdict": comparison.verdict.name.lower(),
        "difference_bytes": comparison.difference,
        "measured": _record(comparison.measured),
        "predicted": _record(comparison.predicted),
    }


def _record(record: OpRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    return {
        "steps": to_text(record.steps),
        "first": None if record.first is None else to_text(record.first),
        "error_below_bytes": record.below,
        "error_above_bytes": record.above,
    }
