"""What each part of a model's output depends on: read off its operations, or by changing parts of its input.

Where every operation says which rows it reads (structural_field.py), nothing is computed. What follows is for the rest.

NOTE [Probing]: all rows of the input beyond a place are exchanged at once, and the first output row that changes is
found; twice, once with other values and once with nan. Values in float64 show every dependency of generic weights, bit
for bit, and do not show what a mask makes exactly nothing (the shifted windows of Swin); nan shows these as well, and
what weights of zero would hide. So values decide, weights of zero are drawn anew for the probe, and `HaloEvidence` says
whether nan agrees. A tile at either border and one between, compared with the whole, have the last word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from typing import Any

import torch

from vramfit.arguments import number_argument
from vramfit.inference.probe_subject import ProbeStoppedError, ProbeSubject
from vramfit.inference.structural_field import TOGETHER, StructureUnknownError, structural_fields


class LocalityKind(Enum):
    """What a part of a model's output needs of its input.

    Attributes:
        LOCAL: a neighbourhood: tiles with a halo give the same as the whole.
        GLOBAL_NORMS: a neighbourhood, and statistics of everything (group and instance norms, batch norms in training
            mode): layer by layer it can be computed in chunks.
        WHOLE: all of it (attention, global pooling, places that are counted from the borders), or nothing less was
            found.
        BATCH_ONLY: its output has no spatial dimensions that follow the input's: chunks of the batch alone.
    """

    LOCAL = "local"
    GLOBAL_NORMS = "global-norms"
    WHOLE = "whole"
    BATCH_ONLY = "batch-only"


class HaloEvidence(Enum):
    """How far the halo is known.

    Attributes:
        MEASURED: it is exact: values and nan agree.
        VALUES: no value changes beyond it, though nan spreads further: through masks that make weights nothing.
        STRUCTURE: it is the largest that any weights could have, read off the operations.
        NONE: there is none.
    """

    MEASURED = "measured"
    VALUES = "values"
    STRUCTURE = "structure"
    NONE = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Locality:
    """What a probe found.

    Attributes:
        halo: for each spatial dimension the input rows before and after an aligned block that its output depends on; of
            the rest of the network where norms are global, empty where the model needs its whole input.
        alignment: for each spatial dimension, what the beginning of a tile and the size of a block are multiples of:
            the total stride.
        scales: for each output, output rows for each input row, by dimension.
        shrink: for each output, how many rows fewer than the scale says, by dimension: of convolutions without padding.
        mixes_batch: whether an example's output depends on the other examples.
        evidence: how far the halo is known.
        why: what makes it need more than a neighbourhood, or why the probe gave up; empty for `LOCAL`.
        complete: whether the probe came to its end; False where time ran out or the model could not be run.
    """

    kind: LocalityKind
    halo: tuple[tuple[int, int], ...] = ()
    alignment: tuple[int, ...] = ()
    scales: tuple[tuple[Fraction, ...], ...] = ()
    shrink: tuple[tuple[int, ...], ...] = ()
    mixes_batch: bool = False
    evidence: HaloEvidence = HaloEvidence.NONE
    why: str = ""
    complete: bool = True


USUAL_SECONDS = 30.0
"""What a probe may take where nothing else is said."""


def probe(
    model: Callable[..., Any],
    example: Any,
    *,
    seconds: float = USUAL_SECONDS,
    most: int = 0,
) -> Locality:
    """Find out what each part of a model's output depends on.

    Of models whose operations all say what they read, nothing is computed. Else a copy of the model in float64 runs
    some dozens of times on small random inputs, in the mode (training or not) that the model is in. The model, its
    buffers and the random numbers that follow stay as they were. A model without values, on a virtual GPU, is given
    drawn ones on the CPU.

    Args:
        model: a module, or any function that calls torch.
        example: what it is called with: a tensor (examples, channels, then spatial dimensions), or a tuple or dict of
            arguments with one.
        seconds: how long it may take; a model that takes longer is `LocalityKind.WHOLE`.
        most: the largest extent of an input that is tried; 0 for 512 in one and two dimensions and 128 in three.

    Raises:
        UsageError: `seconds` is not a positive number.
    """
    seconds = number_argument("seconds", seconds, least=0.0, most=1e6)
    reason = ""
    if isinstance(example, torch.Tensor):
        try:
            return _by_structure(model, example)
        except StructureUnknownError as unknown:
            reason = str(unknown)
    try:
        subject = ProbeSubject(model, example, seconds=seconds)
        prober = _Prober(subject, most or (512 if subject.dims < 3 else 128))
        found = prober.locality()
    except ProbeStoppedError as stop:
        return Locality(kind=LocalityKind.WHOLE, why=str(stop), complete=False)
    for prime in (3, 5, 7) if prober.aperiodic else ():
        with contextlib.suppress(ProbeStoppedError):
            # Of inputs that the total stride does not divide, outputs have no fixed scale and no period.
            another = _Prober(subject, prober.most, prime=prime).locality()
            if another.kind is not LocalityKind.WHOLE:
                return another
    if found.kind is LocalityKind.WHOLE and reason.endswith(TOGETHER) and not reason.startswith("_"):
        return replace(found, why=f"{found.why.partition(', ')[0]}: {reason}")
    return found


def _by_structure(model: Callable[..., Any], example: torch.Tensor) -> Locality:
    """What the operations say.

    Raises:
        StructureUnknownError: one of them does not.
    """
    fields = structural_fields(model, example)
    norms = list(dict.fromkeys(name for field in fields for name in field.norms))
    return Locality(
        kind=LocalityKind.GLOBAL_NORMS if norms else LocalityKind.LOCAL,
        halo=tuple(field.halo for field in fields),
        alignment=tuple(field.alignment for field in fields),
        scales=tuple(zip(*(field.scales for field in fields), strict=True)),
        shrink=tuple(zip(*(field.shrink for field in fields), strict=True)),
        mixes_batch="batch_norm" in norms,
        evidence=HaloEvidence.STRUCTURE,
        why=f"statistics of everything: {', '.join(sorted(norms))}" if norms else "",
    )


class _Prober:
    """One probe.

    Attributes:
        base: an extent that the model takes in every dimension.
        norms: whether norms take their statistics.
        aperiodic: whether no shift was found that shifts the output alike.

    Args:
        prime: what extents are multiples of.
    """

    def __init__(self, subject: ProbeSubject, most: int, *, prime: int = 1) -> None:
        self.subject, self.most, self.norms, self.aperiodic = subject, most, True, False
        self.base = self._some_size(prime)
        self.step = self.base
        self.scales: list[tuple[Fraction, ...]] = []
        self.shrink: list[tuple[int, ...]] = []

    def locality(self) -> Locality:
        """All that is found."""
        mixes = self._mixes_batch()
        if not self._has_scales():
            return Locality(
                kind=LocalityKind.BATCH_ONLY,
                mixes_batch=mixes,
                why="its output has no extent that follows the input's",
            )
        known = Locality(
            kind=LocalityKind.WHOLE, scales=tuple(self.scales), shrink=tuple(self.shrink), mixes_batch=mixes
        )
        why = ""
        for norms in (True, False):
            self.norms = norms
            found = self._dimensions()
            if not isinstance(found, str):
                halos, alignments, evidence = found
                kind = LocalityKind.LOCAL if norms else LocalityKind.GLOBAL_NORMS
                blamed = "" if norms else f"statistics of everything: {self._blamed(_NORMS)}"
                return replace(
                    known, kind=kind, halo=halos, alignment=alignments, evidence=evidence, why=blamed
                )
            why = why or found
            if not self.subject.called & _NORMS:
                break
        blamed = self._blamed(_GLOBALS)
        return replace(known, why=f"{why}, {blamed}" if blamed else why)

    def _blamed(self, names: frozenset[str]) -> str:
        return ", ".join(sorted(self.subject.called & names))

    # -- sizes --------------------------------------------------------------------------------------------------

    def _sizes(self, dim: int, extent: int) -> list[int]:
        return [extent if at == dim else self.base for at in range(self.subject.dims)]

    def _run(self, given: torch.Tensor) -> list[torch.Tensor]:
        return self.subject.run(given, norms=self.norms)

    def _some_size(self, prime: int) -> int:
        """The first of some extents that the model takes, from small ones on."""
        first: Exception | None = None
        extents: tuple[int, ...] = (
            (32, 64, 16, 48, 56, 96, 128, 224, 256) if self.subject.dims < 3 else (16, 32, 48, 64, 96)
        )
        extents = (*extents, int(max(self.subject.shape[2:])))
        if prime > 1:
            extents = tuple(
                prime * times for times in ((16, 8, 32, 4) if self.subject.dims < 3 else (8, 4, 16))
            )
        for extent in extents:
            if extent > max(self.most, 256):
                continue
            try:
                self._run(self.subject.inputs([extent] * self.subject.dims))
            except ProbeStoppedError:
                raise
            except Exception as error:  # a size that does not suit: any exception says so
                first = first or error
            else:
                return extent
        raise ProbeStoppedError(f"it takes no small input: {_line(first)}")

    def _mixes_batch(self) -> bool:
        sizes = [self.base] * self.subject.dims
        pair = self.subject.inputs(sizes, batch=2)
        other = pair.clone()
        other[1] = -other[1] + 0.5
        try:
            found, changed = self._run(pair), self._run(other)
        except ProbeStoppedError:
            raise
        except Exception:  # it takes one example at a time
            return False
        return any(
            a.dim() == 0 or a.shape[0] != 2 or not _same(a[0], b[0])
            for a, b in zip(found, changed, strict=True)
        )

    def _has_scales(self) -> bool:
        """Compare output sizes of two extents in each dimension; False where an output does not follow."""
        dims, base = self.subject.dims, self.base
        plain = self._run(self.subject.inputs([base] * dims))
        if not plain or any(one.dim() != dims + 2 or not one.is_floating_point() for one in plain):
            return False
        found: list[list[Fraction]] = [[] for _ in plain]
        for dim in range(dims):
            try:
                longer = self._run(self.subject.inputs(self._sizes(dim, 2 * base)))
            except ProbeStoppedError:
                raise
            except Exception as error:
                raise ProbeStoppedError(f"it takes inputs of one size: {_line(error)}") from error
            for scales, before, after in zip(found, plain, longer, strict=True):
                scales.append(Fraction(after.shape[2 + dim] - before.shape[2 + dim], base))
        if any(scale <= 0 for scales in found for scale in scales):
            return False
        self.scales = [tuple(scales) for scales in found]
        self.shrink = [
            tuple(int(base * scale - one.shape[2 + dim]) for dim, scale in enumerate(scales))
            for scales, one in zip(found, plain, strict=True)
        ]
        return True

    # -- dimensions -----------------------------------------------------------------------------------------------

    def _dimensions(self) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], HaloEvidence] | str:
        """Halo, alignment and evidence, or why there are none."""
        halos, alignments, evidence = [], [], HaloEvidence.MEASURED
        for dim in range(self.subject.dims):
            extent = self._contained(dim)
            if extent is None:
                return f"changes reach through all of dimension {dim + 2}"
            alignment = self._alignment(dim, extent)
            if alignment is None:
                self.aperiodic = True
                return f"places in dimension {dim + 2} count from the borders, or have no period"
            halo = self._halo(dim, extent, alignment)
            while halo is None and 2 * extent <= max(self.most, 4 * self.base):
                extent *= 2  # what stays away from the border may reach over half of the input all the same
                halo = self._halo(dim, extent, alignment)
            if halo is None or not self._tiles_agree(dim, halo, alignment):
                return f"tiles along dimension {dim + 2} differ from the whole"
            if not self._poison_agrees(dim, extent, alignment, halo):
                evidence = HaloEvidence.VALUES
            halos.append(halo)
            alignments.append(alignment)
        return tuple(halos), tuple(alignments), evidence

    def _changed(
        self, dim: int, given: torch.Tensor, plain: Sequence[torch.Tensor], begin: int, end: int, value: float
    ) -> list[tuple[int, int]]:
        """First and last row that change in each output when input rows do: (length, -1) where none does.

        Args:
            value: nan, or what is added.
        """
        other = given.clone()
        part = other.narrow(2 + dim, begin, end - begin)
        if value != value:
            part.fill_(value)
        else:
            part.copy_(self.subject.inputs(part.shape[2:], seed=7) * 1.5 + value)
        found = []
        for before, after in zip(plain, self._run(other), strict=True):
            differs = ((before != after) | after.isnan()).movedim(2 + dim, 0).flatten(1).any(1)
            rows = differs.nonzero().flatten()
            found.append((int(rows[0]), int(rows[-1])) if len(rows) else (len(differs), -1))
        return found

    def _contained(self, dim: int) -> int | None:
        """An extent at which a change of either half does not reach the other border; None up to the largest."""
        extent, reached = self.base, 0
        blamed = _GLOBALS | _NORMS if self.norms else _GLOBALS
        while extent <= max(self.most, 2 * self.base):
            given = self.subject.inputs(self._sizes(dim, extent))
            plain = self._run(given)
            middle = extent // 2
            low = self._changed(dim, given, plain, 0, middle, 0.25)
            high = self._changed(dim, given, plain, middle, extent, 0.25)
            last = [one.shape[2 + dim] - 1 for one in plain]
            if all(found[1] < end for found, end in zip(low, last, strict=True)) and all(
                found[0] > 0 for found in high
            ):
                return extent
            # From border to border, twice, in a model with something that does so: it would not end with larger inputs.
            ends = self._changed(dim, given, plain, extent - 1, extent, 0.25)
            reached += all(found[0] == 0 for found in ends)
            if reached > 1 and self.subject.called & blamed:
                return None
            extent *= 2
        return None

    def _alignment(self, dim: int, extent: int) -> int | None:
        """The least shift of the input that shifts the output alike."""
        found = next((step for step in _SHIFTS if step <= extent and self._shifts(dim, extent, step)), None)
        if found is None:
            return None
        for prime in (2, 3, 5, 7):
            while found % prime == 0 and self._shifts(dim, extent, found // prime):
                found //= prime
        return found

    def _shifts(self, dim: int, extent: int, step: int) -> bool:
        """Whether the output of a shifted input is the shifted output, away from the borders."""
        shifts = [scales[dim] * step for scales in self.scales]
        if any(shift.denominator != 1 for shift in shifts):
            return False
        size = 2 * extent if 2 * extent <= max(self.most, 4 * self.base) else extent
        long = self.subject.inputs(self._sizes(dim, size + step), seed=3)
        plain = self._run(long.narrow(2 + dim, 0, size).contiguous())
        moved = self._run(long.narrow(2 + dim, step, size).contiguous())
        for before, after, shift in zip(plain, moved, shifts, strict=True):
            rows, by = before.shape[2 + dim], int(shift)
            margin = rows // 4 if size > extent else rows * 3 // 8
            first, count = margin, rows - 2 * margin - by
            if count < 1 or not _close(
                before.narrow(2 + dim, first + by, count), after.narrow(2 + dim, first, count)
            ):
                return False
        return True

    def _halo(self, dim: int, extent: int, alignment: int) -> tuple[int, int] | None:
        """Rows before and after a block whose exchange first leaves the block's output as it is, by bisection."""
        extent = max(extent, -(-4 * alignment // self.base) * self.base)
        given = self.subject.inputs(self._sizes(dim, extent))
        plain = self._run(given)
        cut = max(alignment, extent // 2 // alignment * alignment)
        if cut >= extent:
            return None
        borders = [int(scales[dim] * cut) for scales in self.scales]

        def touched_after(distance: int) -> bool:
            changes = self._changed(dim, given, plain, cut + distance, extent, 0.25)
            return any(found[0] < border for found, border in zip(changes, borders, strict=True))

        def touched_before(distance: int) -> bool:
            changes = self._changed(dim, given, plain, 0, cut - distance, 0.25)
            return any(found[1] >= border for found, border in zip(changes, borders, strict=True))

        before, after = _least(touched_before, cut - 1), _least(touched_after, extent - cut - 1)
        return None if before is None or after is None else (before, after)

    def _poison_agrees(self, dim: int, extent: int, alignment: int, halo: tuple[int, int]) -> bool:
        extent = max(extent, -(-4 * alignment // self.base) * self.base)
        given = self.subject.inputs(self._sizes(dim, extent))
        plain = self._run(given)
        cut = max(alignment, extent // 2 // alignment * alignment)
        borders = [int(scales[dim] * cut) for scales in self.scales]
        before = self._changed(dim, given, plain, 0, cut - halo[0], float("nan"))
        after = self._changed(dim, given, plain, cut + halo[1], extent, float("nan"))
        return all(
            low[1] < border <= high[0] for low, high, border in zip(before, after, borders, strict=True)
        )

    def _tiles_agree(self, dim: int, halo: tuple[int, int], alignment: int) -> bool:
        """Compare tiles at both borders and in between with the whole."""
        low, high = (-(-side // alignment) * alignment for side in halo)
        block = max(self.base // alignment, 1) * alignment
        whole = -(-(low + high + 3 * block) // self.base) * self.base
        given = self.subject.inputs(self._sizes(dim, whole), seed=5)
        plain = self._run(given)
        last = (whole - 1) // alignment * alignment
        for begin, end in (
            (0, block),
            (low + block // alignment // 2 * alignment, None),
            (last - block, whole),
        ):
            end = begin + block if end is None else end
            first, final = max(0, begin - low), min(whole, end + high)
            try:
                tile = self._run(given.narrow(2 + dim, first, final - first).contiguous())
            except ProbeStoppedError:
                raise
            except Exception:  # a size between does not suit: more of the input does
                final = min(whole, first + -(-(final - first) // self.base) * self.base)
                first = max(0, final - -(-(final - first) // self.base) * self.base)
                tile = self._run(given.narrow(2 + dim, first, final - first).contiguous())
            for expected, found, scales in zip(plain, tile, self.scales, strict=True):
                scale = scales[dim]
                start, stop = int(begin * scale), min(int(end * scale), expected.shape[2 + dim])
                origin, count = int(first * scale), stop - start
                if start - origin + count > found.shape[2 + dim] or count < 1:
                    return False
                if not _close(
                    expected.narrow(2 + dim, start, count), found.narrow(2 + dim, start - origin, count)
                ):
                    return False
        return True


_SHIFTS = (
    1,
    2,
    4,
    8,
    16,
    32,
    64,
    3,
    6,
    12,
    24,
    48,
    96,
    5,
    10,
    20,
    40,
    80,
    7,
    14,
    28,
    56,
    112,
    128,
    9,
    18,
    36,
    72,
)
"""Shifts to try: strides, and windows of patches."""

_NORMS = frozenset(("group_norm", "instance_norm", "batch_norm"))
_GLOBALS = frozenset(
    (
        "scaled_dot_product_attention",
        "softmax",
        "multi_head_attention_forward",
        "mean",
        "linear",
        "bmm",
        "matmul",
        *(f"adaptive_{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)),
    )
)
"""Functions through which everything may depend on everything."""


def _least(touched: Callable[[int], bool], most: int) -> int | None:
    """The least distance that is not touched; None where even the most is."""
    if touched(most):
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if touched(middle):
            low = middle + 1
        else:
            high = middle
    return low


def _line(error: Exception | None) -> str:
    """The first line of what an error says."""
    return str(error).partition("\n")[0]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one, other))


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of float64 are the same but for the order of sums."""
    scale = max(float(one.abs().max()), 1e-30)
    return bool(float((one - other).abs().max()) <= 1e-9 * scale)
