"""What workers and pinned memory are worth to a loader, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from vramfit.report.folding import broken, table
from vramfit.report.rendering import json_values, printed_as_lines
from vramfit.runtime.feeding.loader_choices import LoaderTrial, LoaderTrials
from vramfit.units import format_bytes

SCHEMA = "vramfit.loader/1"


@json_values.register(LoaderTrials)
def _json_values(found: LoaderTrials) -> dict[str, Any]:
    """The document of ``vramfit doctor --loader --json``; see docs/json.md."""
    return {
        "schema": SCHEMA,
        "loader": found.target,
        "cores": found.cores,
        "batches": found.batches,
        "batch_items": found.batch_items,
        "card": found.card,
        "given": {"num_workers": found.given.workers, "pin_memory": found.given.pinned},
        "trials": [_trial(one) for one in found.trials],
        "recommended": {
            "num_workers": found.recommended.workers,
            "pin_memory": found.recommended.pinned if found.card else None,
        },
    }


def _trial(one: LoaderTrial) -> dict[str, Any]:
    return {
        "num_workers": one.workers,
        "pin_memory": one.pinned,
        "items_per_second": one.rate if one.error is None else None,
        "slowest_round": one.bar[0] if one.error is None else None,
        "fastest_round": one.bar[1] if one.error is None else None,
        "first_batch_seconds": one.first_seconds if one.error is None else None,
        "worker_bytes": one.worker_bytes,
        "shm_bytes": one.shared_bytes,
        "error": one.error,
    }


@printed_as_lines(LoaderTrials)
def _lines(found: LoaderTrials, width: int) -> Iterator[Text]:
    yield from broken(
        Text(
            f"{found.target}: {found.batches} batches, {found.batch_items} items in the first; {found.cores} cores"
        ),
        width,
    )
    yield Text()
    heads = ("workers", "items/s", "slowest", "fastest", "first batch", "each worker", "/dev/shm")
    rows = [_row(one, found) for one in found.trials if one.error is None]
    yield from table(heads, rows, width)
    for one in found.trials:
        if one.error is not None:
            yield from broken(Text(f"{_name(one, found)}: fails: {one.error}", style="bold red"), width)
    yield Text()
    yield from broken(Text(_advice(found), style="bold"), width)
    if not found.card:
        yield from broken(Text("pin_memory was not measured: there is no card to copy to"), width)


def _row(one: LoaderTrial, found: LoaderTrials) -> list[Text]:
    cells = (
        _name(one, found),
        _rate(one.rate),
        _rate(one.bar[0]),
        _rate(one.bar[1]),
        f"{one.first_seconds:.3f} s",
        "" if one.worker_bytes is None else format_bytes(one.worker_bytes),
        "" if one.shared_bytes is None else format_bytes(one.shared_bytes),
    )
    return [Text(cell) for cell in cells]


def _name(one: LoaderTrial, found: LoaderTrials) -> str:
    return f"{one.workers}, pinned" if one.pinned and found.card else str(one.workers)


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _advice(found: LoaderTrials) -> str:
    best = found.recommended
    pinned = f", pin_memory={best.pinned}" if found.card else ""
    spread = f"{_rate(best.bar[0])} to {_rate(best.bar[1])}"
    said = f"num_workers={best.workers}{pinned}: {_rate(best.rate)} items/s ({spread})"
    fastest = max((one for one in found.trials if one.error is None), key=lambda one: one.rate)
    if fastest is not best:
        said += f"; with {_name(fastest, found)} the rounds are not apart from these"
    if not best.workers:
        said += "; steps wait meanwhile, unless vramfit.prefetch reads ahead"
    same = (found.given.workers, found.given.pinned and found.card) == (best.workers, best.pinned)
    if same:
        return f"{said}. That is what it has"
    now = next(
        (one for one in found.trials if one.workers == found.given.workers and one.error is None), None
    )
    if now is None:
        return f"{said}. It has num_workers={found.given.workers}"
    return f"{said}. It has num_workers={found.given.workers}: {_rate(now.rate)} items/s"
