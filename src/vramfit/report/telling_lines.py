"""Which of the user's lines tell tensors apart: that of ``trainer.train()`` is the line of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vramfit.analysis import TensorGroup

_LEAST = 3
"""Groups from which a line can be common."""


def with_telling_places(groups: Sequence[TensorGroup]) -> tuple[TensorGroup, ...]:
    """Groups of tensors without the user's line where that tells nothing: the module, or a library's line, does.

    A line tells nothing where all groups with a line have that one, or where it is that of more than half of the groups
    that another package made for the user.
    """
    common = _common_line(groups)
    return tuple(
        _placed(group) if group.line is not None and group.line == common else group for group in groups
    )


def _common_line(groups: Sequence[TensorGroup]) -> object:
    """The line that tells nothing; None where each of them tells something."""
    lines = Counter(group.line for group in groups if group.line is not None)
    through = Counter(group.line for group in groups if group.line is not None and group.library_line)
    if len(lines) == 1 and lines.total() >= _LEAST:
        return next(iter(lines))
    line, count = next(iter(through.most_common(1)), (None, 0))
    return line if count >= _LEAST and 2 * count > through.total() else None


def _placed(group: TensorGroup) -> TensorGroup:
    """A group by its module, else by the line of the library; as it is where neither is known."""
    if group.module:
        return replace(group, line=None, library_line=None)
    return replace(group, line=None) if group.library_line is not None else group
