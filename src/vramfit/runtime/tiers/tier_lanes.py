"""Who copies between tiers, beside the computation: streams of a card, or a thread where there is none."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Protocol

import torch

from vramfit.inference.host_lane import CudaLane


class TierLane(Protocol):
    """Copies between two places. Every copy has an end, and nothing of it may go or change before that.

    A copy begins after all that the calling thread has given the device before.
    """

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Begin to fill `target`; gives the end."""
        ...

    def wait(self, end: Any) -> None:
        """Let what is computed from now on begin after that end; raises what the copy failed with."""
        ...

    def finish(self, end: Any) -> None:
        """Let the host wait for that end; raises what the copy failed with."""
        ...

    def handed_out(self, tensor: torch.Tensor) -> None:
        """A tensor is given to the calling thread, which may use it on its own stream."""
        ...


class _Task:
    """A copy that a thread does."""

    __slots__ = ("error", "over", "source", "target")

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.source: torch.Tensor | None = source
        self.target: torch.Tensor | None = target
        self.over = threading.Event()
        self.error: BaseException | None = None


class ThreadLane:
    """Copies on the CPU, one after another, in a thread that ends when nothing is left to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: deque[_Task] = deque()
        self._running = False

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """See `TierLane`."""
        task = _Task(source, target)
        with self._lock:
            self._tasks.append(task)
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, name="vramfit-tiers", daemon=True).start()
        return task

    def wait(self, end: Any) -> None:
        """See `TierLane`."""
        end.over.wait()
        if end.error is not None:
            try:
                raise end.error
            finally:
                del end  # else the error holds this frame, and this frame the error

    finish = wait

    def handed_out(self, tensor: torch.Tensor) -> None:
        """See `TierLane`."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Do one copy."""
        with torch.no_grad():
            target.copy_(source)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                task = self._tasks.popleft()
            assert task.source is not None
            assert task.target is not None
            try:
                self.copy(task.source, task.target)
            except BaseException as error:  # raised where the end is waited for
                task.error = error.with_traceback(None)  # its frames would hold the tensors
            task.source = task.target = None  # who waits counts who holds the memory
            task.over.set()
            del task


class StreamLane:
    """Copies from and to a card, on a stream in each direction. See NOTE [Whose memory] in `CudaLane`.

    Copies from and to files are not pinned: the driver stages them, and the host waits for them meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lane: CudaLane | None = None
        self._used: set[Any] = set()

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """See `TierLane`."""
        if self._lane is None:
            self._lane = CudaLane(self._device)
        now = torch.cuda.current_stream(self._device)
        for stream in self._used:  # where threads used what may be copied now
            if stream != now:
                now.wait_stream(stream)
        inwards = target.device == self._device
        with torch.no_grad():
            end = self._lane.copy_in(source, target) if inwards else self._lane.copy_out(source, target)
        return end, now

    def wait(self, end: Any) -> None:
        """See `TierLane`."""
        event, began_on = end
        torch.cuda.current_stream(self._device).wait_event(event)
        began_on.wait_event(event)  # memory returns to the stream that it was taken on

    def finish(self, end: Any) -> None:
        """See `TierLane`."""
        end[0].synchronize()

    def handed_out(self, tensor: torch.Tensor) -> None:
        """See `TierLane`."""
        now = torch.cuda.current_stream(self._device)
        if now not in self._used:
            self._used.add(now)
        if len(self._used) > 1 and tensor.device == self._device:
            tensor.record_stream(now)


def lane_for(device: torch.device) -> TierLane:
    """The lane for a device."""
    return StreamLane(device) if device.type == "cuda" else ThreadLane()
