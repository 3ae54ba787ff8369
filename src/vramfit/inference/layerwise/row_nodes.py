"""The network as it was called: tensors that can be computed for any range of rows, and who reads them.

NOTE [Fronts]: every reader of a node has a front, the first row that it will still read. What lies before all fronts is
let go, piece by piece. A tensor that the program still holds (`LayerNode.holds`) may get more readers: its front is the
first row. A node that is computed anew for each reader (pointwise operations of one input) passes its front on to what
it reads; one whose rows are kept has read what it has produced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vramfit.inference.layerwise.chunk_height import ChunkStore
from vramfit.inference.layerwise.row_shelf import RowShelf
from vramfit.inference.layerwise.row_windows import RowWindow

Compute = Callable[[int, int, list[torch.Tensor], list[int]], torch.Tensor]
"""Makes output rows of: their first and last, the rows of each input, and the first of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A tensor without its values.

    Attributes:
        axis: the dimension of the rows, counted from the last one: -2 in a batch of images.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: int

    @property
    def rows(self) -> int:
        """How many there are."""
        return self.shape[self.axis]

    @property
    def row_bytes(self) -> int:
        """Of one row, over all of the batch and the channels."""
        return self.shape.numel() * self.dtype.itemsize // max(1, self.rows)


class Edge:
    """One node's reading of another; see NOTE [Fronts]."""

    __slots__ = ("front", "node", "reader", "window")

    def __init__(self, node: LayerNode, window: RowWindow, reader: LayerNode | None) -> None:
        self.node, self.window, self.reader = node, window, reader
        self.front = 0
        node.readers.append(self)


class LayerNode:
    """A tensor that can be computed for any range of rows.

    Args:
        outline: its shape and kind.
        inputs: what it reads, each with the rows that it reads of it.
        compute: makes rows; it must not change the rows that it is given, which may be another's own.
        kept: whether rows are computed once, in order, and kept until the last reader has passed.
        height: rows that are computed at a time.
        needs: what must be complete before: statistics of norms.

    Attributes:
        done: rows that were computed, where they are kept.
        full: all of its rows in one tensor, where they were asked for so.
        holds: how many tensors of the program stand for it.
    """

    def __init__(
        self,
        outline: Outline,
        inputs: Sequence[tuple[LayerNode, RowWindow]] = (),
        compute: Compute | None = None,
        *,
        kept: bool = False,
        height: int = 1,
        needs: Sequence[LayerNode] = (),
        store: ChunkStore = ChunkStore.DEVICE,
    ) -> None:
        self.outline, self.axis, self.rows = outline, outline.axis, outline.rows
        self.readers: list[Edge] = []
        self.edges = [Edge(node, window, self) for node, window in inputs]
        self.compute, self.kept, self.height = compute, kept, height
        self.needs = list(needs)
        self.holds = self.done = self.front = 0
        self.full: torch.Tensor | None = None
        self.shelf = RowShelf(self.axis, outline.device, store)
        self._sink: torch.Tensor | None = None

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Rows, which have to be there or computable (see `missing_of`); they may be a view of what is kept."""
        whole = self.full if self.full is not None else self._sink
        if whole is not None:
            return whole.narrow(self.axis, begin, end - begin)
        return self.shelf.read(begin, end) if self.kept else self.make(begin, end)

    def make(self, begin: int, end: int) -> torch.Tensor:
        """Compute rows of what is read."""
        if self.compute is None:
            raise AssertionError("a tensor without inputs has its rows")
        parts, starts = [], []
        for edge in self.edges:
            low, high = edge.window.span(begin, end)
            parts.append(edge.node.read(low, high))
            starts.append(low)
        return self.compute(begin, end, parts, starts)

    # -- producing ------------------------------------------------------------------------------------------------

    def next_end(self) -> int:
        """Where the next chunk ends."""
        return min(self.done + self.height, self.rows)

    def step(self) -> None:
        """Compute the next chunk and keep it."""
        begin, end = self.done, self.next_end()
        made = self.make(begin, end)
        if self._sink is not None:
            self._sink.narrow(self.axis, begin, end - begin).copy_(made)
        elif self.front < end:
            self.shelf.put(begin, made)
        self.passed(end)

    def passed(self, end: int) -> None:
        """Rows before `end` are computed: let go of what was read for them alone."""
        self.done = end
        for edge in self.edges:
            move_front(edge, edge.window.front(end))
        if end == self.rows:
            self.forget()

    def forget(self) -> None:
        """Let go of all that it reads: it has all of its rows, or nobody wants them."""
        for edge in self.cut_off():
            move_front(edge, edge.node.rows)

    def cut_off(self) -> list[Edge]:
        """Its edges, and those of the statistics that were made for it, which it loses."""
        cut, self.edges, self.compute = self.edges, [], None
        for one in self.needs:
            cut += one.edges
            one.edges, one.compute = [], None
        self.needs = []
        return cut

    # -- in one tensor --------------------------------------------------------------------------------------------

    def gather(self) -> bool:
        """Begin to keep all rows in one tensor; False where they are already.

        Where one chunk has all rows, it is that tensor, and nothing is copied.
        """
        if self.full is not None:
            return False
        self.kept = True
        if self._sink is None and (self.done or self.next_end() < self.rows):
            outline = self.outline
            self._sink = torch.empty_strided(
                outline.shape, outline.strides, dtype=outline.dtype, device=outline.device
            )
            self.shelf.pop_into(self._sink)
        return True

    def gathered(self) -> torch.Tensor:
        """All rows in one tensor, after `gather` and the last step."""
        if self.full is None:
            self.full = self._sink if self._sink is not None else self.shelf.read(0, self.rows)
            self._sink = None
            self.shelf.drop_before(self.rows)
        return self.full


class Gone(AssertionError):
    """Rows were asked for that all readers had passed."""


def source_node(tensor: torch.Tensor, axis: int) -> LayerNode:
    """A tensor that is there, as one to read rows of."""
    outline = Outline(
        shape=tensor.shape,
        strides=tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
        axis=axis,
    )
    node = LayerNode(outline, kept=True)
    node.full, node.done = tensor, node.rows
    return node


# -- fronts ---------------------------------------------------------------------------------------------------------


def move_front(edge: Edge, row: int) -> None:
    """A reader reads no row before `row` any more."""
    if row > edge.front:
        edge.front = row
        update_front(edge.node)


def update_front(node: LayerNode) -> None:
    """Let go of the rows of a node that nobody will read, and of what they are made of."""
    waiting = deque((node,))  # a queue: networks are deeper than Python's stack
    while waiting:
        node = waiting.popleft()
        if node.holds:
            continue
        if node.readers:
            node.readers = [edge for edge in node.readers if edge.front < node.rows]
        front = min((edge.front for edge in node.readers), default=node.rows)
        if front <= node.front:
            continue
        node.front = front
        node.shelf.drop_before(front)
        if front >= node.rows:
            node.full = None
        if front >= node.rows:
            passed = [(edge, edge.node.rows) for edge in node.cut_off()]
        elif not node.kept:
            passed = [(edge, edge.window.front(front)) for edge in node.edges]
        else:
            continue
        for edge, row in passed:
            if row > edge.front:
                edge.front = row
                waiting.append(edge.node)


# -- what to compute next ------------------------------------------------------------------------------------------


def missing_of(node: LayerNode, begin: int, end: int) -> list[tuple[LayerNode, int]]:
    """Nodes whose rows are kept and not there yet, with the row up to which they are needed to read these rows."""
    found: list[tuple[LayerNode, int]] = []
    waiting = [(node, begin, end)]
    while waiting:
        node, begin, end = waiting.pop()
        if node.full is not None:
            continue
        if node.kept:
            if node.done < end:
                found.append((node, end))
            continue
        found += ((one, one.rows) for one in node.needs if one.done < one.rows)
        waiting += ((edge.node, *edge.window.span(begin, end)) for edge in node.edges)
    return found


def missing_for_step(node: LayerNode) -> list[tuple[LayerNode, int]]:
    """What has to be produced before a node's next step."""
    begin, end = node.done, node.next_end()
    found = [(one, one.rows) for one in node.needs if one.done < one.rows]
    for edge in node.edges:
        found += missing_of(edge.node, *edge.window.span(begin, end))
    return found


