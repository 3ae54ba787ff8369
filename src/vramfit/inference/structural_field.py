"""What a model's output depends on, read off the operations that it calls: nothing is computed, and no weight matters.

The model runs once for each spatial dimension on tensors without values, as it would run layer by layer
(vramfit/inference/layerwise), where every operation says which rows of its input its rows are made of. Followed from
the output to the input that gives the receptive field; it is the largest that any weights could have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vramfit.inference.layerwise.chunk_height import ChunkHeight, ChunkStore
from vramfit.inference.layerwise.layer_runner import ENTRIES, RULES
from vramfit.inference.layerwise.pointwise_rules import ALONG, CHANNELWISE, POINTWISE
from vramfit.inference.layerwise.row_calls import RowMode, RowSession
from vramfit.inference.layerwise.row_nodes import RowNode
from vramfit.inference.layerwise.row_tensors import RowTensor, row_tensors_in

_LARGEST = 1 << 14
"""Extent up to which an input is tried."""

_MOST_STRIDE = 256
"""Largest total stride, or window of patches, that is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowField:
    """The receptive field along one dimension.

    Attributes:
        halo: input rows before and after an aligned block that its output depends on.
        alignment: what the beginning of a tile and the size of a block are multiples of.
        scales: for each output, output rows for each input row.
        shrink: for each output, how many rows fewer than the scale says.
        norms: whether norms take statistics over the whole dimension.
    """

    halo: tuple[int, int]
    alignment: int
    scales: tuple[Fraction, ...]
    shrink: tuple[int, ...]
    norms: bool


class StructureUnknownError(Exception):
    """The operations do not say what the output depends on."""


def structural_fields(model: Callable[..., Any], example: torch.Tensor) -> list[RowField]:
    """The receptive field along each spatial dimension.

    Args:
        model: a module on any device, or any function that calls torch.
        example: what it is called with: (examples, channels, then spatial dimensions); only its shape and type count,
            and its extents have to suit the model.

    Raises:
        StructureUnknownError: an operation has no rule, the output does not follow the input, or reaches all of it.
    """
    return [_field(model, example, dim) for dim in range(example.dim() - 2)]


def _field(model: Callable[..., Any], example: torch.Tensor, dim: int) -> RowField:
    extent = example.shape[2 + dim]
    while extent <= _LARGEST:
        shape = list(example.shape)
        shape[2 + dim] = extent
        source, outputs = _recorded(model, torch.empty(shape, dtype=example.dtype), dim)
        found = _inside(source.node, [output.node for output in outputs])
        if found is not None:
            return found
        extent *= 2
    raise StructureUnknownError(f"its output reaches through all of dimension {dim + 2}")


def _recorded(
    model: Callable[..., Any], given: torch.Tensor, dim: int
) -> tuple[RowTensor, list[RowTensor]]:
    """An input and the outputs, from one run without values; nodes live as long as what stands for them."""
    session = _Following()
    with _disable_current_modes(), torch.no_grad(), RowMode(session):
        start = session.tensor_of(given, 2 + dim - given.dim())
        try:
            made = model(start)
        except StructureUnknownError:
            raise
        except Exception as error:  # whatever its code makes of tensors without values
            raise StructureUnknownError(f"it does not run without values: {error}") from error
        found = list(row_tensors_in(_plain(made)))
    if not found:
        raise StructureUnknownError("its output does not follow its input")
    return start, found


def _plain(value: Any) -> Any:
    """An output as plain containers."""
    if hasattr(value, "items"):
        return dict(value.items())
    return vars(value) if hasattr(value, "__dataclass_fields__") else value


class _Following(RowSession):
    """Writes calls down, and never computes."""

    def __init__(self) -> None:
        super().__init__(ChunkHeight(rows=1), ChunkStore.DEVICE, RULES, frozenset())
        self._name = ""

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One call; what adds something of its own to each row is no shift of itself."""
        self._name = getattr(func, "__name__", "")
        name = self._name.strip("_")
        rows = list(row_tensors_in((args, kwargs)))
        if rows and (self._name in _POINTWISE or name in _POINTWISE):
            axis = rows[0].node.axis
            for value in (*args, *kwargs.values()):
                plain = isinstance(value, torch.Tensor) and not isinstance(value, RowTensor)
                if plain and value.dim() >= -axis and value.shape[axis] > 1:
                    raise StructureUnknownError(f"{name} has values of its own for each row")
        return super().call(func, args, kwargs)

    def whole(self, node: RowNode) -> torch.Tensor:
        """Something wants all of a tensor.

        Raises:
            StructureUnknownError: always.
        """
        del node
        raise StructureUnknownError(f"{self._name} takes all rows together")

    def dispatched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation without a rule.

        Raises:
            StructureUnknownError: always.
        """
        del args, kwargs
        raise StructureUnknownError(f"{func} takes all rows together")


