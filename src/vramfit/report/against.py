"""A reconciliation as text for the terminal, and as values for JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from vramfit.analysis import short_location
from vramfit.analysis.reconciliation import (
    Cause,
    Comparison,
    Counterfactual,
    DeviceReconciliation,
    Difference,
    PartDifference,
    Quantity,
    Reconciliation,
    StreamComparison,
    StreamDifference,
    When,
)
from vramfit.analysis.requests import RequestLabel
from vramfit.report.folding import NARROW, broken
from vramfit.report.rendering import json_values, printed_as_page
from vramfit.report.text import each, elide_left, relative, short_op, signed
from vramfit.trace import Frame
from vramfit.units import format_bytes

_MOST_ROWS = 8
_MOST_REQUESTS = 4
_JSON_ROWS = 100
_FIGURE = 13
_NAME = 26
_SHARE = 11
_ROW = _NAME + 3 * _FIGURE + _SHARE
_SAME = "="


@printed_as_page(Reconciliation, widest=120)
class _ReconciliationReport:
    def __init__(self, width: int, root: Path | None) -> None:
        self.width = width
        self.root = root

    def lines(self, found: Reconciliation) -> Iterator[Text]:
        """The verdict, then for each device its table, its requests and what differs."""
        yield from self.wrapped(_verdict(found))
        for device in found.devices:
            yield Text()
            if len(found.devices) > 1 or device.device != device.recorded_device:
                beside = (
                    "" if device.device == device.recorded_device else f" beside GPU {device.recorded_device}"
                )
                yield Text(f"GPU {device.device}{beside}", style="bold")
            yield from self.table(device)
            yield from self.sentences(device)
            yield from self.differing(device)
        notes = [*found.notes, *(note for device in found.devices for note in device.notes)]
        if notes:
            yield Text()
        for note in dict.fromkeys(notes):
            yield from self.wrapped(Text.assemble(("note  ", "yellow"), note), indent=6)

    # -- the table -------------------------------------------------------------------------------------------

    def table(self, device: DeviceReconciliation) -> Iterator[Text]:
        """One row for each part, and one for each figure that they sum to."""
        heads = ("predicted", "recorded", "difference")
        if self.width >= _ROW:
            yield Text(
                f"{'':{_NAME}}" + "".join(f"{head:>{_FIGURE}}" for head in heads), style="bright_black"
            )
        allocated, reserved, total = (device.of(quantity) for quantity in Quantity)
        main = reserved or allocated
        if main is not None:
            for part in main.parts:
                if part.predicted or part.recorded:
                    yield from self.row(f"  {part.part.value}", part)
            yield from self.row(_name(main, device.when), main)
        if total is not None:
            yield from self.row(f"  {total.parts[-1].part.value}", total.parts[-1])
            yield from self.row(_name(total, device.when), total)
        if allocated is not None and main is not allocated:
            yield from self.allocated(allocated, main, device.when)

    def allocated(self, allocated: Comparison, reserved: Comparison | None, when: When) -> Iterator[Text]:
        """The allocated bytes, with only those parts that differ from the parts of the reserved bytes."""
        told = {} if reserved is None else {part.part: part.difference for part in reserved.parts}
        for part in allocated.parts:
            if part.difference and told.get(part.part) != part.difference:
                yield from self.row(f"  {part.part.value}", part)
        yield from self.row(_name(allocated, when), allocated)

    def row(self, name: str, found: PartDifference | Comparison) -> Iterator[Text]:
        """What was predicted and what was recorded; in words where columns have no room."""
        is_sum = isinstance(found, Comparison)
        predicted, recorded = format_bytes(found.predicted), format_bytes(found.recorded)
        difference = found.difference
        style = "" if not difference else "green" if difference < 0 else "red"
        share = found.share if isinstance(found, Comparison) and difference else None
        percent = "" if share is None else relative(share)
        label = Text(name, style="bold" if is_sum else "")
        if self.width < _ROW:
            change = f"difference {_signed(difference)}" + (f", {percent}" if percent else "")
            told = Text.assemble(label, f": {predicted} predicted, {recorded} recorded, ", (change, style))
            yield from broken(told, self.width, indent=4)
            return
        label.pad_right(_NAME - label.cell_len)
        figures = f"{predicted:>{_FIGURE}}{recorded:>{_FIGURE}}"
        line = Text.assemble(label, figures, (f"{_signed(difference):>{_FIGURE}}", style))
        yield line.append(f"{percent:>{_SHARE}}") if percent else line

    # -- what lies behind it ---------------------------------------------------------------------------------

    def sentences(self, device: DeviceReconciliation) -> Iterator[Text]:
        """The requests as a whole, and what our allocator makes of the recorded ones."""
        if device.requests is None:
            return
        yield Text()
        yield from self.wrapped(Text.assemble(("Requests   ", "bold"), _requests(device.requests)), indent=11)
        if device.counterfactual is not None:
            yield from self.wrapped(
                Text.assemble(("Allocator  ", "bold"), _counterfactual(device.counterfactual)), indent=11
            )

    def differing(self, device: DeviceReconciliation) -> Iterator[Text]:
        """The blocks behind the difference; without any, requests that differ without a trace at the peak."""
        measured = [found for found in device.comparisons if found.differing]
        if measured:
            rows = max(measured, key=lambda found: abs(found.difference)).differing
            moment = "at the peak" if device.when is When.PEAK else "at the snapshot"
            several = _several(rows[:_MOST_ROWS])
            listed = [self.block(row, several) for row in rows]
            yield from self.listed(f"What differs {moment}", listed, _MOST_ROWS)
        elif device.requests is not None and device.requests.differing:
            several = _several(device.requests.differing[:_MOST_REQUESTS])
            listed = [self.request(row, several) for row in device.requests.differing]
            yield from self.listed(
                "Requests that only one makes, gone before the peak", listed, _MOST_REQUESTS
            )

    def listed(self, title: str, rows: Sequence[Text], most: int) -> Iterator[Text]:
        """A title and the first rows below it."""
        yield Text()
        yield Text(title, style="bold")
        yield from rows[:most]
        if len(rows) > most:
            yield Text(f"  and {len(rows) - most:,} smaller (all with --json)", style="bright_black")

    def block(self, row: Difference, several: int) -> Text:
        """Blocks by which the two differ."""
        name = "workspace of a library" if row.is_workspace else row.label.tensor
        style = "green" if row.total < 0 else "red"
        return self.columns(_signed(row.total), style, row, name, several)

    def request(self, row: StreamDifference, several: int) -> Text:
        """Requests that only one makes."""
        sign = 1 if row.cause is Cause.EXTRA else -1
        return self.columns(_signed(sign * row.size * row.count), "", row, row.label.tensor, several)

    def columns(
        self, total: str, style: str, row: Difference | StreamDifference, what: str, several: int
    ) -> Text:
        """One row of a list: bytes, how many of which size (in ``several`` columns), in which way, operator, where."""
        op = short_op(row.label.op) if row.label.op else ""
        place = short_location(row.label.line, root=self.root)
        if row.is_near and (op or place):
            op = f"after {op}" if op else "after"
        count = each(row.count, row.size)
        if self.width < NARROW:
            told = f" = {count}" if count else ""
            head = Text.assemble("  ", (total, style), f"{told} {row.cause.value}: ")
            facts = ", ".join(filter(None, (f"{op} {place}".strip(), what)))
            return head.append(facts or f"requests of {format_bytes(row.size)}")
        line = Text.assemble("  ", (f"{total:>12}", style), f" {count:<{several}}" if several else "")
        line.append(f"  {row.cause.value:<18}  ")
        if place:
            line.append(f"{op:<14} ")
            room = max(self.width - line.cell_len, 8)
            line.append(elide_left(place, room))
            what = f"  {what}" if len(place) + 2 + len(what) <= room else ""
        else:
            line.append(f"{op}  " if op else "")
            what = what or f"requests of {format_bytes(row.size)}"
        line.append(what)
        return line

    def wrapped(self, text: Text, *, indent: int = 2) -> Iterator[Text]:
        """Break a sentence into lines of the page's width."""
        yield from broken(text, self.width, indent=indent)


