"""Long documents in overlapping windows, and how what the windows say of a token becomes one answer.

Windows are approximate for a model that looks at its whole input: each token sees its window alone. For a model whose
receptive field along the sequence is bounded by `r` tokens on either side they are exact with the rule `CENTRE` and an
overlap of ``2 * r``: each token is taken from a window in which it sees all that it looks at.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from vramfit.arguments import whole_argument
from vramfit.errors import UsageError
from vramfit.workload.containers import mapped_leaves


class WindowJoin(Enum):
    """What is taken where windows overlap.

    Attributes:
        AVERAGE: the mean of what all windows say.
        CENTRE: what the window says in which the token is farthest from an inner border; of two the earlier.
        FIRST: what the first window says.
    """

    AVERAGE = "average"
    CENTRE = "centre"
    FIRST = "first"


class WindowPool(Enum):
    """How an output of a whole window becomes that of the document.

    Attributes:
        MEAN: the mean, each window weighted by its tokens that are not special.
        MAX: the largest of each value.
    """

    MEAN = "mean"
    MAX = "max"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """How documents are cut.

    Attributes:
        window: tokens of a window, special ones included.
        overlap: tokens that neighbouring windows share, without special ones.
        prefix: special tokens at the beginning of a document that every window begins with: ``[CLS]``, or a question.
        suffix: those at its end that every window ends with: ``[SEP]``.
        pad: the token that fills windows up where documents are shorter.
        batch_size: windows that run at once.
        join: the rule for outputs of a token.
        pool: the rule for outputs of a window.
        pooled: outputs of windows as wholes, by their paths, whose second dimension only happens to be as long as a
            window: ``("pooler_output",)``; the empty text is an output that is one tensor.

    Raises:
        UsageError: nothing is left of a window beside what it shares.
    """

    window: int
    overlap: int = 0
    prefix: int = 1
    suffix: int = 1
    pad: int = 0
    batch_size: int = 8
    join: WindowJoin = WindowJoin.CENTRE
    pool: WindowPool = WindowPool.MEAN
    pooled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name, least in (("window", 1), ("overlap", 0), ("prefix", 0), ("suffix", 0), ("batch_size", 1)):
            whole_argument(name, getattr(self, name), least=least)
        if self.overlap >= self.body:
            raise UsageError(
                f"windows of {self.window} tokens with {self.prefix + self.suffix} special ones hold {self.body} of a "
                f"document, and {self.overlap} of these shall overlap",
                "Give a larger window or a smaller overlap",
            )

    @property
    def body(self) -> int:
        """Tokens of a document in a window."""
        return self.window - self.prefix - self.suffix


@dataclass(frozen=True, slots=True)
class Window:
    """A window of a document.

    Attributes:
        document: its number.
        start, stop: the tokens of the document that it shows between the special ones, as positions in the document.
        length: of the document, special tokens included.
    """

    document: int
    start: int
    stop: int
    length: int

    def positions(self, settings: WindowSettings) -> torch.Tensor:
        """The positions in the document of all its tokens, in order."""
        ends = torch.arange(max(self.length - settings.suffix, settings.prefix), self.length)
        return torch.cat([torch.arange(settings.prefix), torch.arange(self.start, self.stop), ends])


@dataclass(frozen=True, slots=True)
class SpanAnswer:
    """A span of a document that may be the answer.

    Attributes:
        document: its number.
        start, stop: positions in the document, `stop` the one after the last.
        score: probability of the start times that of the end, each within its window.
    """

    document: int
    start: int
    stop: int
    score: float


def windows_of(lengths: Sequence[int], settings: WindowSettings) -> list[Window]:
    """The windows of documents: the last one of a document ends with it, and begins earlier rather than be short.

    Args:
        lengths: tokens of each document, special ones included.

    Raises:
        UsageError: a document is shorter than its special tokens.
    """
    found: list[Window] = []
    for document, length in enumerate(lengths):
        begin, end = settings.prefix, length - settings.suffix
        if end < begin:
            raise UsageError(
                f"document {document} has {length} tokens, fewer than its special ones",
                "Give prefix and suffix as the tokenizer adds them",
            )
        start = begin
        while True:
            stop = min(start + settings.body, end)
            found.append(Window(document, max(begin, stop - settings.body), stop, length))
            if stop == end:
                break
            start = stop - settings.overlap
    return found


def run_in_windows(
    model: Callable[..., Any],
    tokens: torch.Tensor,
    mask: torch.Tensor | None,
    settings: WindowSettings,
) -> Any:
    """A model over documents of any length, window by window and without gradients.

    Args:
        model: called as ``model(tokens, mask)`` with (windows, window) tokens and a mask of the same shape, 1 where
            there is a token; gives tensors in any containers.
        tokens: (documents, length), padded on the right.
        mask: (documents, length), 1 where there is a token; None where all are.

    Returns:
        the model's containers. Tensors with a value for each token of a window become (documents, length, ...), joined
        by the settings' rule and 0 where there is no token; others, of the windows as wholes, (documents, ...), pooled.

    Raises:
        UsageError: shapes do not fit, or padding is on the left.
    """
    lengths = _lengths(tokens, mask)
    windows = windows_of(lengths, settings)
    sums = JoinedWindows(windows, tokens.shape, settings)
    with torch.no_grad():
        for start in range(0, len(windows), settings.batch_size):
            some = windows[start : start + settings.batch_size]
            shown, present = _shown(tokens, some, settings)
            sums.add(start, model(shown, present), len(some))
    return sums.value()


def best_spans(
    starts: torch.Tensor,
    ends: torch.Tensor,
    windows: Sequence[Window],
    settings: WindowSettings,
    *,
    longest: int = 15,
    count: int = 1,
) -> list[list[SpanAnswer]]:
    """The best spans of each document, from what the windows say of starts and ends.

    In each window the probabilities of starts and of ends are a softmax over the tokens of the document that it shows;
    a span's score is their product, and the best over all windows win, as in the question-answering pipelines of
    transformers (``decode_spans``). The same span in two windows counts with the better score.

    Args:
        starts, ends: logits of shape (windows, window), in the order of the windows.
        longest: most tokens of a span.
        count: how many spans of a document, the best first.
    """
    whole_argument("longest", longest, least=1)
    whole_argument("count", count, least=1)
    found: dict[int, dict[tuple[int, int], float]] = {}
    for number, window in enumerate(windows):
        spans = found.setdefault(window.document, {})
        shown = slice(settings.prefix, settings.prefix + window.stop - window.start)
        first, last = (logits[number, shown].double().softmax(-1) for logits in (starts, ends))
        scores = (first[:, None] * last[None, :]).triu().tril(longest - 1)
        values, places = scores.flatten().topk(min(count, scores.numel()))
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            begin, end = divmod(place, scores.shape[1])
            key = (window.start + begin, window.start + end + 1)
            spans[key] = max(value, spans.get(key, 0.0))
    return [
        [
            SpanAnswer(document, begin, end, score)
            for (begin, end), score in heapq.nlargest(count, spans.items(), key=lambda item: item[1])
        ]
        for document, spans in sorted(found.items())
    ]


class JoinedWindows:
    """Outputs of windows, put together to those of documents.

    Args:
        shape: documents, and tokens of the longest.
    """

    def __init__(self, windows: Sequence[Window], shape: Sequence[int], settings: WindowSettings) -> None:
        self._windows, self._settings = windows, settings
        self._documents, self._length = shape[0], shape[1]
        self._owners = _owners(windows, settings) if settings.join is not WindowJoin.AVERAGE else None
        self._sums: dict[str, torch.Tensor] = {}
        self._of_tokens: dict[str, bool] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._made: Any = None

    def add(self, first: int, outputs: Any, count: int | None = None) -> None:
        """Add the outputs of some windows, from number `first` on.

        Args:
            count: how many they are; None takes as many as outputs have entries.

        Raises:
            UsageError: an output has more or fewer entries, or is not of the same kind as before.
        """

        def leaf(path: str, value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if count is not None and value.dim() and len(value) != count:
                    raise UsageError(
                        f"output {path or 'of the model'} has {len(value)} entries for {count} windows",
                        "Let the model give one for each",
                    )
                self._add(path, value, first)
            return value

        self._made = mapped_leaves(outputs, leaf)

    def _add(self, path: str, value: torch.Tensor, first: int) -> None:
        if not value.dim():
            raise UsageError(
                f"output {path or 'of the model'} is one number for all windows", "Leave losses out"
            )
        some = self._windows[first : first + len(value)]
        longest = max(len(window.positions(self._settings)) for window in some)
        by_length = path not in self._settings.pooled and value.dim() > 1 and value.shape[1] == longest
        # Windows of short documents may have as many tokens as the output of a window has values.
        of_tokens = self._of_tokens.setdefault(path, by_length)
        if of_tokens and not by_length:
            raise UsageError(
                f"output {path or 'of the model'} has the shape {list(value.shape)} for windows of {longest} tokens",
                f"If it is of windows as wholes, name it: pooled=({path!r},)",
            )
        if path not in self._sums:
            wide = self._dtype_for(value, of_tokens=of_tokens)
            self._dtypes[path] = value.dtype if self._is_kept(of_tokens=of_tokens) else wide
            fill = -torch.inf if not of_tokens and self._settings.pool is WindowPool.MAX else 0
            shape = (self._documents, *([self._length] if of_tokens else []), *value.shape[1 + of_tokens :])
            self._sums[path] = torch.full(shape, fill, dtype=wide, device=value.device)
            self._counts[path] = torch.zeros(shape[: 1 + of_tokens], dtype=wide, device=value.device)
        for row in range(len(value)):
            window = self._windows[first + row]
            if of_tokens:
                self._add_tokens(path, value[row], first + row, window)
            else:
                self._add_whole(path, value[row], window)

    def _is_kept(self, *, of_tokens: bool) -> bool:
        """Whether each value is that of one window, and so of its dtype."""
        return of_tokens and self._owners is not None

    def _dtype_for(self, value: torch.Tensor, *, of_tokens: bool) -> torch.dtype:
        """What values are added up in."""
        if value.is_floating_point() or value.is_complex():
            return value.dtype
        if not self._is_kept(of_tokens=of_tokens):
            return torch.float32
        return torch.uint8 if value.dtype is torch.bool else value.dtype

    def _add_tokens(self, path: str, value: torch.Tensor, number: int, window: Window) -> None:
        places = window.positions(self._settings)
        rows = torch.arange(len(places))
        if self._owners is not None:
            kept = self._owners[window.document][places] == number
            places, rows = places[kept], rows[kept]
        places, rows = places.to(value.device), rows.to(value.device)
        self._sums[path][window.document].index_add_(0, places, value[rows].to(self._sums[path].dtype))
        ones = torch.ones(len(places), dtype=self._counts[path].dtype, device=value.device)
        self._counts[path][window.document].index_add_(0, places, ones)

    def _add_whole(self, path: str, value: torch.Tensor, window: Window) -> None:
        target = self._sums[path][window.document]
        if self._settings.pool is WindowPool.MAX:
            torch.maximum(target, value.to(target.dtype), out=target)
            return
        weight = max(1, window.stop - window.start)
        target.add_(value.to(target.dtype), alpha=weight)
        self._counts[path][window.document] += weight

    def value(self) -> Any:
        """The outputs of the documents."""

        def leaf(path: str, value: Any) -> Any:
            if path not in self._sums:
                return value
            total, counts = self._sums[path], self._counts[path]
            if self._of_tokens[path] and self._owners is not None:
                return total.to(self._dtypes[path])
            if not bool((counts > 1).any()):
                return total
            return total / counts.clamp(min=1).reshape(counts.shape + (1,) * (total.dim() - counts.dim()))

        return mapped_leaves(self._made, leaf)


def _owners(windows: Sequence[Window], settings: WindowSettings) -> dict[int, torch.Tensor]:
    """For each position of a document, the number of the window whose word counts; special ones are the first's."""
    owners: dict[int, torch.Tensor] = {}
    margins: dict[int, torch.Tensor] = {}
    for number, window in enumerate(windows):
        if window.document not in owners:
            owners[window.document] = torch.full((window.length,), number)
            margins[window.document] = torch.full((window.length,), -1)
        places = torch.arange(window.start, window.stop)
        begins, ends = window.start == settings.prefix, window.stop == window.length - settings.suffix
        far = torch.full_like(places, window.length)
        # The document's own ends are no borders: nothing is missing beyond them.
        before = far if begins else places - window.start
        after = far if ends else window.stop - 1 - places
        margin = torch.minimum(before, after)
        if settings.join is WindowJoin.FIRST:
            margin = torch.zeros_like(margin)
        better = margin > margins[window.document][places]
        owners[window.document][places[better]] = number
        margins[window.document][places[better]] = margin[better]
    return owners


