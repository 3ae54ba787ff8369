"""Lets go of what a failed attempt held, so that a retry begins with the memory that the attempt began with.

NOTE [Order]: an exception holds its traceback, that the frames, these their local tensors. As long as its handler runs
it cannot be freed, whatever is collected and emptied there. So the handler only clears the frames; garbage is collected
and the allocator's cache emptied after it was left.
"""

from __future__ import annotations

import gc
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from vramfit.runtime.oom_forms import MemoryShortage, chain_of, recognised
from vramfit.torch_internals.cuda_memory import clear_cublas_workspaces
from vramfit.units import format_bytes, parse_bytes

T = TypeVar("T")


def clear_frames(error: BaseException) -> None:
    """Let go of what the frames of a shortage hold, and of shortages that it was raised from; inside of its handler."""
    for one in list(chain_of(error)):
        if one is not error and recognised(one) is None:
            continue  # the program's own, which it may keep: what the shortage was raised during is only let go of
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        one.__context__ = one.__cause__ = None
    if recognised(getattr(sys, "last_value", None) or ValueError()) is None:
        return
    for name in ("last_exc", "last_value", "last_traceback"):  # of an interactive session, an attempt before
        if hasattr(sys, name):
            setattr(sys, name, None)


def release_memory(device: torch.device) -> None:
    """Collect dead cycles, wait for the device, and give its cached segments back; after the handler was left."""
    gc.collect()
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    # Blocks that another stream still works on are freed once it has passed (github.com/pytorch/pytorch/issues/189504).
    module.synchronize(device)
    module.empty_cache()


def release_workspaces(device: torch.device) -> None:
    """Let go of cuBLAS' workspaces too: torch keeps them as allocated, wherever there was room in an earlier step.

    Each is taken again at the next product of matrices.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()
    release_memory(device)


class Recovery:
    """Tells shortages from other errors, and makes room after them.

    Args:
        device: where memory runs out.

    Attributes:
        last: the latest shortage.
        count: shortages so far.
        on_retry: called with the shortage where something is done again that no rung is taken for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last: MemoryShortage | None = None
        self.on_retry: Callable[[MemoryShortage], None] | None = None
        self.count = 0

    def noted(self, error: BaseException) -> bool:
        """Whether an error is a shortage; its frames are cleared then. To be called in its handler."""
        found = recognised(error)
        if found is None:
            return False
        self.last = found
        self.count += 1
        clear_frames(error)
        return True

    def release(self) -> None:
        """Make room; to be called after the handler was left."""
        release_memory(self.device)

    def retry(self) -> None:
        """Make room and say that something is done again; to be called after the handler was left."""
        self.release()
        if self.on_retry is not None and self.last is not None:
            self.on_retry(self.last)

    def insist(self, action: Callable[[], T], tries: int = 3) -> T:
        """Do what changes nothing where it fails, again where it ran out of memory.

        Raises:
            BaseException: the last attempt's error, or another than a shortage.
        """
        for left in range(tries - 1, 0, -1):
            del left
            try:
                return action()
            except BaseException as error:
                if not self.noted(error):
                    raise
            self.retry()
        return action()


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryNow:
    """What a device holds, in bytes.

    Attributes:
        allocated: of torch's tensors.
        reserved: of torch's allocator.
        free: for anyone.
    """

    allocated: int
    reserved: int
    free: int

    @property
    def within_reach(self) -> int:
        """What torch could allocate beside what is alive, were it in one piece."""
        return self.free + self.reserved - self.allocated

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.allocated)} allocated, {format_bytes(self.reserved)} reserved, "
            f"{format_bytes(self.free)} free"
        )


def memory_now(device: torch.device) -> MemoryNow | None:
    """What a card holds; None for the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return MemoryNow(
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        free=free,
    )


_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


def requested_bytes(message: str) -> int:
    """What the request that failed asked for; 0 where the message does not tell."""
    found = _TRIED.search(message)
    if found is None:
        return 0
    words = found.group(1).removesuffix(" bytes")
    return int(words) if words.isdigit() else parse_bytes(words.replace(" ", ""))