def _several(rows: Sequence[Difference | StreamDifference]) -> int:
    """Columns for how many there are and what one takes; 0 where all rows are of a single one."""
    return max((len(each(row.count, row.size)) for row in rows), default=0)


def _verdict(found: Reconciliation) -> Text:
    """One sentence: whether they agree, and by how much they do not."""
    order = (Quantity.RESERVED, Quantity.ALLOCATED, Quantity.TOTAL)
    measured = [
        (device, comparison)
        for device in found.devices
        for comparison in sorted(device.comparisons, key=lambda one: order.index(one.quantity))
    ]
    beyond = [(device, each) for device, each in measured if each in device.beyond(found.tolerance)]
    if beyond:
        device, worst = max(beyond, key=lambda pair: abs(pair[1].difference))
        head = Text.assemble(("✗ differs from ", "bold red"), (found.name, "bold"), ": ")
        return head + Text(f"{_figures(device, worst)} (tolerance {found.tolerance})")
    if not any(comparison.difference for _, comparison in measured):
        head = Text.assemble(("✓ equal to ", "bold green"), (found.name, "bold"), " to the byte: ")
        return head + Text(
            ", ".join(
                f"{_name(each, device.when)} {format_bytes(each.recorded)}" for device, each in measured
            )
        )
    device, worst = max(measured, key=lambda pair: abs(pair[1].share or 0))
    head = Text.assemble(("✓ agrees with ", "bold green"), (found.name, "bold"), ": ")
    return head + Text(f"{_figures(device, worst)} (tolerance {found.tolerance})")