def _lengths(tokens: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
    if tokens.dim() != 2:
        raise UsageError(f"tokens have the shape {list(tokens.shape)}", "Give (documents, length)")
    if mask is None:
        return [tokens.shape[1]] * tokens.shape[0]
    if mask.shape != tokens.shape:
        raise UsageError(
            f"the mask has the shape {list(mask.shape)}, tokens {list(tokens.shape)}",
            "Give one for each token",
        )
    lengths = mask.bool().sum(1)
    places = torch.arange(tokens.shape[1], device=mask.device)
    if not torch.equal(mask.bool(), places < lengths[:, None]):
        raise UsageError("documents are not padded on the right", 'Tokenise with padding_side="right"')
    return [int(length) for length in lengths.tolist()]


def _shown(
    tokens: torch.Tensor, windows: Sequence[Window], settings: WindowSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of some windows, padded to the longest, and their mask."""
    places = [window.positions(settings) for window in windows]
    longest = max(len(place) for place in places)
    shown = tokens.new_full((len(windows), longest), settings.pad)
    present = torch.zeros((len(windows), longest), dtype=torch.long, device=tokens.device)
    for row, (window, place) in enumerate(zip(windows, places, strict=True)):
        shown[row, : len(place)] = tokens[window.document, place.to(tokens.device)]
        present[row, : len(place)] = 1
    return shown, present


def batches_of_windows(
    tokens: torch.Tensor, mask: torch.Tensor | None, settings: WindowSettings
) -> Iterator[tuple[torch.Tensor, torch.Tensor, list[Window]]]:
    """Tokens, mask and windows for loops of your own, such as one that collects logits for `best_spans`."""
    windows = windows_of(_lengths(tokens, mask), settings)
    for start in range(0, len(windows), settings.batch_size):
        some = windows[start : start + settings.batch_size]
        yield *_shown(tokens, some, settings), some
