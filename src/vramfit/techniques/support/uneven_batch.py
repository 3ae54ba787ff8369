"""Makes a batch as uneven as real ones are: masks that end early, labels that are ignored, shorter lengths.

Workloads make batches of one length, and a loss that divides by what a mask leaves then looks like a mean over
examples. Each entry is varied in its own way, so that no entry can stand in for another: in a batch of a few examples
by a fixed pattern (`made_ragged`), which shows what a program accepts; in a large one at random, each entry by its own
share of the examples (`made_uneven`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vramfit.techniques.support.batch_cut import Cut
from vramfit.workload import Batch
from vramfit.workload.containers import mapped

IGNORED = (-100, -1, 255, 0)
"""Labels that losses leave out: torch's default, nanoGPT's, that of segmentation, and the number of padding."""

_SHORTEST = 2
"""Values of an example of which one can be left out."""


@dataclass(frozen=True, slots=True)
class Varied:
    """An entry of a batch that was made uneven.

    Attributes:
        name: of the entry, or its number; empty where it lies deeper than at the top.
        value: that was written where it ends early.
        mask: whether it held nothing but zeros and ones, or one number, and so may weigh what it covers.
        place: number of the tensor among those of the batch; None for lists that were shortened.
    """

    name: str
    value: int
    mask: bool
    place: int | None = None


@dataclass(frozen=True, slots=True)
class _Variation:
    place: int
    """Number of the tensor among those of the batch."""
    name: str
    value: float
    rows: tuple[int, ...]
    shift: int
    """By how many values it ends earlier than others."""
    mask: bool


def made_ragged(
    batch: Batch, cut: Cut, accepts: Callable[[Batch], bool], *, classes: bool = True
) -> tuple[Batch, tuple[Varied, ...]]:
    """A batch with every mask, label and length varied that a program can do with.

    Args:
        batch: of at least two examples.
        cut: how it is cut: only what has one row for each example is varied.
        accepts: whether the program can do with a batch.
        classes: whether labels of one class for each example are ignored for one of them.

    Returns:
        the batch, and what was varied.
    """
    done: list[Varied] = []
    for variation in _variations(batch, cut, classes=classes):
        tried = _written(batch, variation)
        if accepts(tried):
            batch = tried
            done.append(Varied(variation.name, int(variation.value), variation.mask, variation.place))
    for name, tried in _fewer(batch, cut):
        if accepts(tried):
            batch = tried
            done.append(Varied(name, 0, mask=False))
    return batch, tuple(done)


_LEFT = (0.9, 0.45, 0.7, 0.6, 0.8)
"""Shares of the examples, or of their lengths, that entries keep: entry after entry another."""

_IGNORED_ROWS = 0.05
"""Share of the examples whose only label is ignored."""


def made_uneven(
    batch: Batch, cut: Cut, varied: Sequence[Varied], accepts: Callable[[Batch], bool]
) -> tuple[Batch, tuple[str, ...]]:
    """A large batch whose masks, labels and lengths are uneven at random, each in its own way.

    Args:
        batch: as the workload makes it; of the same structure as the one that `made_ragged` varied.
        varied: what the program accepted there.
        accepts: whether the program can do with a batch.

    Returns:
        the batch, and the names of what was varied.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = [tensor for _, tensor in _named(batch)]
    names: list[str] = []
    places = dict.fromkeys(entry.place for entry in varied if entry.place is not None)
    for number, place in enumerate(places):
        entries = [entry for entry in varied if entry.place == place]
        if place >= len(tensors) or tensors[place].shape[:1] != (cut.size,):
            continue
        changed = _scattered(tensors[place], entries, _LEFT[number % len(_LEFT)], generator)
        tried = _replaced(batch, place, changed)
        if accepts(tried):
            batch = tried
            names.append(entries[0].name)
    return batch, tuple(dict.fromkeys(name for name in names if name))


def _scattered(
    tensor: torch.Tensor, entries: Sequence[Varied], left: float, generator: torch.Generator
) -> torch.Tensor:
    """A tensor with `left` of it kept at random, and the values of `entries`, in turn, in the place of the rest."""
    rows = len(tensor)
    values = torch.tensor([entry.value for entry in entries]).to(tensor.dtype)
    written = values[torch.randint(len(values), (rows,), generator=generator)]
    if tensor.dim() == 1:
        largest, mask = float(tensor.max()), entries[0].mask
        if mask and largest > 1:  # lengths: the longest first, as packed sequences want them
            kept = 1 + torch.randint(int(largest), (rows,), generator=generator)
            return torch.minimum(tensor, kept.to(tensor.dtype)).sort(descending=True).values
        share = 1 - left if mask else _IGNORED_ROWS
        return torch.where(torch.rand(rows, generator=generator) < share, written, tensor)
    length = tensor.shape[-1]
    ends = left + (1 - left) * (2 * torch.rand(rows, generator=generator) - 1)
    ends = (ends * length).round().clamp(min=1)
    beyond = torch.arange(length) >= ends[:, None]
    shape = (rows, *(1 for _ in tensor.shape[1:-1]), length)
    return torch.where(beyond.view(shape), written.view(rows, *(1 for _ in tensor.shape[1:])), tensor)


