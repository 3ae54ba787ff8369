"""One row of the accuracy table: what was recorded, what each tool predicted, and whether cards are judged rightly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from statistics import median
from typing import Any

from vramfit.analysis import verdict
from vramfit.gpus import find_gpu
from vramfit.trace import Run


class Origin(Enum):
    """Where a recording is from."""

    PUBLISHED = "published"
    """Others recorded it on a card and published it (tests/data/traces)."""
    CARD = "card"
    """`benchmarks/record.py` recorded it on a card."""
    MEASURED = "measured by others"
    """Others measured one figure on a card and published it; there is no recording. See `MeasuredFigure`."""
    VIRTUAL = "virtual"
    """`benchmarks/record.py --gpu` recorded it on the virtual GPU: it tests the machinery and proves nothing."""

    @property
    def is_evidence(self) -> bool:
        """Whether a card made it."""
        return self is not Origin.VIRTUAL


class Tool(Enum):
    """Who predicts."""

    VRAMFIT = "vramfit"
    MEM_TRACKER = "MemTracker"
    """torch.distributed._tools.mem_tracker, under FakeTensorMode."""
    ACCELERATE = "accelerate"
    """accelerate.commands.estimate."""
    FORMULA = "formula"
    """Bytes per parameter: see `comparing.formula`."""


CARDS = ("RTX 3060 12GB", "RTX 4080", "RTX 4090", "RTX 5090", "RTX 6000 Ada", "H100 SXM")
"""Cards on which verdicts are compared: 12, 16, 24, 32, 48 and 80 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What a tool says of a row. Sizes are in bytes; a tool that gives one number gives it for both.

    Attributes:
        allocated: peak of allocated bytes, None if the tool gives nothing.
        reserved: peak of reserved bytes.
        seconds: time it took.
        reason: why there is no figure.
    """

    allocated: int | None = None
    reserved: int | None = None
    seconds: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """How far a prediction says that it may be off: bytes that the true size may be lower, and higher."""

    below: int = 0
    above: int = 0

    def holds(self, predicted: int, measured: int) -> bool:
        """Whether a measured size lies within."""
        return predicted - self.below <= measured <= predicted + self.above


def bars_of(run: Run) -> dict[str, Bar]:
    """The bars of the peaks of the first card of a run, ``allocated`` and ``reserved``, as its report has them."""
    device = verdict(run).devices[0]
    reserved = device.reserved_bar
    return {
        "allocated": Bar(below=device.error_below, above=device.error_above),
        "reserved": Bar(below=reserved.below, above=reserved.above),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """The requests of a recording beside those of its prediction, in order.

    Attributes:
        recorded, predicted: blocks taken and given back.
        differing: requests that only one of them makes.
        differences: the most frequent of those, in words.
        unequal: other figures that differ (segments, slack, retries, the end), in words.
        at_addresses: peaks of allocated and of reserved bytes of the predicted requests where segments lie at the
            recording's addresses; None where they were not replayed.
    """

    recorded: int
    predicted: int
    differing: int
    differences: tuple[str, ...] = ()
    unequal: tuple[str, ...] = ()
    at_addresses: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One recording and what is predicted of it. Sizes are in bytes.

    Attributes:
        name: of the recording.
        origin: where it is from.
        device: the card.
        torch: version it was recorded with.
        allocated, reserved: recorded peaks.
        context: recorded bytes outside the allocator, None where nobody measured them.
        out_of_memory: whether it ended by running out of memory, which fixes its reserved bytes from above.
        figures: by tool.
        stream: None where nothing was predicted.
        predicted_context: what the virtual GPU holds outside the allocator.
        bars: how far our prediction says that it may be off, of ``allocated`` and ``reserved``; empty without one.
        note: what a reader should know of the row, empty for nothing.
    """

    name: str
    origin: Origin
    device: str
    torch: str
    allocated: int
    reserved: int
    context: int | None = None
    out_of_memory: bool = False
    figures: Mapping[Tool, Figure] = field(default_factory=dict)
    stream: Stream | None = None
    predicted_context: int | None = None
    bars: Mapping[str, Bar] = field(default_factory=dict)
    note: str = ""

    def with_figures(self, figures: Mapping[Tool, Figure]) -> Row:
        """The row with more figures."""
        return replace(self, figures={**self.figures, **figures})

    def error(self, tool: Tool, *, of: str) -> float | None:
        """Relative error in percent of ``allocated`` or ``reserved``; None without a figure."""
        figure = self.figures.get(tool)
        predicted = getattr(figure, of) if figure is not None else None
        recorded: int = getattr(self, of)
        return None if predicted is None or not recorded else 100 * (predicted - recorded) / recorded

    def within(self, *, of: str) -> bool | None:
        """Whether the recorded ``allocated`` or ``reserved`` lies within our bar; None without a prediction."""
        predicted = getattr(self.figures.get(Tool.VRAMFIT), of, None)
        return None if predicted is None else self.bars.get(of, Bar()).holds(predicted, getattr(self, of))

    @property
    def is_exact(self) -> bool:
        """Whether both peaks are predicted to the byte."""
        return not any(self.error(Tool.VRAMFIT, of=of) != 0 for of in ("allocated", "reserved"))

    @property
    def is_exact_at_addresses(self) -> bool:
        """Whether they are where segments lie at the recording's addresses."""
        return self.stream is not None and self.stream.at_addresses == (self.allocated, self.reserved)

    def width(self, *, of: str) -> float | None:
        """Width of our bar in percent of the prediction; None without one."""
        predicted = getattr(self.figures.get(Tool.VRAMFIT), of, None)
        bar = self.bars.get(of, Bar())
        return 100 * (bar.below + bar.above) / predicted if predicted else None

    def truth(self, card: str) -> bool | None:
        """Whether the program fits a card by what was recorded; None where the recording does not tell.

        With less memory the allocator gives cached segments back before it fails. So a program whose allocated
        peak fits and whose reserved peak does not may fit or not. What a card holds outside the allocator is taken
        from the catalogue, for the recording and for every tool alike.
        """
        room = room_on(card)
        if self.allocated > room or (self.out_of_memory and self.reserved > room):
            return False
        return True if self.reserved <= room and not self.out_of_memory else None

    def verdict(self, tool: Tool, card: str) -> bool | None:
        """Whether a tool says that the program fits; None without a figure."""
        figure = self.figures.get(tool)
        return None if figure is None or figure.reserved is None else figure.reserved <= room_on(card)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        plain = asdict(self)
        plain["origin"] = self.origin.value
        plain["figures"] = {tool.value: asdict(figure) for tool, figure in self.figures.items()}
        plain["errors_percent"] = {
            tool.value: {of: self.error(tool, of=of) for of in ("allocated", "reserved")}
            for tool in self.figures
        }
        plain["within_bar"] = {of: self.within(of=of) for of in ("allocated", "reserved")}
        plain["fits"] = {
            card: {
                "recorded": self.truth(card),
                **{tool.value: self.verdict(tool, card) for tool in self.figures},
            }
            for card in CARDS
        }
        return plain


