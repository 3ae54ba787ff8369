"""Prompts of different lengths in one padded batch, with what they have in common first."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.inference.kv_cache.cached_batch import Prompt


class PaddingSide(enum.Enum):
    """Where padding stands."""

    LEFT = "left"
    """Before everything."""
    MIDDLE = "middle"
    """Behind what all prompts have in common."""


@dataclass(frozen=True, kw_only=True)
class LaidPrompts:
    """A padded batch.

    Attributes:
        tokens: what stands in each column of each row, padding included.
        real: for each row the columns that are no padding.
    """

    tokens: tuple[tuple[int, ...], ...]
    real: tuple[tuple[int, ...], ...]

    @property
    def width(self) -> int:
        """Columns."""
        return len(self.tokens[0])

    @classmethod
    def from_mask(cls, tokens: Sequence[Sequence[int]], mask: Sequence[Sequence[int]]) -> LaidPrompts:
        """A batch as a tokenizer pads it."""
        real = (tuple(at for at, one in enumerate(row) if one) for row in mask)
        return cls(tokens=tuple(map(tuple, tokens)), real=tuple(real))

    def prompt(self, room: int = 0) -> Prompt:
        """What a cache is told of it."""
        tokens = tuple(
            tuple(row[at] for at in real) for row, real in zip(self.tokens, self.real, strict=True)
        )
        return Prompt(width=self.width, columns=self.real, tokens=tokens, room=room)

    def tensors(self, device: Any) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, int64 ``[batch, columns]``."""
        mask = torch.zeros(len(self.tokens), self.width, dtype=torch.int64)
        for row, real in enumerate(self.real):
            mask[row, list(real)] = 1
        return {
            "input_ids": torch.tensor(self.tokens, dtype=torch.int64).to(device),
            "attention_mask": mask.to(device),
        }


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with; the last one of the shortest does not count, since it is to be read."""
    shortest, longest = min(map(list, prompts)), max(map(list, prompts))
    same = 0
    while same < len(shortest) and shortest[same] == longest[same]:
        same += 1
    return min(same, min(map(len, prompts)) - 1) if len(prompts) > 1 else len(prompts[0]) - 1


def lay_prompts(prompts: Sequence[Sequence[int]], prefix: int, pad: int, side: PaddingSide) -> LaidPrompts:
    """Lay prompts out.

    Args:
        prompts: token ids.
        prefix: tokens that all begin with.
        pad: the token of padding.
        side: where padding stands.
    """
    width = max(map(len, prompts))
    tokens, real = [], []
    for one in prompts:
        gap = width - len(one)
        first = prefix if side is PaddingSide.MIDDLE else 0
        tokens.append((*one[:first], *[pad] * gap, *one[first:]))
        real.append((*range(first), *range(first + gap, width)))
    return LaidPrompts(tokens=tuple(tokens), real=tuple(real))
