"""Frees the blocks of sequences that have ended while ``generate`` goes on with the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import StoppingCriteria

from vramfit.errors import UsageError


class FinishAtEnd(StoppingCriteria):
    """Looks at the last tokens of each row, as a stopping criterion of ``generate`` that stops nothing itself.

    Args:
        ends: tokens after which a sequence gets no more.
        rows: says how many sequences the cache holds, which are those of ``generate``.
        finish: frees one of them.
    """

    def __init__(
        self, ends: frozenset[int], *, rows: Callable[[], int], finish: Callable[[int], None]
    ) -> None:
        self._ends, self._rows, self._finish = ends, rows, finish
        self._done: set[int] = set()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Free the rows that ended with their last token.

        Args:
            input_ids: all tokens so far, [rows, tokens].

        Raises:
            UsageError: the rows are not those of the cache: a search with beams looks at more.
        """
        del scores, kwargs
        rows = self._rows()
        if len(input_ids) != rows:
            raise UsageError(
                f"finish_at is asked about {len(input_ids)} rows, and the cache holds {rows}",
                "Leave it out with num_beams, and give generate() the cache that it is of",
            )
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if token in self._ends and row not in self._done:
                self._done.add(row)
                self._finish(row)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
