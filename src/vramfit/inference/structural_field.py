"""What a model's output depends on, read off the operations that it calls: nothing is computed, and no weight matters.

The model runs once for each spatial dimension on tensors without values, as it would run layer by layer
(vramfit/inference/layerwise), where every operation says which rows of its input its rows are made of. Followed from
the output to the input that gives the receptive field; it is the largest that any weights could have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from vramfit.inference.layerwise.chunk_height import ChunkHeight, ChunkStore
from vramfit.inference.layerwise.layer_runner import RULES
from vramfit.inference.layerwise.pointwise_rules import ALONG, POINTWISE
from vramfit.inference.layerwise.row_calls import RowMode, RowSession, plain_tensors
from vramfit.inference.layerwise.row_nodes import LayerNode
from vramfit.inference.layerwise.row_tensors import RowTensor, row_tensors_in
from vramfit.inference.layerwise.row_windows import RowTable, RowWindow, SameRows
from vramfit.inference.structural_rules import structural_rules
from vramfit.torch_internals.dispatch import disable_current_modes

_LARGEST = 1 << 14
"""Extent up to which an input is tried."""

_SMALL = 4096
"""Elements of a buffer up to which it keeps its values."""

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
        norms: names of those that take statistics over the whole dimension.
    """

    halo: tuple[int, int]
    alignment: int
    scales: tuple[Fraction, ...]
    shrink: tuple[int, ...]
    norms: tuple[str, ...]


TOGETHER = "takes all rows together"


class StructureUnknownError(Exception):
    """The operations do not say what the output depends on."""


def structural_fields(model: Callable[..., Any], example: torch.Tensor) -> list[RowField]:
    """The receptive field along each spatial dimension.

    Args:
        model: a module on any device, or any function that calls torch. A copy without values runs.
        example: what it is called with: (examples, channels, then spatial dimensions); only its shape and type count,
            and its extents have to suit the model.

    Raises:
        StructureUnknownError: an operation has no rule, the output does not follow the input, or reaches all of it.
    """
    if example.dim() < 3:
        raise StructureUnknownError("its input has no spatial dimensions")
    with disable_current_modes():
        hollow = _hollow(model) if isinstance(model, nn.Module) else model
        return [_field(hollow, example, dim) for dim in range(example.dim() - 2)]


def _hollow(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have no values; small buffers keep theirs: they decide where it looks."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty_like(parameter, device="meta"), parameter.requires_grad
        )
    for buffer in model.buffers():
        small = buffer.device.type == "cpu" and type(buffer) is torch.Tensor and buffer.numel() <= _SMALL
        memo[id(buffer)] = buffer.clone() if small else torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # it holds what cannot be copied
        raise StructureUnknownError(f"it cannot be copied: {error}") from error


def _field(model: Callable[..., Any], example: torch.Tensor, dim: int) -> RowField:
    for first in _extents(example.shape[2 + dim]):
        extent, known = first, None
        while extent <= _LARGEST:
            shape = list(example.shape)
            shape[2 + dim] = extent
            source, outputs, norms = _recorded(model, torch.empty(shape, dtype=example.dtype), dim)
            found = _inside(source.node, [output.node for output in outputs], norms)
            if (
                found is not None and found == known
            ):  # at twice the extent the same: nothing counts from the borders
                return found
            known = found
            extent *= 2
    raise StructureUnknownError(f"its output reaches through all of dimension {dim + 2}")


def _extents(given: int) -> list[int]:
    """The extent that was given, and some near it that total strides of 3, 5 and 7 and their multiples divide."""
    part = given // 4 if given % 4 == 0 else given
    return [given, *(part * prime for prime in (3, 5, 7) if given % prime)]


def _recorded(
    model: Callable[..., Any], given: torch.Tensor, dim: int
) -> tuple[RowTensor, list[RowTensor], list[str]]:
    """An input and the outputs, from one run without values, and norms; nodes live as long as what stands for them."""
    session = _Following()
    with torch.no_grad(), RowMode(session):
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
    return start, found, session.norms


def _plain(value: Any) -> Any:
    """An output as plain containers."""
    if hasattr(value, "items"):
        return dict(value.items())
    return vars(value) if hasattr(value, "__dataclass_fields__") else value


