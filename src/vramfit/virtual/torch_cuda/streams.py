"""Streams and events: classes that stand for torch's C classes, and the functions that choose a stream."""

# ruff: noqa: ARG003, ARG004  # the signatures are those of the C functions and classes

from __future__ import annotations

from typing import Any

import torch

from vramfit.patching import PatchStack
from vramfit.torch_internals.cuda_device import event_base, stream_base
from vramfit.virtual import simulated_streams as ids
from vramfit.virtual.machine import InvalidDevice
from vramfit.virtual.simulated_streams import Engine
from vramfit.virtual.torch_cuda.base import (
    CUDA_DEVICE_TYPE,
    C,
    CFunctions,
    installed_machine,
    invalid_device,
)
from vramfit.virtual.torch_cuda.devices import device_index_of

_CStream: Any = torch.Stream
_CEvent: Any = torch.Event
_RECORD_US = (
    1.0  # an event takes about a microsecond of the stream; two events never fall on the same instant
)


class StreamFunctions(CFunctions):
    """The functions of torch/csrc/cuda/Module.cpp that deal with streams."""

    def _cuda_getCurrentStream(self, device: int) -> tuple[int, int, int]:
        index = self.device(device).index
        return self.machine.current_stream(index), index, CUDA_DEVICE_TYPE

    def _cuda_getCurrentRawStream(self, device: int) -> int:
        index = self.device(device).index
        return ids.handle_of(self.machine.current_stream(index), index)

    def _cuda_getDefaultStream(self, device: int) -> tuple[int, int, int]:
        return 0, self.device(device).index, CUDA_DEVICE_TYPE

    def _cuda_getStreamFromExternal(self, handle: int, device: int) -> tuple[int, int, int]:
        index = self.device(device).index
        return ids.stream_of(handle, index), index, CUDA_DEVICE_TYPE

    def _cuda_setStream(self, stream_id: int, device_index: int, device_type: int) -> None:
        # As THCPModule_setStream_wrap: the stream's device becomes the current one too.
        assert device_type == CUDA_DEVICE_TYPE
        self.machine.current_device = self.device(device_index).index
        self.machine.set_stream(stream_id, device_index)

    def _cuda_isCurrentStreamCapturing(self) -> bool:
        return bool(self.machine.devices) and self.machine.is_capturing()