def _replaced(batch: Batch, place: int, value: torch.Tensor) -> Batch:
    """The batch with another tensor in one place."""
    places = itertools.count()
    return _changed(batch, lambda tensor: value if next(places) == place else tensor)


def classes_of_examples(batch: Batch, cut: Cut) -> tuple[str, ...]:
    """Names of the labels that hold one class for each example, and none that a loss ignores."""
    return tuple(
        name
        for name, tensor in _named(batch)
        if tensor.shape == (cut.size,) and tensor.dtype == torch.int64 and not bool((tensor < 0).any())
    )


def _variations(batch: Batch, cut: Cut, *, classes: bool) -> Iterator[_Variation]:
    for place, (name, tensor) in enumerate(_named(batch)):
        if not tensor.dim() or tensor.shape[0] != cut.size or cut.size < 2 or name in cut.uncut:
            continue
        if tensor.dim() > 1 and tensor.shape[-1] < _SHORTEST:
            continue
        values, mask = _values(tensor)
        if tensor.dim() == 1:
            if mask:
                yield _of_each(tensor, place, name, values[0])
            elif classes or bool((tensor < 0).any()):  # one class for each example: of the last it is ignored
                for value in values:
                    if value < 0:
                        yield _Variation(place, name, value, (cut.size - 1,), place, mask)
            continue
        for number, value in enumerate(values):
            rows = (number % cut.size, (number + 1) % cut.size)
            yield _Variation(place, name, value, rows, place, mask)


def _of_each(tensor: torch.Tensor, place: int, name: str, value: float) -> _Variation:
    """A weight or a length of one example: of the last, since packed sequences want the longest first."""
    largest = float(tensor.max())
    if value > 1:  # lengths of two sequences differ, so that they can be told from each other
        value = max(1.0, value - place % max(1.0, largest // 4))
    return _Variation(place, name, value, (len(tensor) - 1,), place, mask=True)


def _fewer(batch: Batch, cut: Cut) -> Iterator[tuple[str, Batch]]:
    """The batch with half of what the second example holds in lists of one entry for each, such as boxes."""

    def halved(value: Batch, count: int) -> Batch:
        if isinstance(value, torch.Tensor):
            return value[: count // 2] if value.dim() and value.shape[0] == count else value
        return mapped(value, lambda _name, inner: halved(inner, count))

    def shorter(value: Batch) -> Batch:
        if isinstance(value, list) and len(value) == cut.size:
            counts = Counter(tensor.shape[0] for _, tensor in _named(value[1]) if tensor.dim())
            if counts and (count := counts.most_common(1)[0][0]) >= _SHORTEST:
                return [value[0], halved(value[1], count), *value[2:]]
        return value

    if cut.examples and cut.size > 1 and not isinstance(batch, torch.Tensor | list):
        names: list[str] = []
        mapped(batch, lambda name, value: names.append(name) if shorter(value) is not value else None)
        for wanted in names:

            def part(name: str, value: Batch, wanted: str = wanted) -> Batch:
                return shorter(value) if name == wanted else value

            yield wanted, mapped(batch, part)


def _values(tensor: torch.Tensor) -> tuple[tuple[float, ...], bool]:
    """What is written where an entry ends early, and whether it is a mask; nothing where it can be no such thing."""
    if tensor.is_complex():
        return (), False
    low, high = (float(bound) for bound in (tensor.min(), tensor.max())) if tensor.numel() else (0.0, 0.0)
    if tensor.dtype == torch.bool or (low >= 0 and high <= 1 and _is_whole(tensor)):
        mostly = float(tensor.double().mean()) >= 0.5
        return ((0.0,) if mostly else (1.0,)), True
    if low == high:
        return (float(low // 2),), True  # lengths, or weights
    return (tuple(map(float, IGNORED)) if tensor.dtype == torch.int64 else ()), False


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(((tensor == 0) | (tensor == 1)).all())


def _written(batch: Batch, variation: _Variation) -> Batch:
    places = itertools.count()

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if next(places) != variation.place:
            return tensor
        changed = tensor.clone()
        for number, row in enumerate(variation.rows):
            if tensor.dim() == 1:
                changed[row] = variation.value
            else:
                length = tensor.shape[-1]
                start = length // 2 if number == 0 else length - length // 4
                # A mask of real numbers may weigh: something between says whether it is counted or summed.
                value = 0.5 if variation.mask and number and tensor.is_floating_point() else variation.value
                changed[row, ..., max(1, start - variation.shift % max(1, length // 4)) :] = value
        return changed

    return _changed(batch, change)


def _changed(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    if isinstance(batch, torch.Tensor):
        return change(batch)
    return mapped(batch, lambda _name, value: _changed(value, change))


def _named(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a batch in order, those at its top with their names."""
    found: list[tuple[str, torch.Tensor]] = []

    def take(name: str, value: Batch, *, top: bool) -> Batch:
        if isinstance(value, torch.Tensor):
            found.append((name if top else "", value))
        else:
            mapped(value, lambda _name, inner: take("", inner, top=False))
        return value

    if isinstance(batch, torch.Tensor):
        return [("", batch)]
    mapped(batch, lambda name, value: take(name, value, top=True))
    return found