class Meaning(Enum):
    """What a figure that others measured counts."""

    ALLOCATED = "allocated"
    """``torch.cuda.max_memory_allocated``."""
    RESERVED = "reserved"
    """``torch.cuda.max_memory_reserved``."""
    DEVICE = "device"
    """Memory in use on the card, as NVML or nvidia-smi tell it: reserved, and the CUDA context."""
    DEVICE_LESS_FIRST = "device, less its first sample"
    """The same without what was there when sampling began, the context above all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigure:
    """One figure that others measured and what is predicted of it. Sizes are in bytes.

    Attributes:
        name: unique among all rows.
        source: where it was published.
        device: the card.
        torch: version it was measured with; empty where that is not told.
        meaning: what it counts.
        least, most: what it may stand for; the same where it is exact.
        predicted: the same size of the run on the virtual GPU; None without one.
        below, above: the row's own error bar.
        ran_out: the virtual card had no room for what the true one served.
        reason: why nothing is predicted.
        note: what a reader should know of the row, empty for nothing.
    """

    name: str
    source: str
    device: str
    torch: str
    meaning: Meaning
    least: int
    most: int
    predicted: int | None = None
    below: int = 0
    above: int = 0
    ran_out: bool = False
    reason: str | None = None
    note: str = ""

    @property
    def error(self) -> float | None:
        """Relative error in percent, 0 anywhere within what the figure may stand for; None without a prediction."""
        if self.predicted is None:
            return None
        nearest = min(max(self.predicted, self.least), self.most)
        return 100 * (self.predicted / nearest - 1)

    @property
    def within(self) -> bool | None:
        """Whether the figure lies within the bar; None where nothing could be run."""
        if self.ran_out:
            return False
        if self.predicted is None:
            return None
        return self.predicted - self.below <= self.most and self.least <= self.predicted + self.above

    @property
    def width(self) -> float | None:
        """Width of the bar in percent of the prediction; None without one."""
        return 100 * (self.below + self.above) / self.predicted if self.predicted else None

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        return {
            **asdict(self),
            "origin": Origin.MEASURED.value,
            "meaning": self.meaning.value,
            "error_percent": self.error,
            "within_bar": self.within,
        }


def room_on(card: str) -> int:
    """Bytes that the allocator can take on a card: all but the context."""
    spec = find_gpu(card)
    return spec.total_bytes - spec.typical_context_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How a tool did over some rows; errors are absolute and in percent.

    Attributes:
        rows: with a figure.
        failed: without one.
        allocated, reserved: (median, worst) error, None without a row.
        right, judged: verdicts on `CARDS`; those that a recording leaves open are not judged.
        seconds: median time, None where the tool takes none worth measuring.
    """

    tool: Tool
    rows: int
    failed: int
    allocated: tuple[float, float] | None
    reserved: tuple[float, float] | None
    right: int
    judged: int
    seconds: float | None


