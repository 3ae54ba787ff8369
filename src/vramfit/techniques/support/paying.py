"""Which blocks it pays most to move something of over the link."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from vramfit.techniques.core.model_profile import ModelBlock


def best_blocks(
    blocks: list[ModelBlock], count: int, crossing_bytes: Callable[[ModelBlock], int], link: float
) -> list[ModelBlock]:
    """Those that wait least for what crosses, in the order in which they run.

    Equal ones are taken apart from one another, so that the link is never idle.

    Args:
        blocks: to choose from.
        count: how many to choose.
        crossing_bytes: what crosses the link in the forward pass of a block, and again in its backward pass.
        link: bytes per second.
    """

    def waits(block: ModelBlock) -> float:
        crossing = crossing_bytes(block) / link
        waiting = max(0.0, crossing - block.forward_seconds) + max(0.0, crossing - block.backward_seconds)
        return waiting / crossing

    def chosen() -> Iterator[ModelBlock]:
        alike: dict[int, list[ModelBlock]] = {}
        for block in blocks:
            alike.setdefault(block.like, []).append(block)
        left = count
        for kind in sorted(alike.values(), key=lambda same: (waits(same[0]), -crossing_bytes(same[0]))):
            taken = min(left, len(kind))
            yield from (kind[index * len(kind) // taken] for index in range(taken))
            left -= taken

    return sorted(chosen(), key=lambda block: block.index)
