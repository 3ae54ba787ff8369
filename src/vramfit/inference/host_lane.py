"""Copies between a card and pinned host memory that run beside the computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

PINNED_ROUNDING = 2
"""A pinned block is rounded up to a power of two (aten/src/ATen/core/CachingHostAllocator.h): at most to the double."""


class Lane(Protocol):
    """Copies between a device and the host, in order with the computation of the calling thread.

    What is awaited is awaited by the device, not by the program: nothing here stops the host, except `finish`.
    """

    def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on the host, and its end, to wait for. Until `wait` for that, `flat` must neither go nor change."""
        ...

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Any:
        """Fill `host`, of the same strides; gives its end. Until then `source` must neither go nor change."""
        ...

    def back(self, hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Copies on the device, and their end, to wait for. They must neither be used nor go before `wait` for that."""
        ...

    def mark(self) -> Any:
        """The end of all that the device was given so far by the calling thread."""
        ...

    def into(self, places: list[torch.Tensor], hosts: list[torch.Tensor], after: Sequence[Any]) -> Any:
        """Fill memory on the device with what is on the host, once all of `after` have come; gives the copies' end.

        Until then `hosts` must neither go nor change.
        """
        ...

    def wait(self, end: Any) -> None:
        """Let what the device computes from now on begin after that end."""
        ...

    def finish(self, end: Any) -> None:
        """Let the host wait for that end."""
        ...

    def ended(self, end: Any) -> bool:
        """Whether that end has come already."""
        ...


class CudaLane:
    """A stream in each direction: cards have an engine for each (CUDA C++ Programming Guide, asyncEngineCount).

    NOTE [Whose memory]: memory on the card is taken and given back on the stream of the computation alone, so that
    the allocator hands it to nobody who does not come after. A copy out holds its source until the computation has
    been told to wait for it; a copy back begins after all that the computation was given before, since its target
    may lie where something of that still is. So ``record_stream`` is not needed, which would leave to chance when
    memory is free again (https://dev-discuss.pytorch.org/t/1486). On the host torch keeps a pinned block until the
    copies with it are over (aten/src/ATen/core/CachingHostAllocator.h, record_event).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outwards, self._inwards = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Lane`."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        return host, self.copy_out(flat, host)

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Any:
        """See `Lane`."""
        self._outwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._outwards):
            host.copy_(source, non_blocking=True)
            return self._outwards.record_event()

    def back(self, hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """See `Lane`."""
        made = [torch.empty_like(host, device=self._device, pin_memory=False) for host in hosts]
        return made, self.into(made, hosts, [self.mark()])

    def mark(self) -> Any:
        """See `Lane`."""
        return torch.cuda.current_stream(self._device).record_event()

    def into(self, places: list[torch.Tensor], hosts: list[torch.Tensor], after: Sequence[Any]) -> Any:
        """See `Lane`."""
        for end in after:
            self._inwards.wait_event(end)
        with torch.cuda.stream(self._inwards):
            for place, host in zip(places, hosts, strict=True):
                place.copy_(host, non_blocking=True)
            return self._inwards.record_event()

    def copy_in(self, host: torch.Tensor, target: torch.Tensor) -> Any:
        """Fill `target` on the device; gives its end. Until then neither must go nor change."""
        self._inwards.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._inwards):
            target.copy_(host, non_blocking=True)
            return self._inwards.record_event()

    def wait(self, end: Any) -> None:
        """See `Lane`."""
        torch.cuda.current_stream(self._device).wait_event(end)

    def finish(self, end: Any) -> None:
        """See `Lane`."""
        end.synchronize()

    def ended(self, end: Any) -> bool:
        """See `Lane`."""
        done: bool = end.query()
        return done


class CopyLane:
    """Copies on the CPU, done at once: the same steps where there is no card."""

    def out(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See `Lane`."""
        return flat.clone(), None

    def copy_out(self, source: torch.Tensor, host: torch.Tensor) -> Any:
        """See `Lane`."""
        host.copy_(source)

    def back(self, hosts: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """See `Lane`."""
        return [host.clone() for host in hosts], None

    def mark(self) -> Any:
        """See `Lane`."""

    def into(self, places: list[torch.Tensor], hosts: list[torch.Tensor], after: Sequence[Any]) -> Any:
        """See `Lane`."""
        del after
        for place, host in zip(places, hosts, strict=True):
            place.copy_(host)

    def wait(self, end: Any) -> None:
        """See `Lane`."""

    def finish(self, end: Any) -> None:
        """See `Lane`."""

    def ended(self, end: Any) -> bool:
        """See `Lane`."""
        del end
        return True


def lane_of(device: torch.device) -> Lane:
    """The lane between the host and a device."""
    return CudaLane(device) if device.type == "cuda" else CopyLane()