class VirtualStream(_CStream):  # type: ignore[misc]
    """A stream of a virtual device, as ``torch.Stream`` gives it.

    It is a true ``torch.Stream`` underneath, so that ``Tensor.record_stream`` and isinstance accept it.
    """

    def __new__(
        cls,
        device: Any = None,
        *,
        priority: int = 0,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int = CUDA_DEVICE_TYPE,
    ) -> VirtualStream:
        """Take the next stream of the device's pool, or name an existing one by its id and device."""
        machine = installed_machine()
        if stream_id is None or device_index is None:
            try:
                device_index = device_index_of(machine, device)
            except InvalidDevice:
                raise invalid_device() from None
            stream_id = machine.new_stream(device_index, priority)
        self: VirtualStream = _CStream.__new__(
            cls, stream_id=stream_id, device_index=device_index, device_type=device_type
        )
        return self

    @property
    def native_handle(self) -> int:
        """Its ``cudaStream_t``."""
        return ids.handle_of(self.stream_id, self.device_index)

    def is_capturing(self) -> bool:
        """Whether what is sent to it is recorded into a graph."""
        return installed_machine().captures(self.device_index, self.stream_id)

    def query(self) -> bool:
        """Whether all its work is done: always, since nothing ever runs."""
        return True

    def synchronize(self) -> None:
        """Wait for its work."""
        machine = installed_machine()
        machine.synchronize(self.device_index, until=machine.clock.reached(self.device_index, self.stream_id))

    def wait_event(self, event: Any) -> None:
        """Let later work wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Let later work wait for another stream."""
        machine = installed_machine()
        until = machine.clock.reached(stream.device_index, stream.stream_id)
        machine.clock.hold(self.device_index, self.stream_id, until)

    def record_event(self, event: Any = None) -> Any:
        """Record an event, a new one by default."""
        recorded = VirtualEvent() if event is None else event
        recorded.record(self)
        return recorded

    def __enter__(self) -> VirtualStream:
        """Make it the current stream, and its device the current device."""
        machine = installed_machine()
        self._before = (machine.current_device, machine.current_stream(self.device_index))
        machine.current_device = self.device_index
        machine.set_stream(self.stream_id, self.device_index)
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the stream and device that were current before."""
        machine = installed_machine()
        device, stream = self._before
        machine.set_stream(stream, self.device_index)
        machine.current_device = device


class CudaStreamBase(VirtualStream):
    """Stands for ``torch._C._CudaStreamBase`` (torch/csrc/cuda/Stream.cpp)."""

    def __new__(
        cls,
        priority: int = 0,
        stream_id: int = 0,
        device_index: int = 0,
        device_type: int = 0,
        stream_ptr: int = 0,
    ) -> CudaStreamBase:
        """As THCPStream_pynew: a wrapped handle, an existing stream, or a new one on the current device."""
        machine = installed_machine()
        if not machine.devices:
            raise RuntimeError("No CUDA GPUs are available")
        if stream_ptr:
            index = machine.current_device
            stream: VirtualStream = VirtualStream.__new__(
                cls, stream_id=ids.stream_of(stream_ptr, index), device_index=index
            )
        elif stream_id or device_index or device_type:
            stream = VirtualStream.__new__(cls, stream_id=stream_id, device_index=device_index)
        else:
            stream = VirtualStream.__new__(cls, priority=priority)
        assert isinstance(stream, CudaStreamBase)
        return stream

    @property
    def cuda_stream(self) -> int:
        """Its ``cudaStream_t``."""
        return self.native_handle

    @property
    def priority(self) -> int:
        """Its priority; lower is more urgent."""
        return ids.priority_of(self.stream_id)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Lowest and highest priority."""
        return ids.LOWEST_PRIORITY, ids.HIGHEST_PRIORITY


class VirtualEvent(_CEvent):  # type: ignore[misc]
    """An event of a virtual device, as ``torch.Event`` gives it; its time is the simulated clock's."""

    _timing: bool
    _index: int | None
    _time_us: float | None

    def __new__(
        cls,
        device: Any = None,
        *,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
    ) -> VirtualEvent:
        """Make an event that has not been recorded."""
        # A CPU build cannot make a CUDA event; the CPU one underneath satisfies isinstance.
        self: VirtualEvent = _CEvent.__new__(cls, device="cpu", enable_timing=enable_timing)
        self._timing = enable_timing
        self._index = None if device is None else torch.device(device).index
        self._time_us = None
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass  # __new__ takes the arguments

    @property
    def device(self) -> torch.device | None:
        """The device it was recorded on, or was made for."""
        return None if self._index is None else torch.device("cuda", self._index)

    @property
    def event_id(self) -> int:
        """Its ``cudaEvent_t``; 0 before it was recorded."""
        return 0 if self._time_us is None else id(self)

    def record(self, stream: Any = None) -> None:
        """Take the time, on the current stream by default.

        Raises:
            RuntimeError: the event belongs to another device than the stream.
        """
        machine = installed_machine()
        index = machine.current_device if stream is None else stream.device_index
        if self._index is not None and self._index != index:
            raise RuntimeError(
                f"Event device {self._index} does not match recording stream's device {index}."
            )
        self._index = index
        number = machine.current_stream(index) if stream is None else stream.stream_id
        machine.clock.work(_RECORD_US, index, number, Engine.NONE)
        self._time_us = machine.clock.reached(index, number)

    def wait(self, stream: Any = None) -> None:
        """Let a stream wait for it, the current one by default."""
        if self._time_us is None:
            return
        machine = installed_machine()
        device = machine.current_device if stream is None else stream.device_index
        number = machine.current_stream(device) if stream is None else stream.stream_id
        machine.clock.hold(device, number, self._time_us)

    def query(self) -> bool:
        """Whether the work before it is done: always, since nothing ever runs."""
        return True

    def synchronize(self) -> None:
        """Wait for the work before it."""
        if self._index is not None and self._time_us is not None:
            installed_machine().synchronize(self._index, until=self._time_us)

    def elapsed_time(self, end_event: Any) -> float:
        """Simulated milliseconds from this event to another.

        Raises:
            ValueError: one of them does not time, or was not recorded.
        """
        # ATen/cuda/CUDAEvent.h, elapsed_time
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time_us is None or end_event._time_us is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        elapsed: float = (end_event._time_us - self._time_us) / 1e3
        return elapsed


