"""What torch's allocator holds in this process, and what its tensors are for, cheaply and without changing anything.

NOTE [Categories of a plain process]: torch tells no purpose of a block. A global hook of torch hears of each optimizer
that steps; its parameters, their gradients and its states are summed every few seconds. What is left is named
``activations and others``. Storages that several tensors share count once.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from vramfit.watching.watch_reading import DeviceUse

REST = "activations and others"

_STEP_GAP = 0.05
"""Seconds between two ends of steps at which memory is read: reading takes some 50 microseconds."""


class HeldBytes(NamedTuple):
    """What a device holds: allocated, the most so far, and free in segments that cannot be given back."""

    allocated: int
    peak: int
    split: int


class FigureSource(Protocol):
    """Gives the figures of this process' devices; called from a thread of its own."""

    def devices(self, *, categories: bool) -> Iterable[DeviceUse]:
        """The figures now; with sums by what tensors are for, if asked."""
        ...

    def held(self) -> dict[int, HeldBytes]:
        """What each device that is in use holds, at once."""
        ...


class StepEnds:
    """Counts steps of optimizers, and notes what is allocated when they end.

    Args:
        held: gives that, by device.

    Attributes:
        steps: that have ended; of several optimizers those of the one that steps most often.
        after: what was held at the last end that was looked at.
        optimizers: those that have stepped.
    """

    def __init__(self, held: Callable[[], dict[int, HeldBytes]]) -> None:
        self._held = held
        self._counts: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._last = 0.0
        self._main: weakref.ref[torch.optim.Optimizer] | None = None
        self.steps = 0
        self.after: dict[int, HeldBytes] = {}
        self._hook = register_optimizer_step_post_hook(self._stepped)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that have stepped and are alive."""
        # A copy in one go: the program makes optimizers in another thread.
        return [one for reference in self._counts.keyrefs() if (one := reference()) is not None]

    def close(self) -> None:
        """Hear of no more steps."""
        self._hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        count = self._counts.get(optimizer, 0) + 1
        self._counts[optimizer] = count
        # Figures are compared from step to step, so they are taken after one and the same optimizer.
        if count > self.steps:
            self.steps = count
            if self._main is None or self._main() is None:
                self._main = weakref.ref(optimizer)
        now = time.monotonic()
        if self._main is not None and self._main() is optimizer and now - self._last >= _STEP_GAP:
            self._last = now
            with contextlib.suppress(Exception):  # it runs inside of the program's own step
                self.after = self._held()


class TorchFigures:
    """The figures of this process' CUDA devices, as torch tells them.

    Args:
        ends: hears of optimizers; None knows no categories.
    """

    def __init__(self, ends: StepEnds | None = None) -> None:
        self.ends = ends

    def held(self) -> dict[int, HeldBytes]:
        """What each device that is in use holds."""
        if not torch.cuda.is_initialized():
            return {}
        found = {}
        for index in range(torch.cuda.device_count()):
            stats = torch.cuda.memory_stats(index)
            if stats.get("reserved_bytes.all.current"):
                found[index] = HeldBytes(
                    stats["allocated_bytes.all.current"],
                    stats["allocated_bytes.all.peak"],
                    stats["inactive_split_bytes.all.current"],
                )
        return found

    def devices(self, *, categories: bool) -> Iterable[DeviceUse]:
        """The figures of each device on which this process has tensors; a device is never initialised by this."""
        sums = self._sums() if categories and self.ends is not None else {}
        for index, (allocated, peak, split) in self.held().items():
            free, total = torch.cuda.mem_get_info(index)
            known = {name: held for (device, name), held in sums.items() if device == index}
            if known:
                known[REST] = max(0, allocated - sum(known.values()))
            yield DeviceUse(
                index=index,
                name=torch.cuda.get_device_name(index),
                kind="card",
                allocated=allocated,
                reserved=torch.cuda.memory_reserved(index),
                peak=peak,
                free=free,
                total=total,
                split=split,
                categories=known,
            )

    def _sums(self) -> dict[tuple[int, str], int]:
        """Bytes by device and category. The program works on meanwhile: what changes under our hands is left out."""
        assert self.ends is not None
        sums: dict[tuple[int, str], int] = {}
        seen: set[int] = set()

        def add(name: str, tensor: Any) -> None:
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cuda":
                return
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                key = tensor.device.index, name
                sums[key] = sums.get(key, 0) + storage.nbytes()

        for optimizer in self.ends.optimizers:
            for group in list(optimizer.param_groups):
                for parameter in list(group["params"]):
                    with contextlib.suppress(
                        RuntimeError, NotImplementedError
                    ):  # of layouts without a storage
                        add("parameters", parameter)
                        add("gradients", parameter.grad)
                        for value in list(optimizer.state.get(parameter, {}).values()):
                            add("optimizer state", value)
        return sums
