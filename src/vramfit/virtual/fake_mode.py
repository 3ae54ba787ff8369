"""The FakeTensorMode that describes ops for the virtual card."""

from __future__ import annotations

import threading
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


class _PerThread(threading.local):
    in_kernel = False

    def __init__(self) -> None:
        self.enter_stack: list[Any] = []


class VirtualFakeMode(FakeTensorMode):
    """FakeTensorMode that never touches a device, and whose state is per thread: programs have several."""

    def __init__(self) -> None:
        self._per_thread = _PerThread()
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        # describe.py remembers: asking and filling this one takes longer than the answer, and it is one for all modes.
        self.cache_enabled = False

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread is inside a kernel, where tensors are on the meta device."""
        return self._per_thread.in_kernel

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._per_thread.in_kernel = value

    @property
    def enter_stack(self) -> list[Any]:
        """What ``__enter__`` left for ``__exit__`` on this thread."""
        return self._per_thread.enter_stack

    @enter_stack.setter
    def enter_stack(self, value: list[Any]) -> None:
        self._per_thread.enter_stack = value

    @property
    def avoid_device_init(self) -> bool:
        """Always: there is no device to initialise."""
        return True