def score(tool: Tool, rows: list[Row]) -> Score:
    """Errors and verdicts of one tool over the rows that it was asked about."""
    asked = [row for row in rows if tool in row.figures]
    told = [row for row in asked if row.figures[tool].reserved is not None]

    def spread(of: str) -> tuple[float, float] | None:
        errors = [abs(error) for row in told if (error := row.error(tool, of=of)) is not None]
        return (median(errors), max(errors)) if errors else None

    judged = [
        row.verdict(tool, card) == truth
        for row in told
        for card in CARDS
        if (truth := row.truth(card)) is not None
    ]
    seconds = [s for row in told if (s := row.figures[tool].seconds) is not None]
    return Score(
        tool=tool,
        rows=len(told),
        failed=len(asked) - len(told),
        allocated=spread("allocated"),
        reserved=spread("reserved"),
        right=sum(judged),
        judged=len(judged),
        seconds=median(seconds) if seconds else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BarScore:
    """How many measured sizes lie outside our own error bars, of one kind of evidence.

    Attributes:
        origin: the kind.
        of: what was measured: ``allocated`` or ``reserved`` of recordings, ``figure`` of what others measured.
        judged: sizes with a prediction; a program that ran out of memory here alone counts as outside.
        outside: how many of them lie outside the bar.
        width: median width of the bars in percent of the prediction, None without one.
    """

    origin: Origin
    of: str
    judged: int
    outside: int
    width: float | None

    def to_dict(self) -> dict[str, Any]:
        """The score as JSON can hold it."""
        return {**asdict(self), "origin": self.origin.value}


def bar_scores(rows: Sequence[Row], measured: Sequence[MeasuredFigure]) -> list[BarScore]:
    """The scores of every kind of evidence that is there."""
    found: list[tuple[Origin, str, list[tuple[bool | None, float | None]]]] = [
        (origin, of, [(row.within(of=of), row.width(of=of)) for row in rows if row.origin is origin])
        for origin in (Origin.PUBLISHED, Origin.CARD)
        for of in ("allocated", "reserved")
    ]
    found.append((Origin.MEASURED, "figure", [(row.within, row.width) for row in measured]))
    scores = []
    for origin, of, pairs in found:
        judged = [within for within, _ in pairs if within is not None]
        widths = [width for within, width in pairs if within is not None and width is not None]
        if judged:
            scores.append(
                BarScore(
                    origin=origin,
                    of=of,
                    judged=len(judged),
                    outside=judged.count(False),
                    width=median(widths) if widths else None,
                )
            )
    return scores