def _figures(device: DeviceReconciliation, found: Comparison) -> str:
    return (
        f"{_name(found, device.when)} {format_bytes(found.predicted)} predicted, "
        f"{format_bytes(found.recorded)} recorded, {_signed(found.difference)}{_share(found)}"
    )


def _name(found: Comparison, when: When) -> str:
    if found.quantity is Quantity.TOTAL:
        return "total" if when is When.SNAPSHOT else "peak total"
    return found.quantity.value if when is When.SNAPSHOT else f"peak {found.quantity.value}"


def _share(found: Comparison) -> str:
    return "" if found.share is None else f" or {relative(found.share)}"


def _signed(amount: int) -> str:
    return signed(amount) if amount else _SAME


def _requests(found: StreamComparison) -> str:
    if found.equal:
        return f"{found.recorded:,} recorded, and predicted just so, in the same order"
    if found.matched == found.recorded == found.predicted:
        return f"{found.recorded:,} recorded and predicted in the same order{_moved(found)}"
    only = [
        f"{amount:,} only {side}"
        for amount, side in (
            (found.recorded - found.matched, "recorded"),
            (found.predicted - found.matched, "predicted"),
        )
        if amount
    ]
    alike = f"{found.matched:,} of {found.recorded:,} recorded are predicted in their place"
    return f"{alike}; {', '.join(only)}{_moved(found)}"


def _moved(found: StreamComparison) -> str:
    return f"; {found.moved_frees:,} given back at another point" if found.moved_frees else ""


def _counterfactual(found: Counterfactual) -> str:
    given = f"given the recorded requests, ours reserves {format_bytes(found.replayed)}"
    if found.by_allocator:
        less = "more" if found.by_allocator > 0 else "less"
        off = format_bytes(abs(found.by_allocator))
        text = f"{given}, {off} {less} than was recorded: that is allocator and driver"
    else:
        text = f"{given}, as recorded{', every block at its address' if found.is_exact else ''}"
    causes = [
        f"{_signed(amount)} from the {cause}"
        for amount, cause in ((found.by_requests, "requests"), (found.by_settings, "allocator's settings"))
        if amount
    ]
    return f"{text}; {' and '.join(causes)}" if causes else text