class _Following(RowSession):
    """Writes calls down, and never computes.

    Attributes:
        norms: that take statistics over all rows, in the order in which they were called.
    """

    def __init__(self) -> None:
        self.norms: list[str] = []
        rules = RULES | structural_rules(self.norms.append)
        super().__init__(ChunkHeight(rows=1), ChunkStore.DEVICE, rules, frozenset())
        self._name = ""

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One call; what adds something of its own to each row is no shift of itself."""
        self._name = getattr(func, "__name__", "")
        name = self._name.strip("_")
        rows = list(row_tensors_in((args, kwargs)))
        if rows and (self._name in _POINTWISE or name in _POINTWISE):
            axis = rows[0].node.axis
            for value in plain_tensors((args, kwargs)):
                if value.dim() >= -axis and value.shape[axis] > 1:
                    raise StructureUnknownError(f"{name} has values of its own for each row")
        return super().call(func, args, kwargs)

    def produce(self, node: LayerNode) -> None:
        """A rule wants all rows now, of the input too: a mean, an extreme, a pooling to one value.

        Raises:
            StructureUnknownError: always.
        """
        self.whole(node)

    def whole(self, node: LayerNode) -> torch.Tensor:
        """Something wants all of a tensor.

        Raises:
            StructureUnknownError: always.
        """
        del node
        raise StructureUnknownError(f"{self._name} {TOGETHER}")

    def dispatched(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operation without a rule.

        Raises:
            StructureUnknownError: always.
        """
        del args, kwargs
        raise StructureUnknownError(f"{func} {TOGETHER}")


_POINTWISE = frozenset((*POINTWISE, *ALONG, "cat", "concat", "concatenate"))


def _inside(source: LayerNode, outputs: list[LayerNode], norms: Sequence[str]) -> RowField | None:
    """The field of rows in the middle; None where the input is too small to tell."""
    extent = source.rows
    reach = _Reach(source)
    tables = []
    for output in outputs:
        first, last = reach.of(output)
        tables.append((output, list(zip(first.tolist(), (last + 1).tolist(), strict=True))))
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
            int(extent * scale) - output.rows
            for (output, _), scale in zip(tables, scales, strict=True)
            if scale
        ),
        norms=tuple(norms),
    )


def _steps(extent: int) -> list[int]:
    return [step for step in range(1, min(_MOST_STRIDE, extent // 4) + 1) if extent % step == 0]


def _scale(output: LayerNode, extent: int, step: int) -> Fraction | None:
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
    """The first and last row of the source that each row of a node is made of."""

    def __init__(self, source: LayerNode) -> None:
        rows = np.arange(source.rows, dtype=np.int64)
        self._known: dict[int, _Rows] = {id(source): (rows, rows)}

    def of(self, node: LayerNode) -> _Rows:
        """First and last rows, one entry of both for each row; the last before the first where there are none."""
        stack = [node]
        while stack:  # networks are deeper than Python's stack
            one = stack[-1]
            waiting = [edge.node for edge in one.edges if id(edge.node) not in self._known]
            if id(one) in self._known or not waiting:
                if id(one) not in self._known:
                    self._known[id(one)] = self._through(one)
                stack.pop()
            else:
                stack += waiting
        return self._known[id(node)]

    def _through(self, node: LayerNode) -> _Rows:
        """By what each of its rows reads; of rows that do not rise, all in between."""
        firsts = np.full(node.rows, np.iinfo(np.int64).max, dtype=np.int64)
        lasts = np.full(node.rows, -1, dtype=np.int64)
        for edge in node.edges:
            first, last = self._known[id(edge.node)]
            low, high = _spans(edge.window, node.rows)
            least = np.minimum.accumulate(first[::-1])[::-1]
            most = np.maximum.accumulate(last)
            firsts = np.minimum(firsts, least[low])
            lasts = np.maximum(lasts, most[high])
        return firsts, lasts


_Rows: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _spans(window: RowWindow, rows: int) -> _Rows:
    """First and last row that each row reads."""
    if isinstance(window, RowTable):
        return window.first[:rows], window.last[:rows]
    if isinstance(window, SameRows):
        same = np.arange(rows, dtype=np.int64) + window.first
        return same, same
    both = [window.span(row, row + 1) for row in range(rows)]
    return np.array([low for low, _ in both]), np.array([high - 1 for _, high in both])