class CudaEventBase(VirtualEvent):
    """Stands for ``torch._C._CudaEventBase`` (torch/csrc/cuda/Event.cpp)."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> CudaEventBase:
        """Make an event that has not been recorded."""
        event = VirtualEvent.__new__(cls, enable_timing=enable_timing)
        assert isinstance(event, CudaEventBase)
        return event

    @property
    def cuda_event(self) -> int:
        """Its ``cudaEvent_t``; 0 before it was recorded."""
        return self.event_id

    @classmethod
    def from_ipc_handle(cls, device: Any, handle: bytes) -> CudaEventBase:
        """An event of another process; it counts as recorded now."""
        event: CudaEventBase = cls()
        event._index = device_index_of(installed_machine(), device)
        event._time_us = installed_machine().clock_us
        return event

    def ipc_handle(self) -> bytes:
        """A handle for other processes; an event that was not recorded is given the current device."""
        if self._index is None:
            self._index = installed_machine().current_device
        return id(self).to_bytes(64, "little")


class _DispatchingMeta(type):
    """Metaclass of what stands for ``torch.Stream`` and ``Event``: cuda ones are ours, others torch's."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._stands_for_c_class():
            return super().__call__(*args, **kwargs)
        device = kwargs.get("device", args[0] if args else None)
        named = "device_type" in kwargs
        cuda = kwargs.get("device_type") == CUDA_DEVICE_TYPE if named else _is_cuda(device)
        return (cls._virtual if cuda else cls._real)(*args, **kwargs)  # type: ignore[attr-defined]

    def __instancecheck__(cls, instance: object) -> bool:
        if cls._stands_for_c_class():
            return isinstance(instance, cls._real)  # type: ignore[attr-defined]
        return super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        if cls._stands_for_c_class():
            return issubclass(subclass, cls._real)  # type: ignore[attr-defined]
        return super().__subclasscheck__(subclass)

    def _stands_for_c_class(cls) -> bool:
        return "_real" in vars(cls)


class Stream(_CStream, metaclass=_DispatchingMeta):  # type: ignore[misc]
    """Stands for ``torch.Stream``."""

    __module__ = "torch"
    _real = _CStream
    _virtual = VirtualStream


class Event(_CEvent, metaclass=_DispatchingMeta):  # type: ignore[misc]
    """Stands for ``torch.Event``."""

    __module__ = "torch"
    _real = _CEvent
    _virtual = VirtualEvent


def _is_cuda(device: Any) -> bool:
    # Without a type the accelerator is meant, which is cuda here.
    if device is None or isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


def patch_streams(patches: PatchStack) -> list[tuple[object, object]]:
    """Replace the base classes of streams and events; gives what to rebind elsewhere.

    ``torch.cuda.Stream`` and ``Event`` themselves are made anew from torch's own source by the caller.
    """
    pairs: list[tuple[object, object]] = [(_CStream, Stream), (_CEvent, Event)]
    for place, new in ((stream_base, CudaStreamBase), (event_base, CudaEventBase)):
        pairs.append((place.get(), new))
        place.supply(patches, new)
    for name, new in (("Stream", Stream), ("Event", Event)):
        patches.set(torch, name, new)
        patches.set(C, name, new)
    return pairs
