"""How a batch comes to where it is used: as it is on the CPU, or by pinned buffers and a stream beside on a card."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vramfit.runtime.tiers.memory_tiers import rounded
from vramfit.runtime.tiers.tier import Layout, dense
from vramfit.workload.containers import mapped_leaves, tensors_in

_ALIGNMENT = 64
"""Bytes between the places of tensors in a buffer: a line of the host's cache."""

_BUFFERS = 2
"""One is filled while the other one's copy runs."""


class BatchLane(Protocol):
    """Brings batches to a device, in one thread, for a consumer in another."""

    pinned_bytes: int
    """Of its buffers."""
    reads_ahead: bool
    """Whether a batch that waits for its place takes nothing of it."""

    def nbytes(self, batch: Any) -> int:
        """What a batch will take where it is brought to."""
        ...

    def place(self, batch: Any) -> tuple[Any, Any]:
        """The batch on the device, its copies begun, and their end."""
        ...

    def hand_out(self, batch: Any, end: Any) -> None:
        """Let what the calling thread computes from now on begin after that end."""
        ...


class StraightLane:
    """Batches of the CPU: they are what the loader gave."""

    pinned_bytes = 0
    reads_ahead = False

    def nbytes(self, batch: Any) -> int:
        """See `BatchLane`."""
        return sum(tensor.nbytes for tensor in _each(batch))

    def place(self, batch: Any) -> tuple[Any, Any]:
        """See `BatchLane`."""
        return batch, None

    def hand_out(self, batch: Any, end: Any) -> None:
        """See `BatchLane`."""


class PinnedLane:
    """Batches to a card.

    NOTE [A stream beside]: memory for a batch is taken on the copying stream, so that its copy waits for nothing that
    the consumer computes. It belongs to that stream's pool, and ``record_stream`` keeps it from being used again there
    before the consumer's stream has come to where it let go. A pinned buffer is filled again when the copy out of it
    is over, which this thread waits for. A tensor that is pinned already needs no buffer: torch keeps its memory until
    the copy is over (aten/src/ATen/core/CachingHostAllocator.h, record_event).

    Args:
        device: the card.
    """

    reads_ahead = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: list[torch.Tensor | None] = [None] * _BUFFERS
        self._ends: list[Any] = [None] * _BUFFERS
        self._turn = 0
        self.pinned_bytes = 0

    def nbytes(self, batch: Any) -> int:
        """See `BatchLane`."""
        return sum(tensor.nbytes for tensor in _each(batch) if tensor.device != self._device)

    def place(self, batch: Any) -> tuple[Any, Any]:
        """See `BatchLane`."""
        staged = {id(one): dense(one) for one in _each(batch) if _can_be_staged(one)}
        buffer = self._buffer(sum(rounded(one.nbytes, _ALIGNMENT) for one in staged.values()))
        made: dict[int, torch.Tensor] = {}  # a tensor that a batch has twice is brought once
        used = 0
        # What the loader itself put on the card was computed on this thread's stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for tensor in _each(batch):
                if id(tensor) in made:
                    continue
                source = staged.get(id(tensor))
                if source is None:
                    made[id(tensor)] = tensor.to(self._device, non_blocking=True)
                    continue
                layout = Layout.of(source)
                place = layout.over(buffer[used:])
                place.copy_(source)
                used += rounded(source.nbytes, _ALIGNMENT)
                target = torch.empty_strided(
                    layout.shape, layout.stride, dtype=layout.dtype, device=self._device
                )
                made[id(tensor)] = target.copy_(place, non_blocking=True)
            end = self._stream.record_event()
        self._ends[self._turn] = end
        self._turn = (self._turn + 1) % _BUFFERS
        return mapped_leaves(batch, lambda _, leaf: made.get(id(leaf), leaf)), end

    def hand_out(self, batch: Any, end: Any) -> None:
        """See `BatchLane`."""
        now = torch.cuda.current_stream(self._device)
        now.wait_event(end)
        for tensor in _each(batch):
            if tensor.device == self._device and tensor.layout is torch.strided:
                tensor.record_stream(now)

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """The buffer whose turn it is, large enough and with nothing on its way out of it."""
        if self._ends[self._turn] is not None:
            self._ends[self._turn].synchronize()
        found = self._buffers[self._turn]
        if found is None or found.nbytes < nbytes:
            if found is not None:
                self.pinned_bytes -= found.nbytes
            self._buffers[self._turn] = found = None  # before the larger one is taken
            # torch rounds up to a power of two as well (CachingHostAllocator.h): what a longer batch needs is there.
            size = 1 << max(nbytes - 1, 511).bit_length()
            found = self._buffers[self._turn] = torch.empty(
                size, dtype=torch.uint8, device="cpu", pin_memory=True
            )
            self.pinned_bytes += size
        return found


def lane_to(device: torch.device) -> BatchLane:
    """The lane to a device."""
    return PinnedLane(device) if device.type == "cuda" else StraightLane()


def _each(batch: Any) -> list[torch.Tensor]:
    return list(tensors_in(batch))


def _can_be_staged(tensor: torch.Tensor) -> bool:
    """Whether its values are in one pageable piece; others go as torch brings them."""
    if tensor.device.type != "cpu" or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        return False
    wraps = hasattr(tensor, "__tensor_flatten__") and type(tensor).__name__ != "FakeTensor"
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested or wraps)
    return plain and not tensor.is_pinned()
