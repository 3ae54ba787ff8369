"""Unified memory: what a device and the host both address, in pages that move to who touches them.

NOTE [One thread]: ``torch.cuda._use_uvm`` (torch 2.13, private, needs cuda-python) sends what one thread allocates to
cudaMallocManaged, as long as its block is open. So a thread of our own opens the block and allocates for all others;
the block stays open until the tier is closed, since the functions that free the memory live as long.
"""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from vramfit.errors import EnvironmentUnfitError, UsageError
from vramfit.gpus import find_gpu
from vramfit.runtime.tiers.memory_tiers import DeviceTier
from vramfit.runtime.tiers.tier import Copy, Layout
from vramfit.torch_internals.cuda_memory import unified_memory
from vramfit.units import format_bytes


class Unified(Enum):
    """Whether the device's tier is unified memory."""

    OFF = "off"
    """Plain memory of the device."""
    WITHIN = "within"
    """Unified, and no more than is free on the device."""
    BEYOND = "beyond"
    """Unified, also more than is free there: what is touched moves over the link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnifiedPrice:
    """What unified memory costs on a card.

    Attributes:
        beyond: bytes over what is free on the card; 0 where it fits.
        link_bytes_per_second: of the link to the host, at best; 0 where the card is not in the catalogue.
    """

    beyond: int
    link_bytes_per_second: float

    @property
    def seconds_a_pass(self) -> float:
        """Seconds to move what is beyond in and out once, at best: pages of 4 KiB to 2 MiB rarely reach the link's."""
        return 2 * self.beyond / self.link_bytes_per_second if self.link_bytes_per_second else 0.0

    def __str__(self) -> str:
        if not self.beyond:
            return "it fits the card: pages are moved once"
        if not self.link_bytes_per_second:
            return (
                f"{format_bytes(self.beyond)} beyond the card's free memory move over its link in each pass"
            )
        return (
            f"{format_bytes(self.beyond)} beyond the card's free memory move over its link in each pass: "
            f"{self.seconds_a_pass:.2f} s at best"
        )


def unified_price(device: torch.device, capacity: int) -> UnifiedPrice:
    """What a tier of unified memory of that size costs on a device, as it is now."""
    free, _ = torch.cuda.mem_get_info(device)
    try:
        rate = find_gpu(torch.cuda.get_device_name(device)).host_link
    except UsageError:
        rate = 0.0
    return UnifiedPrice(beyond=max(0, capacity - free), link_bytes_per_second=rate)


def unified_refused(device: torch.device) -> str | None:
    """Why a device has no unified memory here; None where it has."""
    if device.type != "cuda":
        return "there is no card"
    if unified_memory() is None:
        return f"torch {torch.__version__} cannot allocate it; 2.13 can"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "cuda-python is not installed: pip install cuda-python"
    return None


class UnifiedTier(DeviceTier):
    """Unified memory. See NOTE [One thread].

    Args:
        capacity: most bytes.
        device: a card.
        mode: whether more may be taken than is free there.

    Raises:
        UsageError: it is more than is free, and that was not asked for.
        EnvironmentUnfitError: it cannot be had here.

    Attributes:
        cost: what it costs.
    """

    def __init__(self, capacity: int, device: torch.device, mode: Unified) -> None:
        super().__init__("device", capacity, device)
        if (why := unified_refused(device)) is not None:
            raise EnvironmentUnfitError(
                f"there is no unified memory: {why}", 'Leave out unified, or give "off"'
            )
        self.cost = unified_price(device, capacity)
        if self.cost.beyond and mode is not Unified.BEYOND:
            raise UsageError(
                f"unified memory of {format_bytes(capacity)} is {format_bytes(self.cost.beyond)} more than is free",
                f'Give a smaller budget, or unified="beyond": {self.cost}',
            )
        self._asked: queue.SimpleQueue[tuple[Layout, queue.SimpleQueue[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, source: torch.Tensor, copy: Copy) -> Any:
        """See `Tier`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="vramfit-unified", daemon=True)
            self._thread.start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((Layout.of(source), answer))
        target = answer.get()
        if isinstance(target, BaseException):
            raise target
        copy(source, target)
        return target

    def adopt(self, tensor: torch.Tensor) -> Any | None:
        """See `Tier`: plain memory of the device is not taken over."""
        del tensor
        return None

    def close(self) -> None:
        """See `Tier`."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        with contextlib.ExitStack() as stack:
            failed: BaseException | None = None
            try:
                allocating = unified_memory()
                assert allocating is not None  # `unified_refused` has looked
                stack.enter_context(allocating(self.device))
            except Exception as error:  # told to who asks
                failed = error
            while (asked := self._asked.get()) is not None:
                layout, answer = asked
                try:
                    if failed is not None:
                        raise failed
                    made = torch.empty_strided(
                        layout.shape, layout.stride, dtype=layout.dtype, device=self.device
                    )
                    answer.put(made)
                    del made
                except BaseException as error:  # told to who asks
                    answer.put(error)