_POINTWISE = frozenset(POINTWISE) | frozenset(ALONG) | frozenset(CHANNELWISE) | {"cat", "concat", "concatenate"}


def _inside(source: RowNode, outputs: list[RowNode]) -> RowField | None:
    """The field of rows in the middle; None where the input is too small to tell."""
    extent, norms = source.rows, False
    tables = []
    for output in outputs:
        reach = _Reach(source)
        rows = [reach.of(output, row) for row in range(output.rows)]
        norms = norms or reach.norms
        tables.append((output, rows))
    found = None
    for step in _steps(extent):
        halos = [_halo(rows, extent, step, _scale(output, extent, step)) for output, rows in tables]
        if all(halo is not None for halo in halos):
            found = step, [halo for halo in halos if halo is not None]
            break
    if found is None:
        return None
    step, sides = found
    scales = [_scale(output, extent, step) for output, _ in tables]
    assert all(scale is not None for scale in scales)
    return RowField(
        halo=(max(0, *(before for before, _ in sides)), max(0, *(after for _, after in sides))),
        alignment=step,
        scales=tuple(scale for scale in scales if scale is not None),
        shrink=tuple(
            int(extent * scale) - output.rows for (output, _), scale in zip(tables, scales, strict=True) if scale
        ),
        norms=norms,
    )


def _steps(extent: int) -> list[int]:
    return [step for step in range(1, min(_MOST_STRIDE, extent // 4) + 1) if extent % step == 0]


def _scale(output: RowNode, extent: int, step: int) -> Fraction | None:
    """Output rows for an input row: a multiple of 1/step that gives about the output's rows; None where none does."""
    scale = Fraction(round(Fraction(output.rows * step, extent)), step)
    return scale if scale > 0 and (scale * step).denominator == 1 else None


def _halo(
    rows: list[tuple[int, int]], extent: int, step: int, scale: Fraction | None
) -> tuple[int, int] | None:
    """Rows before and after blocks of `step` rows, where all blocks in the middle half have the same."""
    if scale is None:
        return None
    out = int(scale * step)
    sides = set()
    for begin in range(extent // 4 // step * step, extent * 3 // 4, step):
        block = rows[int(begin * scale) : int(begin * scale) + out]
        if len(block) < out:
            return None
        low, high = min(first for first, _ in block), max(last for _, last in block)
        if low <= 0 or high >= extent:
            return None
        sides.add(tuple((first - begin, last - begin) for first, last in block))
        if len(sides) > 1:
            return None
        halo = (begin - low, high - (begin + step))
    return (max(0, halo[0]), max(0, halo[1])) if sides else None


class _Reach:
    """The rows of the input that rows of a node are made of.

    Attributes:
        norms: whether statistics of a whole tensor were among what they are made of.
    """

    def __init__(self, source: RowNode) -> None:
        self.source, self.norms = source, False
        self._known: dict[tuple[int, int, int], tuple[int, int]] = {}

    def of(self, node: RowNode, row: int) -> tuple[int, int]:
        """The first row and the one after the last, of the source, for one row."""
        return self._of(node, row, row + 1)

    def _of(self, node: RowNode, begin: int, end: int) -> tuple[int, int]:
        stack = [(node, begin, end)]
        while stack:  # networks are deeper than Python's stack
            one, low, high = stack[-1]
            key = (id(one), low, high)
            if key in self._known:
                stack.pop()
                continue
            if one is self.source:
                self._known[key] = (low, high)
                stack.pop()
                continue
            self.norms = self.norms or bool(one.needs)
            below = [(edge.node, *edge.window.span(low, high)) for edge in one.edges]
            waiting = [each for each in below if (id(each[0]), each[1], each[2]) not in self._known]
            if waiting:
                stack += waiting
                continue
            parts = [self._known[(id(each[0]), each[1], each[2])] for each in below]
            parts = [part for part in parts if part[1] > part[0]]
            self._known[key] = (
                min((part[0] for part in parts), default=self.source.rows),
                max((part[1] for part in parts), default=0),
            )
            stack.pop()
        return self._known[(id(node), begin, end)]
