"""The tables of the accuracy benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.table import Table

from comparing.rows import CARDS, BarScore, MeasuredFigure, Origin, Row, Score, Tool, bar_scores, score

MIB = 1 << 20
TITLES = {
    Origin.PUBLISHED: "Recordings that others published",
    Origin.CARD: "Our own recordings of cards",
    Origin.MEASURED: "Figures that others measured",
    Origin.VIRTUAL: "The virtual GPU in the place of a card: a test of the machinery, no evidence",
}


def percent(error: float | None) -> str:
    """An error with its sign; what is not 0 never reads as 0."""
    if error is None:
        return "-"
    if error == 0:
        return "0 %"
    return f"{error:+.3f} %" if abs(error) < 10 else f"{error:+.0f} %"


def print_rows(console: Console, rows: Sequence[Row], origin: Origin) -> None:
    """Predicted against recorded peaks, and the other tools' errors on the same rows."""
    shown = [row for row in rows if row.origin is origin]
    if not shown:
        return
    table = Table(title=TITLES[origin], title_justify="left")
    table.add_column("recording", no_wrap=True)
    for column in (
        "allocated\nMiB",
        "predicted",
        "error",
        "reserved\nMiB",
        "predicted",
        "error",
        "requests",
        "differ",
        "s",
        *(f"{tool.value}\nof reserved" for tool in Tool if tool is not Tool.VRAMFIT),
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(*_cells(row))
    console.print(table)
    for row in shown:
        _print_notes(console, row)


def _cells(row: Row) -> list[str]:
    ours = row.figures[Tool.VRAMFIT]
    cells = [row.name]
    for of in ("allocated", "reserved"):
        predicted = getattr(ours, of)
        cells.append(f"{getattr(row, of) / MIB:,.2f}")
        cells.append("-" if predicted is None else f"{predicted / MIB:,.2f}")
        cells.append(percent(row.error(Tool.VRAMFIT, of=of)))
    stream = row.stream
    cells += ["-", "-"] if stream is None else [f"{stream.recorded:,}", f"{stream.differing:,}"]
    cells.append("-" if ours.seconds is None else f"{ours.seconds:.1f}")
    peers = [tool for tool in Tool if tool is not Tool.VRAMFIT]
    cells += [percent(row.error(tool, of="reserved")) for tool in peers]
    return cells


def _print_notes(console: Console, row: Row) -> None:
    lines = [
        f"{tool.value}: {figure.reason}" for tool, figure in row.figures.items() if figure.reason is not None
    ]
    if row.note:
        lines.append(row.note)
    if row.stream is not None:
        lines += [*row.stream.unequal, *row.stream.differences]
        if not row.is_exact and row.stream.at_addresses is not None:
            lines.append(_at_addresses(row, *row.stream.at_addresses))
    for of in ("allocated", "reserved"):
        bar = row.bars.get(of)
        if bar is not None and row.error(Tool.VRAMFIT, of=of):
            where = "within" if row.within(of=of) else "outside"
            lines.append(f"{of}: {where} the bar, -{bar.below / MIB:,.1f} +{bar.above / MIB:,.1f} MiB")
    for line in lines:
        console.print(f"  {row.name}: {line}", markup=False, highlight=False, soft_wrap=True)


def _at_addresses(row: Row, allocated: int, reserved: int) -> str:
    if row.is_exact_at_addresses:
        return "with segments at the card's addresses both peaks are equal"
    errors = (
        f"{100 * (a - b) / b:+.3f} %" for a, b in ((allocated, row.allocated), (reserved, row.reserved))
    )
    return f"with segments at the card's addresses: allocated {', reserved '.join(errors)}"


def exactness(rows: Sequence[Row]) -> str:
    """How many rows of own recordings are equal to the byte, as predicted and with the card's addresses; or nothing."""
    replayed = [row for row in rows if row.stream is not None and row.stream.at_addresses is not None]
    if not replayed:
        return ""
    exact = sum(row.is_exact for row in replayed)
    known = sum(row.is_exact or row.is_exact_at_addresses for row in replayed)
    return (
        f"Both peaks are equal to the byte in {exact} of {len(replayed)} recordings of our own, and in {known} with "
        "segments at the card's addresses."
    )


def print_scores(console: Console, rows: Sequence[Row], title: str) -> list[Score]:
    """Median and worst error and verdicts of each tool."""
    scores = [score(tool, list(rows)) for tool in Tool]
    scores = [s for s in scores if s.rows or s.failed]
    table = Table(title=title, title_justify="left")
    table.add_column("tool", no_wrap=True)
    for column in (
        "rows",
        "without\na figure",
        "allocated\nmedian",
        "worst",
        "reserved\nmedian",
        "worst",
        "verdicts\nright",
        "median s",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for s in scores:
        spread = [
            cell
            for pair in (s.allocated, s.reserved)
            for cell in (("-", "-") if pair is None else tuple(f"{value:.3g} %" for value in pair))
        ]
        verdicts = f"{s.right} of {s.judged}" if s.judged else "-"
        seconds = "-" if s.seconds is None else f"{s.seconds:.1f}"
        table.add_row(s.tool.value, str(s.rows), str(s.failed), *spread, verdicts, seconds)
    console.print(table)
    console.print(
        f"Verdicts: fits or not, on {', '.join(CARDS)}. A tool with one number is compared by it with both peaks. "
        "Recordings that leave a card open are not judged on it.",
        highlight=False,
        soft_wrap=True,
    )
    return scores


def print_bars(console: Console, rows: Sequence[Row], measured: Sequence[MeasuredFigure]) -> list[BarScore]:
    """How many measured sizes lie outside our own error bars, by kind of evidence, and how wide these are."""
    scores = bar_scores(rows, measured)
    if not scores:
        return scores
    table = Table(title="Our own error bars", title_justify="left")
    table.add_column("evidence", no_wrap=True)
    table.add_column("measured", no_wrap=True)
    for column in ("predicted", "outside", "median width"):
        table.add_column(column, justify="right", no_wrap=True)
    for s in scores:
        width = "-" if s.width is None else f"{s.width:.2f} %"
        table.add_row(TITLES[s.origin], s.of, f"{s.judged:,}", f"{s.outside:,}", width)
    console.print(table)
    return scores


def print_figures(console: Console, rows: Sequence[MeasuredFigure]) -> None:
    """Figures that others measured beside predictions, each with its bar, and how many lie within."""
    if not rows:
        return
    table = Table(title=TITLES[Origin.MEASURED], title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("card", no_wrap=True)
    table.add_column("what it counts", no_wrap=True)
    for column in ("MiB", "predicted", "bar", "error", "within"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, row.device, row.meaning.value, *_figure_cells(row))
    console.print(table)
    for source in dict.fromkeys(row.source for row in rows):
        console.print(f"  Source: {source}", markup=False, highlight=False, soft_wrap=True)
    for row in rows:
        for line in filter(None, (row.reason, row.note)):
            console.print(f"  {row.name}: {line}", markup=False, highlight=False, soft_wrap=True)
    told = [abs(error) for row in rows if (error := row.error) is not None]
    judged = [row.within for row in rows if row.within is not None]
    if judged:
        errors = f"median error {median(told):.2f} %, worst {max(told):.1f} %; " if told else ""
        console.print(
            f"Of {len(rows)} figures {len(judged)} were predicted: {errors}{judged.count(False)} outside the bar.",
            highlight=False,
            soft_wrap=True,
        )


def _figure_cells(row: MeasuredFigure) -> list[str]:
    measured = (
        f"{row.most / MIB:,.0f}"
        if row.least == row.most
        else f"{row.least / MIB:,.0f} to {row.most / MIB:,.0f}"
    )
    within = {True: "yes", False: "ran out" if row.ran_out else "no", None: "-"}[row.within]
    if row.predicted is None:
        return [measured, "-", "-", "-", within]
    bar = f"-{row.below / MIB:,.0f} +{row.above / MIB:,.0f}"
    return [measured, f"{row.predicted / MIB:,.0f}", bar, percent(row.error), within]
