"""Weights that wait in pinned host memory, side by side in few large blocks.

NOTE [Blocks of pinned memory]: torch rounds each request for pinned memory up to a power of two
(aten/src/ATen/core/CachingHostAllocator.h): of weights pinned one by one, up to a half is waste. So blocks are asked
for whose sizes are powers of two, and tensors lie in them side by side; what is lost is ends where no tensor fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from vramfit.inference.streaming.layer_weights import ALIGNMENT, shaped

LARGEST_BLOCK = 1 << 30
"""Bytes of a block, unless one tensor takes more: the larger, the less is lost at the ends."""

_SMALLEST_BLOCK = 1 << 16


class PinnedHome:
    """Moves parameters into pinned memory, one after another, and back.

    Parameters stay the objects that they are. The host holds their bytes once, and one tensor more while they move.
    """

    def __init__(self) -> None:
        self._moved: list[tuple[nn.Parameter, torch.device]] = []

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let parameters, on whatever device, lie in pinned memory; what is pinned already stays."""
        waiting = [one for one in parameters if one.device.type != "cpu" or not one.is_pinned()]
        places = block_places([one.nbytes for one in waiting])
        blocks: dict[int, torch.Tensor] = {}
        last = {block: index for index, (block, _, _) in enumerate(places)}
        for index, (parameter, (block, size, offset)) in enumerate(zip(waiting, places, strict=True)):
            if block not in blocks:
                blocks[block] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            part = shaped(blocks[block][offset:], parameter.detach())
            # A parameter, for on the virtual GPU such are virtual: what is written to them takes no memory of the host.
            place = nn.Parameter(part, requires_grad=False).detach()
            place.copy_(parameter.detach())
            self._moved.append((parameter, parameter.device))
            parameter.data = place
            if last[block] == index:
                del blocks[block]

    def give_back(self) -> None:
        """Let the parameters lie where they did before, their values as they are now."""
        while self._moved:
            parameter, device = self._moved.pop()
            parameter.data = torch.empty_like(parameter, device=device, requires_grad=False).copy_(
                parameter.detach()
            )


def block_places(sizes: Iterable[int]) -> list[tuple[int, int, int]]:
    """Where tensors lie in blocks of a power of two each: number and size of the block, and the offset in it.

    >>> block_places([3 << 19, 1 << 19, 1 << 19])
    [(0, 2097152, 0), (0, 2097152, 1572864), (1, 524288, 0)]
    """
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left = sum(rounded)
    ends: list[int] = []
    blocks: list[int] = []
    found = []
    for size in rounded:
        number = next((n for n, end in enumerate(ends) if end + size <= blocks[n]), None)
        if number is None:
            number = len(blocks)
            fitting = 1 << max(left.bit_length() - 1, 0)
            blocks.append(
                max(min(fitting, LARGEST_BLOCK), _SMALLEST_BLOCK, 1 << max(size - 1, 0).bit_length())
            )
            ends.append(0)
        found.append((number, blocks[number], ends[number]))
        ends[number] += size
        left -= size
    return found
