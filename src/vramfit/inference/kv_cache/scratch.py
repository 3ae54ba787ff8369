"""One buffer for the keys and values of a layer, which all layers of a cache are gathered into in turn."""

from __future__ import annotations

import torch

STEP_COLUMNS = 256
"""The buffer grows by so many columns at once: what is freed for a larger one fits no other, so growth is rare."""


def scratch_columns(columns: int, expected: int = 0) -> int:
    """Columns that the buffer has for a batch that has come to so many, where so many were expected."""
    return expected if columns <= expected else -(-columns // STEP_COLUMNS) * STEP_COLUMNS


def expected_columns(room: int, window: int | None, sinks: int) -> int:
    """Columns that a layer reads at most while tokens come one by one, in a batch that gets so many."""
    return room if window is None else min(room, window + sinks)


class GatherScratch:
    """A buffer that is made at its first use, and again when more columns are needed; nothing in it is kept."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """What it takes."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def reserve(self, numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A flat buffer of at least so many numbers."""
        buffer = self._buffer
        if buffer is None or buffer.numel() < numbers or buffer.dtype != dtype or buffer.device != device:
            self._buffer = buffer = None  # freed before the larger one is made: they never are there together
            with torch.inference_mode(False):
                self._buffer = buffer = torch.empty(numbers, dtype=dtype, device=device)
        return buffer

    def free(self) -> None:
        """Give it back."""
        self._buffer = None
