"""A terminal that shows control characters of foreign texts instead of obeying them.

Messages of exceptions, names of files and the texts of a recording are not ours. An escape sequence in them would
colour, move or clear what stands on a terminal, or rename its window.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_KEPT = "\n\t"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""They let a text be read in another order than it stands in (Unicode Annex 9)."""
_SHOWN = {
    **{
        code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in _KEPT
    },  # Unicode's Control Pictures
    0x7F: "\N{SYMBOL FOR DELETE}",
    **dict.fromkeys((*range(0x80, 0xA0), *_DIRECTIONS, *range(0xD800, 0xE000)), _UNKNOWN),
}


def shown_controls(text: str) -> str:
    """A text in which control characters and halves of surrogate pairs are shown: ``␛[31m``."""
    return text if text.isascii() and text.isprintable() else text.translate(_SHOWN)


class SafeConsole(Console):
    """A console of rich that shows the control characters of texts instead of sending them."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something, none of them with control characters that rich has not put there."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(shown_controls(text), style)