def produce(node: LayerNode, upto: int) -> None:
    """Compute rows of a node until those before `upto` are there, and of what it reads as many as they take."""
    stack = [(node, upto)]
    while stack:
        node, upto = stack[-1]
        if node.done >= upto:
            stack.pop()
            continue
        missing = missing_for_step(node)
        if missing:
            stack += missing
            continue
        sources = [kept for edge in node.edges for kept in kept_below(edge.node)]
        node.step()
        for source in sources:
            _read_along(source)


def whole_of(node: LayerNode) -> torch.Tensor:
    """All rows of a node in one tensor; it keeps them so, and lets go of what it read."""
    if node.full is None and node.front > 0:
        raise Gone("rows of it have been let go")
    if node.gather():
        produce(node, node.rows)
    return node.gathered()


def kept_below(node: LayerNode) -> list[LayerNode]:
    """The nodes with kept rows that one reads, through what is computed anew."""
    found, waiting = [], [node]
    while waiting:
        node = waiting.pop()
        if node.kept:
            found.append(node)
        else:
            waiting += [edge.node for edge in node.edges]
    return found


def _read_along(source: LayerNode) -> None:
    """Let a reader that alone holds rows back take its turn now, where its own output is smaller than these.

    The convolution of a shortcut that halves the channels, next to the longer way through the block, is one.
    """
    if source.holds or source.full is not None or len(source.readers) < 2:
        return
    last = min(source.readers, key=lambda edge: edge.front)
    others = min(edge.front for edge in source.readers if edge is not last)
    reader = last.reader
    if reader is None or not reader.kept or len(reader.edges) != 1:
        return
    if reader.outline.row_bytes * reader.rows >= source.outline.row_bytes * source.rows:
        return
    while last.front < others and reader.done < reader.rows:
        if missing_for_step(reader):
            return
        reader.step()
