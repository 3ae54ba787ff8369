"""Which line of the program a step of a compiled graph stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramfit.trace import Frame

if TYPE_CHECKING:
    from torch._inductor.graph import GraphLowering

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (\S+)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of a compiled graph.

    Attributes:
        label: what it runs, as the trace names it.
        frames: lines of the program for which it stands, innermost first; none in a backward pass, which the
            program enters at one line.
    """

    label: str
    frames: tuple[Frame, ...] = ()


class BufferOrigins:
    """The lines of the program behind the buffers of a graph."""

    def __init__(self, lowering: GraphLowering) -> None:
        self._buffers = {} if lowering.is_backward else lowering.name_to_buffer
        self._order = {node: i for i, node in enumerate(lowering.graph.nodes)}
        self._parsed: dict[str, tuple[Frame, ...]] = {}

    def step(self, label: str, buffer: str | None) -> Step:
        """The step that fills a buffer."""
        return Step(label=label, frames=self._frames(buffer))

    def _frames(self, buffer: str | None) -> tuple[Frame, ...]:
        found = self._buffers.get(buffer or "")
        if found is None:
            return ()
        traced = [node for node in found.origins if node.stack_trace]
        if not traced:
            return ()
        text = max(traced, key=lambda node: self._order.get(node, -1)).stack_trace or ""
        frames = self._parsed.get(text)
        if frames is None:
            frames = tuple(
                Frame(file, int(line), name) for file, line, name in reversed(_FRAME.findall(text))
            )
            self._parsed[text] = frames
        return frames
