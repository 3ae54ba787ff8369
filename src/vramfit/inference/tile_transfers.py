"""Tiles on their way: up to the device and back to the host, on streams of their own and through reused memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from vramfit.inference.arrays import has_values

Arrived: TypeAlias = Callable[[torch.Tensor, bool], None]
"""Takes a tensor on the host, and whether it is hollow: without values, as on the virtual GPU. It owns the tensor until
it returns."""

_ALIGNMENT = 64


class Arena:
    """Host memory that one batch after another lies in: as large as the largest so far.

    Args:
        pinned: whether its pages are locked, so that a card copies without waiting.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """What it holds from the system."""
        return self._bytes.nbytes

    def lay_out(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        """Memory for some tensors; what was there before is lost."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
        places, end = [], 0
        for size in sizes:
            places.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if end > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8)  # the old goes before the new comes
            self._bytes = torch.empty(end, dtype=torch.uint8, pin_memory=self._pinned)
        return [
            self._bytes[place : place + size].view(dtype).view(shape)
            for place, size, (shape, dtype) in zip(places, sizes, shapes, strict=True)
        ]


@dataclass(slots=True)
class Leaving:
    """Tensors that leave the device.

    Attributes:
        sources: they themselves, until `let_go`.
        nbytes: of what they keep on the device.
        hosts: their copies.
        arrived: what takes each copy.
        end: when the copies are complete.
        hollow: whether they hold no values.
    """

    sources: list[torch.Tensor]
    nbytes: int
    hosts: list[torch.Tensor]
    arrived: list[Arrived]
    end: Any
    hollow: list[bool]


class Transfers(Protocol):
    """Ways between the host and a device."""

    @property
    def held_bytes(self) -> int:
        """Host memory for what is on its way."""
        ...

    def stage(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """A batch of tiles side by side on the host, ready for `up`."""
        ...

    def up(self, batch: torch.Tensor) -> torch.Tensor:
        """The batch on the device; nothing that is computed from now on comes before it."""
        ...

    def up_early(self, batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The batch on the device, and its end; what is computed before `wait` for that must not use it."""
        ...

    def wait(self, end: Any) -> None:
        """Let what the device computes from now on begin after that end."""
        ...

    def down(self, parts: list[tuple[torch.Tensor, Arrived]]) -> Leaving:
        """Send tensors to the host; what was sent before has been collected."""
        ...

    def let_go(self, leaving: Leaving) -> None:
        """Give up what leaves on the device: what is computed from now on may use its memory."""
        ...

    def collect(self, leaving: Leaving) -> None:
        """Wait until all has arrived, and give it to those who take it."""
        ...


class InPlace:
    """Nothing to carry, as the model computes on the CPU; or a device without streams, which waits for each copy."""

    held_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stage(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """See `Transfers`."""
        return torch.stack(blocks)  # a copy: the model may change it

    def up(self, batch: torch.Tensor) -> torch.Tensor:
        """See `Transfers`."""
        return batch.to(self._device)

    def up_early(self, batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Transfers`."""
        return self.up(batch), None

    def wait(self, end: Any) -> None:
        """See `Transfers`."""

    def down(self, parts: list[tuple[torch.Tensor, Arrived]]) -> Leaving:
        """See `Transfers`."""
        for tensor, take in parts:
            take(tensor.to("cpu"), not has_values(tensor))
        return Leaving([], 0, [], [], None, [])

    def let_go(self, leaving: Leaving) -> None:
        """See `Transfers`."""

    def collect(self, leaving: Leaving) -> None:
        """See `Transfers`."""


class CardTransfers:
    """A stream in each direction, and pinned memory for two batches of inputs and one of results.

    Memory of the card is taken and given back on the stream of the computation alone (see NOTE [Whose memory] in
    vramfit/inference/host_lane.py): that stream waits for a copy before its source is given up.

    Args:
        device: a card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._upwards, self._downwards = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._staged = [Arena(pinned=True), Arena(pinned=True)]
        self._uploaded: list[Any] = [None, None]
        self._sent = Arena(pinned=True)
        self._turn = 0

    @property
    def held_bytes(self) -> int:
        """See `Transfers`."""
        return sum(arena.nbytes for arena in (*self._staged, self._sent))

    def stage(self, blocks: list[torch.Tensor]) -> torch.Tensor:
        """See `Transfers`."""
        first = blocks[0]
        if first.device.type != "cpu":
            return torch.stack(blocks)  # a copy: the model may change it
        self._turn = 1 - self._turn
        if (end := self._uploaded[self._turn]) is not None:
            end.synchronize()
        (batch,) = self._staged[self._turn].lay_out([((len(blocks), *first.shape), first.dtype)])
        for place, block in zip(batch, blocks, strict=True):
            place.copy_(block)
        return batch

    def up(self, batch: torch.Tensor) -> torch.Tensor:
        """See `Transfers`."""
        if batch.device.type != "cpu":
            return batch
        made = batch.to(self._device, non_blocking=True)
        self._uploaded[self._turn] = torch.cuda.current_stream(self._device).record_event()
        return made

    def up_early(self, batch: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Transfers`."""
        if batch.device.type != "cpu":
            return batch, None
        made = torch.empty(batch.shape, dtype=batch.dtype, device=self._device)
        self._upwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._upwards):
            made.copy_(batch, non_blocking=True)
            end = self._upwards.record_event()
        self._uploaded[self._turn] = end
        return made, end

    def wait(self, end: Any) -> None:
        """See `Transfers`."""
        if end is not None:
            torch.cuda.current_stream(self._device).wait_event(end)

    def down(self, parts: list[tuple[torch.Tensor, Arrived]]) -> Leaving:
        """See `Transfers`."""
        sources = [tensor for tensor, _ in parts]
        hosts = self._sent.lay_out([(tuple(one.shape), one.dtype) for one in sources])
        self._downwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._downwards):
            for source, host in zip(sources, hosts, strict=True):
                host.copy_(source, non_blocking=True)
            end = self._downwards.record_event()
        return Leaving(
            sources,
            sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in sources}.values()),
            hosts,
            [take for _, take in parts],
            end,
            [not has_values(source) for source in sources],
        )

    def let_go(self, leaving: Leaving) -> None:
        """See `Transfers`."""
        if leaving.sources:
            self.wait(leaving.end)
            leaving.sources.clear()

    def collect(self, leaving: Leaving) -> None:
        """See `Transfers`."""
        if leaving.end is not None:
            leaving.end.synchronize()
        for host, take, hollow in zip(leaving.hosts, leaving.arrived, leaving.hollow, strict=True):
            take(host, hollow)
        leaving.hosts.clear()