# -- JSON ----------------------------------------------------------------------------------------------------


@json_values.register(Reconciliation)
def _json_values(found: Reconciliation) -> dict[str, Any]:
    """The reconciliation as values that `json` can write; docs/json.md describes them. Sizes are in bytes."""
    return {
        "file": found.name,
        "within": found.within,
        "tolerance": {"share": found.tolerance.share, "bytes": found.tolerance.size or None},
        "notes": list(found.notes),
        "devices": [_device_json(device, found) for device in found.devices],
    }


def _device_json(device: DeviceReconciliation, found: Reconciliation) -> dict[str, Any]:
    beyond = device.beyond(found.tolerance)
    return {
        "index": device.device,
        "recorded_index": device.recorded_device,
        "gpu": device.gpu,
        "recorded_gpu": device.recorded_gpu or None,
        "moment": device.when.value,
        "comparisons": [
            {
                "quantity": comparison.quantity.value,
                **_both(comparison),
                "share": None if comparison.share is None else round(comparison.share, 9),
                "within": comparison not in beyond,
                "parts": [{"part": part.part.name.lower(), **_both(part)} for part in comparison.parts],
                "differing": [_difference_json(row) for row in comparison.differing[:_JSON_ROWS]],
                "differing_omitted": _omitted(comparison.differing[_JSON_ROWS:]),
            }
            for comparison in device.comparisons
        ],
        "requests": None if device.requests is None else _requests_json(device.requests),
        "allocator": None if device.counterfactual is None else _counterfactual_json(device.counterfactual),
        "run_peak_reserved_bytes": device.run_peak_reserved,
        "notes": list(device.notes),
    }


def _both(found: PartDifference | Comparison) -> dict[str, int]:
    return {
        "predicted_bytes": found.predicted,
        "recorded_bytes": found.recorded,
        "difference_bytes": found.difference,
    }


def _label_json(label: RequestLabel, near: bool) -> dict[str, Any]:
    return {
        "op": label.op or None,
        "line": _frame_json(label.line),
        "tensor": label.tensor or None,
        "category": label.category.name.lower(),
        "is_of_the_request_before": near,
    }


def _frame_json(frame: Frame | None) -> dict[str, Any] | None:
    return None if frame is None else {"file": frame.filename, "line": frame.line, "function": frame.name}


def _difference_json(row: Difference) -> dict[str, Any]:
    return {
        "cause": row.cause.name.lower(),
        **_label_json(row.label, row.is_near),
        "workspace": row.is_workspace,
        "request_bytes": row.size,
        "count": row.count,
        "difference_bytes": row.total,
    }


def _omitted(rows: Sequence[Difference]) -> dict[str, int]:
    return {"groups": len(rows), "difference_bytes": sum(row.total for row in rows)}


def _requests_json(found: StreamComparison) -> dict[str, Any]:
    return {
        "recorded": found.recorded,
        "predicted": found.predicted,
        "matched": found.matched,
        "before": found.before,
        "after": found.after,
        "moved_frees": found.moved_frees,
        "differing": [
            {
                "cause": row.cause.name.lower(),
                **_label_json(row.label, row.is_near),
                "request_bytes": row.size,
                "count": row.count,
            }
            for row in found.differing[:_JSON_ROWS]
        ],
    }


def _counterfactual_json(found: Counterfactual) -> dict[str, Any]:
    return {
        "predicted_bytes": found.predicted,
        "under_predicted_settings_bytes": found.under_its_settings,
        "replayed_bytes": found.replayed,
        "recorded_bytes": found.recorded,
        "by_requests_bytes": found.by_requests,
        "by_settings_bytes": found.by_settings,
        "by_allocator_bytes": found.by_allocator,
        "exact": found.is_exact,
    }
